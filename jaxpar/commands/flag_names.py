"""Errors of the library as errors of a command line: ``keep must be`` is ``--keep must be``, ``tensor=4`` is ``--tensor 4``.

The library names its own parameters, since it does not know who calls it. Only here, where a command or a recipe has called it,
do they become flags.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

# Parameters of the library and the flags that give them, where the two have other names.
_GIVEN_BY = {
    "gpu": "compile_for",
    "num_nodes": "nodes",
    "devices_per_node": "gpus_per_node",
    "num_hidden": "hidden_layers",
}
_VERBS = "must|may|needs?|holds?|ha[sv]e?|takes?|is|are"


def flag_names(flags: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """Returns for each name the flags that tyro makes of it, an axis of the mesh last; none for positional arguments.

    Args:
        flags: A function, whose parameters are flags, or a dataclass, whose fields are.
    """
    found: dict[str, tuple[str, ...]] = {}
    for _, name, flag in sorted(_flags(flags)):
        found[name] = (*found.get(name, ()), flag)
    for other, name in _GIVEN_BY.items():
        if name in found and found.pop(other, None) is None:  # else a message may mean either
            found[other] = found[name]
    return found


def _flags(of: Callable[..., Any], before: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields the prefix of each flag, its name and the flag."""
    hints = get_type_hints(of, include_extras=True)
    is_class = dataclasses.is_dataclass(of)
    for name in [field.name for field in dataclasses.fields(of)] if is_class else inspect.signature(of).parameters:
        kind, *more = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        named = next((each.name for each in more if getattr(each, "name", None) is not None), None)
        part = name.rstrip("_").replace("_", "-") if named is None else named
        if dataclasses.is_dataclass(kind):
            is_flat = part == "" or tyro.conf.OmitArgPrefixes in more
            if is_flat or part == "mesh":  # the checks of other groups name their flags themselves
                yield from _flags(kind, before if is_flat else f"{part}.")  # pyright: ignore[reportArgumentType]
        elif tyro.conf.Positional not in more:
            yield before, name.rstrip("_"), f"--{before}{part}"


def in_flags(message: str, names: Mapping[str, tuple[str, ...]]) -> str:
    """Returns a message of the library with its parameters as flags.

    A name becomes a flag where it is the subject of the message, where it has a value, and where the remedy asks for it. Of two
    flags of one name, such as data, the axis of the mesh is meant where there is a value. A value beside a saved one keeps its
    name, which is that of config.json, as --allow-change takes it.

    >>> in_flags("zero must be 0 to 3; got zero=7, tensor=4. Choose zero from 0 to 3.", {"zero": ("--zero",)})
    '--zero must be 0 to 3; got --zero 7, tensor=4. Choose --zero from 0 to 3.'
    """
    known = f"(?P<name>{'|'.join(sorted(map(re.escape, names), key=len, reverse=True)) or '(?!)'})"
    alone = r"(?P<before>(?<![\w./'\"`(-]))"  # no part of a flag, a path, a call, or a value in quotes
    for pattern, at, after in (
        (rf"{alone}{known}=(?=[\d\[('\"-])(?![^,;]* \(saved:)", -1, " "),
        (rf"{alone}{known}=True\b", -1, ""),
        (rf"(?P<before>\A){known}(?= (?:{_VERBS})\b)", 0, ""),
        (rf"(?P<before>\bChoose (?:a smaller |a larger |another )?){known}(?= from\b|[.,])", -1, ""),
        (rf"(?P<before>\b[Gg]ive ){known}(?=[.,])", 0, ""),
    ):
        flag = lambda found, at=at, after=after: found["before"] + names[found["name"]][at] + after
        message = re.sub(pattern, flag, message)
    return message


@contextmanager
def errors_in_flags(flags: Callable[..., Any]) -> Iterator[None]:
    """Words the errors that the library raises in the ``with`` block as errors of flags."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if type(error) in (ValueError, TypeError) and error.args:  # others may hold more than a message
            error.args = (in_flags(str(error), flag_names(flags)),)
        raise
