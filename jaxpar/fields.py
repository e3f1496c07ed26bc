"""Checks JSON and settings with pydantic. An error names the path of the field, the rule, the value and the remedy.

    plan = fields.read(dict[str, int], parsed, "a plan", "Write it by plan --json.")
    ValueError: data of a plan must be an integer; got "8". Write it by plan --json.

Values are never converted: "8", 8.0 and True are no integers. pydantic is imported by the first check, so that it costs no time
where nothing is checked.

Messages name an argument by ``arg``: as the library calls it, or, while a command runs, by the flag that gives it. Arguments
are checked by ``check_kind``, and numbers and names by ``check_at_least``, ``check_positive``, ``check_from`` and
``check_one_of``:

    fields.check_at_least(1, seq=seq)
    ValueError: seq must be at least 1; got 0. Choose 1 or more.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import Field
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")
_flags: ContextVar[Mapping[str, str]] = ContextVar("_flags", default={})  # noqa: B039, it is never changed
MAX_SHOWN = 60  # letters of a wrong value
# The kinds of numbers of a dataclass's fields.
_NUMBERS: dict[Any, Any] = dict.fromkeys((int, int | None), Integral) | dict.fromkeys(
    (float, float | None), Real
)
# What a value must be, by the type of pydantic's error, in which braces are filled in from its context.
_RULES = {
    "int_type": "be an integer",
    "int_from_float": "be an integer",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "string_type": "be a string",
    "bool_type": "be true or false",
    "list_type": "be an array",
    "tuple_type": "be an array",
    "dict_type": "be an object",
    "model_type": "be an object",
    "model_attributes_type": "be an object",
    "dataclass_type": "be an object",
    "none_required": "be null",
    "greater_than_equal": "be at least {ge:.10g}",
    "greater_than": "be above {gt:.10g}",
    "less_than_equal": "be at most {le:.10g}",
    "less_than": "be under {lt:.10g}",
    "too_short": "have at least {min_length} items",
    "too_long": "have at most {max_length} items",
    "string_too_short": "have at least {min_length} letters",
    "string_too_long": "have at most {max_length} letters",
    "literal_error": "be {expected}",
    "string_pattern_mismatch": "match {pattern}",
    "json_invalid": "be JSON: {error}",
}


@contextmanager
def given_by(flags: Mapping[str, str]) -> Iterator[None]:
    """Names these flags for arguments of the library in the messages of the ``with`` block, where a command calls it."""
    before = _flags.set(flags)
    try:
        yield
    finally:
        _flags.reset(before)


def arg(*names: str, **values: Any) -> str:
    """Returns arguments for a message, by name and with values; in ``given_by`` they are flags.

    >>> arg("zero"), arg(stage=2, tensor=4)
    ('zero', 'stage=2, tensor=4')
    >>> with given_by({"zero": "--zero", "tensor": "--mesh.tensor"}):
    ...     arg("zero"), arg(stage=2, tensor=4)
    ('--zero', 'stage=2, --mesh.tensor 4')
    """
    flags = _flags.get()
    flag = lambda name, value: f"{flags[name]} {value}" if name in flags else f"{name}={value}"
    return ", ".join(
        [flags.get(name, name) for name in names] + [flag(*each) for each in values.items()]
    )


def is_flag(name: str) -> bool:
    """Returns whether an argument is given by a flag, while a command runs."""
    return name in _flags.get()


def switch(name: str) -> str:
    """Returns how an argument is turned on, for a message: ``resume=True``, or in ``given_by`` its flag alone."""
    return _flags.get().get(name, f"{name}=True")


def check_kind(kinds: Sequence[Any], rule: str, remedy: str, **values: object) -> None:
    """Raises for an argument that is none of some values and of none of some types; a bool is no int, and 1.0 is not 1.

    Args:
        kinds: The values and types. ValueError is raised if they are all values, such as 0, "spmd" or None, else TypeError.
        rule: What the argument must be.
        remedy: The end of a message, a sentence.
        **values: Arguments.
    """
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    for name, value in values.items():
        is_listed = any(type(value) is type(kind) and value == kind for kind in kinds)
        is_of_type = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if not is_listed and not is_of_type:
            message = f"{arg(name)} must be {rule}; got {brief(repr(value))}. {remedy}"
            raise TypeError(message) if types else ValueError(message)


def check_one_of(names: Sequence[str], remedy: str = "", /, **values: object) -> None:
    """Raises ValueError for an argument that is none of some names, with the one that may be meant and the remedy."""
    for name, value in values.items():
        if value not in names:
            near = near_name(value, names)
            meant = f" Did you mean {near!r}?" if near else ""
            otherwise = f" {remedy}" if remedy else ""
            raise ValueError(
                f"{arg(name)} must be one of {', '.join(names)}; got {value!r}.{meant}{otherwise}"
            )


def near_name(value: object, names: Iterable[str]) -> str | None:
    """Returns the name that one misspelt, cut short, with more after a hyphen, or in capitals means; None if there is none.

    One with another letter in four is another name, not a misspelt one:

    >>> near_name("H100", ["h100", "h200"]), near_name("h800", ["h100", "h200"]), near_name("jobsett", ["jobset"])
    ('h100', None, 'jobset')
    >>> near_name("h100-80gb", ["a100-80gb", "h100", "h200"])
    'h100'
    """
    names = [*names]
    text = str(value).lower()
    longer = sorted((name for name in names if text and name.startswith(text)), key=len)
    shorter = sorted(
        (name for name in names if text.startswith(f"{name.lower()}-")), key=len, reverse=True
    )
    near = longer or shorter or get_close_matches(text, names, 1, cutoff=0.8)
    return near[0] if near else None


def check_at_least(least: float, remedy: str = "", **values: float | None) -> None:
    """Raises, with the remedy, for an argument that is no number, below the least or infinite; None is left out."""
    _check_numbers(
        f"at least {least}",
        lambda value: least <= value < math.inf,
        remedy or f"Choose {least} or more.",
        values,
    )


def check_positive(remedy: str, **values: float | None) -> None:
    """Raises, with the remedy, for an argument that is no number, not above 0, or infinite; None is left out."""
    _check_numbers("positive", lambda value: 0 < value < math.inf, remedy, values)


def check_not_negative(remedy: str, **values: float | None) -> None:
    """Raises ValueError, with the remedy, for an argument that is below 0 or infinite; None is left out."""
    _check_numbers("0 or more", lambda value: 0 <= value < math.inf, remedy, values)


def check_share(remedy: str, **values: float | None) -> None:
    """Raises ValueError, with the remedy, for an argument that is below 0, or not below 1; None is left out."""
    _check_numbers("from 0 to less than 1", lambda value: 0 <= value < 1, remedy, values)


def check_from(least: float, most: float, remedy: str, **values: float) -> None:
    """Raises, with the remedy, for an argument that is no number, or not in a range, whose ends belong to it."""
    _check_numbers(f"from {least} to {most}", lambda value: least <= value <= most, remedy, values)


def _check_numbers(
    rule: str, is_right: Callable[[float], bool], remedy: str, values: Mapping[str, float | None]
) -> None:
    check_kind((Real, None), "a number", remedy, **values)
    for name, value in values.items():
        if value is not None and not is_right(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            finite = " and finite" if math.isinf(value) else ""
            raise ValueError(f"{arg(name)} must be {rule}{finite}; got {shown}. {remedy}")


def check_field(of: Field, value: Any) -> None:
    """Raises unless a value is of the kind of number that a field of a dataclass has, or one of its choices or its default.

    Args:
        of: The field. Only integers, numbers and Literals, alone or in a union, are checked; a function is always accepted.
        value: Its value.
    """
    if value is None and of.default is None:
        return
    kind, choices = _NUMBERS.get(of.type), _choices(of.type)
    if kind:
        check_kind(
            (kind,),
            "an integer" if kind is Integral else "a number",
            "Convert it.",
            **{of.name: value},
        )
    if choices and value not in choices and not callable(value):
        raise ValueError(
            f"{arg(of.name)} must be one of {', '.join(map(repr, choices))}; got {value!r}. Choose one of them."
        )


def _choices(kind: Any) -> tuple:
    """Returns the values of a Literal, alone or in a union."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(choice for part in get_args(kind) for choice in _choices(part))


