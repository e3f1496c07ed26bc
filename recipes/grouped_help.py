"""The --help of a training recipe: its flags in groups, the common ones first. Parsing is left to the flags themselves."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_type_hints

import tyro
from shared_flags import GROUPS, SharedFlags

HELP = ("-h", "--help")


def asks_for_help(args: Sequence[str]) -> bool:
    """Returns whether a command line asks for the help."""
    return any(word in HELP for word in args)


def grouped(config: type[SharedFlags]) -> type:
    """Returns a dataclass with the flags of ``config`` in groups, each a field of its own; it is for the help alone.

    Groups are, in this order: nested flags such as the mesh, those of ``GROUPS``, and those of each class that ``config`` is
    made of. The common ones come first, those that are seldom needed last.
    """
    hints, about = get_type_hints(config, include_extras=True), dict(_about(config))
    members: dict[str, list[Any]] = {"mesh": [], "common": [], "recipe": []}
    for field in dataclasses.fields(config):
        if not dataclasses.is_dataclass(hints[field.name]):
            members.setdefault(_group(config, field.name), []).append(field)
    members["common"].sort(key=lambda field: GROUPS["common"].index(field.name))
    rare = [name for name in GROUPS if name in members and name != "common"]
    order = [*(name for name in members if name not in rare), *rare, "budget"]
    nested = {field.name: field for field in dataclasses.fields(config) if dataclasses.is_dataclass(hints[field.name])}
    parts = [
        (name, hints[name], nested[name])
        if name in nested
        else (name, *_part(name, [(each, hints[each.name], about.get(each.name, "")) for each in members[name]]))
        for name in order
    ]
    return dataclasses.make_dataclass(config.__name__, parts)


def _part(name: str, flags: Sequence[tuple[Any, Any, str]]) -> tuple[Any, Any]:
    """Returns the type and the field of a group, whose flags are named as if they were in no group."""
    fields = [(each.name, Annotated[hint, tyro.conf.arg(help=text)], _default(each)) for each, hint, text in flags]
    part = dataclasses.make_dataclass(name, fields)
    return Annotated[part, tyro.conf.OmitArgPrefixes], dataclasses.field(default_factory=part)


def _default(field: Any) -> Any:
    given = {name: getattr(field, name) for name in ("default", "default_factory")}
    return dataclasses.field(**{name: value for name, value in given.items() if value is not dataclasses.MISSING})


def _group(config: type, flag: str) -> str:
    for name, flags in GROUPS.items():
        if flag in flags:
            return name
    owner = next(each for each in reversed(config.__mro__) if flag in inspect.get_annotations(each))
    return owner.__name__.removesuffix("Flags").lower() if owner is not config else "recipe"


def _about(config: type) -> Iterator[tuple[str, str]]:
    """Yields each flag with the text below it, those of base classes first."""
    for owner in reversed(config.__mro__):
        if dataclasses.is_dataclass(owner):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            assert isinstance(body, ast.ClassDef)
            for flag, text in zip(body.body, body.body[1:], strict=False):
                if isinstance(flag, ast.AnnAssign) and isinstance(flag.target, ast.Name) and isinstance(text, ast.Expr):
                    yield flag.target.id, inspect.cleandoc(ast.literal_eval(text.value))
