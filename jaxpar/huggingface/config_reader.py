"""Reads the values of config.json and checks their types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.huggingface.untrusted import brief

MAX_SIZE = 2**24


@dataclass(frozen=True)
class Reader:
    """The values of a JSON object.

    Attributes:
        given: The object.
        defaults: The values of keys that it lacks.
        path: Its file, for messages.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    path: Path

    def size(self, *keys: str) -> int | None:
        """Returns a size, by the first of its keys that is present; all that are present must agree."""
        found = {key: self.given[key] for key in keys if self.given.get(key) is not None}
        for key, value in found.items():
            self._check(key, value, type(value) is int and 0 < value <= MAX_SIZE, f"an integer from 1 to {MAX_SIZE}")
        if len(set(found.values())) > 1:
            raise ValueError(f"keys of one meaning must agree; got {found} in {self.path}. Correct one.")
        if not found and keys[0] not in self.defaults:
            raise ValueError(f"config.json must have {keys[0]}; got nothing in {self.path}. Download it again.")
        return next(iter(found.values()), self.defaults.get(keys[0]))

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Returns a boolean."""
        return self._value(key, default, lambda value: isinstance(value, bool), "true or false")

    def positive(self, key: str, *, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        right = lambda value: type(value) in (int, float) and 0 < value < 1e300
        return float(self._value(key, default, right, "a positive number"))

    def _value(self, key: str, default: Any, right: Callable[[Any], bool], rule: str) -> Any:
        value = self.given.get(key)
        value = self.defaults.get(key, default) if value is None else value
        self._check(key, value, right(value), rule)
        return value

    def _check(self, key: str, value: Any, right: bool, rule: str) -> None:
        if not right:
            raise ValueError(f"{key} must be {rule}; got {brief(value)} in {self.path}. Correct it.")
