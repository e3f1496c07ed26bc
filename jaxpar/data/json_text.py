"""The text of a file of JSON whose values are read one at a time, so the file may be larger than memory."""

import json
import re
from typing import Any, TextIO

MAX_LINE_BYTES = 2**26  # of a value
JSON_BLOCK = 2**20  # characters that are read at once
_NO_SPACE = re.compile(r"\S")


class JsonError(ValueError):
    """The text is not JSON."""


class JsonText:
    """The text of a file of JSON, of which no more than a value and a block are held."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0
        self._decode = json.JSONDecoder(object_pairs_hook=once).raw_decode

    def peek(self) -> str:
        """Returns the next character that is no space; "" at the end."""
        while not (found := _NO_SPACE.search(self._text, self._at)):
            self._at = len(self._text)
            if not self._more():
                return ""
        self._at = found.start()
        return found[0]

    def take(self) -> str:
        """Returns the next character that is no space, and goes past it."""
        if not (found := self.peek()):
            raise JsonError("no end of the list")
        self._at += 1
        return found

    def read_value(self) -> Any:
        """Returns the value that begins here, and goes past it."""
        self.peek()
        while True:
            try:
                value, self._at = self._decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_LINE_BYTES or not self._more():
                    raise JsonError(error.msg) from error
            except ValueError as error:
                raise JsonError(str(error)) from error
            except RecursionError as error:
                raise JsonError("too many brackets") from error

    def _more(self) -> bool:
        left = self._text[self._at :]
        block = self._file.read(max(JSON_BLOCK, len(left)))
        self._text, self._at = left + block, 0
        return bool(block)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of an object of JSON; raises ValueError for a name that occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)!r} twice in an object"
        )
    return found