def read(kind: type[Kind], value: Any, whole: str, remedy: str) -> Kind:
    """Returns parsed JSON as a type has it, such as a dataclass; raises as ``read_json`` does."""
    return read_json(kind, json.dumps(value), whole, remedy)


def read_json(kind: type[Kind], text: str | bytes, whole: str, remedy: str) -> Kind:
    """Returns JSON as a type has it.

    Args:
        kind: A dataclass, a TypedDict, a pydantic model, or any other type that pydantic knows.
        text: The JSON.
        whole: What it is, for a message about all of it.
        remedy: The end of a message, a sentence.

    Raises:
        ValueError: The text is not JSON, or not of the type; the message has the path of the first field that is wrong.
    """
    import pydantic

    try:
        return _adapter(kind).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise ValueError(
            f"{explain(error.errors()[0], whole, kind, within=f' of {whole}')[0]}. {remedy}"
        ) from error


def check(
    settings: Any,
    remedy: str,
    names: Mapping[str, str] | None = None,
    *,
    gives_default: bool = False,
) -> None:
    """Raises ValueError unless each field of a dataclass is of its type, with pydantic's rules in ``Annotated``.

    Args:
        settings: The dataclass. Its fields are left as they are.
        remedy: The end of a message, a sentence.
        names: What fields are called, where not by their names.
        gives_default: Whether a number's default, if it is above 0, is the remedy.
    """
    import pydantic

    names = names or {}
    for name, kind in get_type_hints(type(settings), include_extras=True).items():
        try:
            _adapter(kind).validate_python(getattr(settings, name), strict=True)
        except pydantic.ValidationError as error:
            message, _ = explain(error.errors()[0] | {"loc": (arg(names.get(name, name)),)}, "")
            default = getattr(type(settings), name, None)
            is_example = gives_default and isinstance(default, int | float) and default > 0
            raise ValueError(
                f"{message}. {f'For example: {default:g}.' if is_example else remedy}"
            ) from error


