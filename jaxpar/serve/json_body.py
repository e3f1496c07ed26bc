"""Parses a JSON body and checks it against the schema in /openapi.json; a mismatch is a 400 that names the field.

Each part of a schema has ``examples``, from which the remedy of a message is made.
"""

import json
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from jaxpar.serve.errors import RequestError

MAX_SHOWN = 60  # letters of a wrong value
MAX_DIGITS_SHOWN = 24
MAX_DIGITS = 300  # of an integer, which then fits a float
Schema = Mapping[str, Any]


def parse(body: bytes) -> Any:
    """Returns the value of a body; raises RequestError unless it is JSON of finite numbers."""
    try:
        return json.loads(
            body.decode(),
            parse_constant=_refuse_number,
            parse_float=_finite,
            parse_int=_integer,
            object_pairs_hook=_once,
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(
            400,
            f"a body must be JSON in UTF-8, with finite numbers and each key once; got {len(body)} bytes that are not: "
            f"{_brief(str(error) or 'too deep')}. Correct it; /docs has examples.",
        ) from error


def _refuse_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_size(text)


def _integer(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else _refuse_size(text)


def _refuse_size(text: str) -> Any:
    shown = text if len(text) <= MAX_DIGITS_SHOWN else f"{text[:MAX_DIGITS_SHOWN]}..."
    raise ValueError(f"{shown} is out of range, beyond 1.8e308")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


class Validator:
    """Checks values against a schema.

    Args:
        schema: The schema.
    """

    def __init__(self, schema: Schema) -> None:
        import jsonschema

        self._validator = jsonschema.Draft202012Validator(schema)

    def check(self, value: Any) -> Any:
        """Returns a value that fits; raises RequestError for the first part that does not."""
        error = next(self._validator.iter_errors(value), None)
        if error is None:
            return value
        path = _path(error.absolute_path)
        rule, got, field = _explain(error)
        message = f"{path or 'the body'} {rule}; got {got}. {_remedy(error)}"
        param = path if field is None else _path([*error.absolute_path, field])
        raise RequestError(400, message, param=param or None)


def _path(parts: Iterable[Any]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _explain(error: Any) -> tuple[str, str, str | None]:
    """Returns the rule that is broken, the value, and the field if it is one inside the error's path."""
    known = list(error.schema.get("properties", {}))
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        return f"must have the field {missing!r}", _names(error.instance), missing
    if error.validator == "additionalProperties":
        (unknown, *_) = (name for name in error.instance if name not in known)
        near = get_close_matches(unknown, known, 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        return f"must have no fields but {', '.join(known)}", f"{_brief(repr(unknown))}{meant}", unknown[:MAX_SHOWN]
    return _RULES.get(error.validator, _described)(error.schema, error.validator_value), _shown(error.instance), None


_RULES: dict[str, Any] = {
    "type": lambda schema, value: f"must be {_kinds(value)}",
    "minimum": lambda schema, value: f"must be at least {value:g}",
    "maximum": lambda schema, value: f"must be at most {value:g}",
    "exclusiveMinimum": lambda schema, value: f"must be above {value:g}",
    "minItems": lambda schema, value: f"must have at least {_count(value, 'item')}",
    "maxItems": lambda schema, value: f"must have at most {_count(value, 'item')}",
    "minLength": lambda schema, value: f"must have at least {_count(value, 'letter')}",
    "maxLength": lambda schema, value: f"must have at most {_count(value, 'letter')}",
    "enum": lambda schema, value: f"must be one of {', '.join(map(json.dumps, value))}",
    "const": lambda schema, value: f"must be {json.dumps(value)}, as nothing else is supported",
}
_NAMES = {
    "object": "an object",
    "array": "an array",
    "integer": "an integer",
    "null": "null",
    "boolean": "true or false",
}


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _described(schema: Schema, value: Any) -> str:
    return f"must be {schema.get('description', 'as the schema says')}"


def _kinds(kinds: str | list[str]) -> str:
    return " or ".join(_NAMES.get(kind, f"a {kind}") for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _names(value: Mapping[str, Any]) -> str:
    return _brief(", ".join(map(repr, value))) if value else "no fields"


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > 8:
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value)}"
    return _brief(json.dumps(value))


def _brief(text: str) -> str:
    printable = "".join(each if each.isprintable() else " " for each in text[: MAX_SHOWN + 1])
    return printable if len(text) <= MAX_SHOWN else f"{printable[:MAX_SHOWN]}..."


def _remedy(error: Any) -> str:
    if error.validator == "const":
        return "Leave it out."
    if error.validator == "additionalProperties":
        return "Leave it out, or correct its name."
    schema = error.schema
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        schema = schema["properties"][missing]
    examples = schema.get("examples")
    if error.validator == "enum" and not examples:
        return "Leave it out."
    return (
        f"Give such as {json.dumps(examples[0], ensure_ascii=False)}."
        if examples
        else "Correct it; /docs has examples."
    )
