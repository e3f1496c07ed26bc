"""The types of the fields of a manifest, as its API has them: a number in quotes, or a truth value as text, is refused there.

    terminationGracePeriodSeconds: "150"    the API refuses it: a string where it has a whole number

`field_types.toml` has the types by the names of fields, so that they are known without the API's own schema.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.runtime.output import printable

_TABLES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("field_types.toml").read_text(encoding="utf-8")
)
TYPES = {name: kind for kind, names in _TABLES["types"].items() for name in names.split()}
REQUIRED = {name: fields.split() for name, fields in _TABLES["required"].items()}
BESIDE_ITS_NAME = _TABLES["beside_its_name"]
OF_PORTS = ("containerPort", "port", "portNumber")  # the numbers that are one
BELOW_ZERO = ("priority", "tolerationSeconds")  # the numbers that may be
CUSTOM = (
    "JobSet",
    "TrainJob",
)  # kinds of which a quantity is a whole number or a text, not a number with a point
QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?\d+)?")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_quantity(value: Any) -> bool:
    is_number = isinstance(value, int | float | str)
    return is_number and not isinstance(value, bool) and bool(QUANTITY.fullmatch(str(value)))


def _is_port(value: Any) -> bool:
    return value != "" if isinstance(value, str) else _is_whole(value) and 0 < value < 2**16


@dataclass(frozen=True)
class Rule:
    """What a value of a type must be.

    Attributes:
        text: The rule, for messages.
        kinds: The types in Python, of which it is one; or a function that says whether it is right.
        remedy: How it is written.
    """

    text: str
    kinds: type | Callable[[Any], bool]
    remedy: str

    def holds(self, value: Any) -> bool:
        """Returns whether a value is right."""
        if isinstance(self.kinds, type):
            return isinstance(value, self.kinds)
        return self.kinds(value)


CUSTOM_QUANTITY = "custom quantity"  # of a kind of CUSTOM
QUANTITIES = Rule("a quantity, such as 8 or 800Gi", _is_quantity, "Correct it.")
OBJECT = Rule("an object", Mapping, "Write its fields, each with its name.")
RULES = {
    "string": Rule("a string", str, "Put it into quotes."),
    "integer": Rule("a whole number", _is_whole, "Write it in digits, without quotes."),
    "boolean": Rule("true or false", bool, "Write true or false, without quotes."),
    "port": Rule("the number or the name of a port", _is_port, "Write one of the two."),
    "quantity": QUANTITIES,
    CUSTOM_QUANTITY: QUANTITIES,
    "array": Rule("a list", list, "Write each item in a line with -."),
    "array of string": Rule("a list of words", list, "Write each word in a line with -."),
    "array of integer": Rule("a list of numbers", list, "Write each in a line with -."),
    "object": OBJECT,
    "object of string": OBJECT,
    "object of quantity": OBJECT,
    f"object of {CUSTOM_QUANTITY}": OBJECT,
}


def type_of(name: str, *around: str) -> str | None:
    """Returns the type of a field in a field, or in a kind of manifest, of a name; None: it is not known."""
    return _of(TYPES, name, around)


def required_of(name: str, *around: str) -> list[str]:
    """Returns the fields that an object in a field must have, as ``type_of`` finds it; none if it is not known."""
    return _of(REQUIRED, name, around) or []


def _of(table: Mapping[str, Any], name: str, around: Iterable[str]) -> Any:
    names = [f"{each}.{name}" for each in around]
    for each in (*names, name):
        if each in table:
            return table[each]
    return None


def check_types(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError if a field of a manifest, whose type is known, has a value of another one; the message names it.

    So it does if an object lacks a field that its API requires.
    """
    kind = str(manifest.get("kind"))
    _check_fields(manifest, "", (kind, kind))


def _check_fields(part: Mapping[str, Any], path: str, around: tuple[str, str]) -> None:
    _check_names(part, path)
    for name, value in part.items():
        at = f"{path}.{name}".lstrip(".")
        if at == "status":  # the cluster's own
            continue
        kind = type_of(str(name), *around)
        if kind is not None and around[0] in CUSTOM:
            kind = kind.replace("quantity", CUSTOM_QUANTITY)
        if kind is not None:
            _check_value(value, kind, at)
        if kind is not None and " of " in kind:
            continue
        for where, each in _objects(value, at):
            _check_has(each, where, str(name), around[1])
            _check_fields(each, where, (around[0], str(name)))


def _check_has(part: Mapping[str, Any], path: str, name: str, around: str) -> None:
    """Raises ValueError if an object in a field, which is in another one, has not the fields that it needs."""
    for field in required_of(name, around):
        if field not in part:
            raise ValueError(f"{path} must have {field}; got none. Write it.")
    if name in BESIDE_ITS_NAME and not part.keys() - {"name"}:
        raise ValueError(f"{path} must have {BESIDE_ITS_NAME[name]}; got none. Write it.")


def _check_value(value: Any, kind: str, path: str) -> None:
    """Raises ValueError unless a value, and each one in it, has the type of its field."""
    rule = RULES[kind]
    if not rule.holds(value):
        raise ValueError(f"{path} must be {rule.text}; got {_shown(value, kind)}. {rule.remedy}")
    if kind == CUSTOM_QUANTITY and isinstance(value, float):
        raise ValueError(
            f"{path} must be a whole number or a text; got {value}. Put it into quotes."
        )
    name = path.rpartition(".")[2]
    if kind == "integer" and value < 0 and name not in BELOW_ZERO:
        raise ValueError(f"{path} must be at least 0; got {value}. Correct it.")
    if kind == "integer" and value >= 2**31:
        raise ValueError(f"{path} must be at most {2**31 - 1}; got {value}. Correct it.")
    if kind == "integer" and name in OF_PORTS and not 0 < value < 2**16:
        raise ValueError(f"{path} must be from 1 to 65535; got {value}. Correct it.")
    inner = "object" if kind == "array" else kind.partition(" of ")[2]
    if not inner:
        return
    if isinstance(value, Mapping):
        _check_names(value, path)
    for name, each in _items(value):
        _check_value(each, inner, f"{path}.{name}")


def _check_names(part: Mapping[str, Any], path: str) -> None:
    for name in part:
        if not isinstance(name, str):
            where = path or "a manifest"
            raise ValueError(
                f"the names of fields of {where} must be strings; got {name!r}. Put it into quotes."
            )


def _shown(value: Any, kind: str) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = "null" if value is None else printable(repr(value))[:80]
    return f"{text}, without quotes in YAML" if kind == "string" else text


def _items(part: Any) -> Iterable[tuple[Any, Any]]:
    return part.items() if isinstance(part, Mapping) else enumerate(part)


def _objects(value: Any, path: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yields the objects that are a value, or its items, with their paths."""
    if isinstance(value, Mapping):
        yield path, value
    if not isinstance(value, list):
        return
    for number, each in enumerate(value):
        if isinstance(each, Mapping):
            yield f"{path}.{number}", each


def without_nulls(part: Any) -> Any:
    """Returns what is read from YAML or JSON without the fields that have no value, which the API takes for missing ones."""
    if isinstance(part, list):
        return [without_nulls(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    given = {name: value for name, value in part.items() if value is not None}
    return {name: without_nulls(value) for name, value in given.items()}