@cache
def _adapter(kind: Any) -> Any:
    import pydantic

    return pydantic.TypeAdapter(kind)


def explain(
    error: Mapping[str, Any], whole: str, model: Any = None, *, within: str = ""
) -> tuple[str, tuple[Any, ...]]:
    """Returns the rule that is broken and the value, and the location of the field.

    Args:
        error: One of pydantic's ``ValidationError.errors()``.
        whole: What is called by its name where no field of it is wrong.
        model: The pydantic model that was read; with it, a message names the fields that there are, and those that may be null.
        within: Text after the path of a field, such as " of a plan".
    """
    at, kind = tuple(error["loc"]), error["type"]
    named = lambda location: f"{path(location)}{within}" if location else whole
    if kind == "missing":
        above = error["input"]
        got = (
            brief(", ".join(map(repr, above)))
            if isinstance(above, Mapping) and above
            else "no fields"
        )
        return f"{named(at[:-1])} must have the field {at[-1]!r}; got {got}", at
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known, unknown = list(_fields(_model(model, at[:-1]))), str(at[-1])
        near = near_name(unknown, known)
        meant = f" (did you mean {near!r}?)" if near else ""
        rule = f"no fields but {', '.join(known)}" if known else "no other fields"
        message = f"{named(at[:-1])} must have {rule}; got {brief(repr(unknown))}{meant}"
        return message, (*at[:-1], unknown[:MAX_SHOWN])
    rule = _RULES.get(kind, "").format_map(error.get("ctx", {}))
    rule = rule.replace(" 1 items", " 1 item").replace(" 1 letters", " 1 letter")
    if kind.endswith("_type") and type(None) in get_args(
        getattr(field_of(model, at), "annotation", None)
    ):
        rule += " or null"
    rule = f"must {rule}" if rule else error["msg"].replace("Input should", "must")
    return f"{named(at)} {rule}; got {shown(error['input'])}", at


def path(location: Iterable[Any]) -> str:
    """Returns a location as text: ``instances[0].area``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def field_of(model: Any, location: Iterable[Any]) -> Any:
    """Returns pydantic's field at a location in a model; None if there is none."""
    *above, last = [part for part in location if isinstance(part, str)] or [""]
    return _fields(_model(model, above)).get(last)


def _model(model: Any, location: Iterable[Any]) -> Any:
    """Returns the model at a location in a model; None if there is none."""
    for part in (part for part in location if isinstance(part, str)):
        field = _fields(model).get(part)
        model = None if field is None else next(_models(field.annotation), None)
    return model


def _fields(model: Any) -> dict[str, Any]:
    return {
        field.alias or name: field for name, field in getattr(model, "model_fields", {}).items()
    }


def _models(annotation: Any) -> Iterator[Any]:
    """Yields the models in a type, such as that of the items of a list."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def shown(value: Any) -> str:
    """Returns a value as JSON in one short line; of a long array or object, only its length."""
    if isinstance(value, (list, tuple, dict)) and len(value) > 8:
        return f"{'an object' if isinstance(value, dict) else 'an array'} of {len(value)}"
    try:
        return brief(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return brief(repr(value))


def brief(text: str) -> str:
    """Returns the beginning of a text, in printable characters."""
    printable = "".join(each if each.isprintable() else " " for each in text[: MAX_SHOWN + 1])
    return printable if len(text) <= MAX_SHOWN else f"{printable[:MAX_SHOWN]}..."
