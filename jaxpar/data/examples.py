"""Examples to learn from, read from files: text, JSON Lines, Parquet and ArrayRecord; each with its place, for messages.

    a text file                   one example, its text
    .jsonl, .parquet,             an example a line, row or record, with one of these:
    .arrayrecord                    text                    all of it is learned
                                    prompt and completion   the completion is learned
                                    messages                what the assistant says is learned; the tokenizer's chat template

Other fields are ignored, and named by ``ignored``.
"""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.data.readers import is_records, read_records
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.runtime.printable import printable

TEXT_BLOCK = 2**20  # characters of a text file that are tokenised at once, up to the end of a line
KINDS = (("text",), ("prompt", "completion"), ("messages",))


class Passage(NamedTuple):
    """Text to be tokenised at once.

    Attributes:
        text: The text.
        learned: Spans of characters whose tokens are learned; None: all of it.
        begins: Whether the tokens that the tokenizer puts before a text come first.
        ends: Whether a document ends here.
        is_marked: Whether the token for the end of a document follows, where it ends.
        place: The file and the line.
    """

    text: str
    learned: tuple[tuple[int, int], ...] | None
    begins: bool
    ends: bool
    is_marked: bool
    place: tuple[int, int]


@dataclass
class Examples:
    """The examples of files.

    Attributes:
        files: The files, in order.
        tokenizer: Renders messages.
        ignored: The names of fields that were met and ignored.
        is_chat: Whether messages were met.
    """

    files: Sequence[Path]
    tokenizer: Tokenizer
    ignored: set[str] = field(default_factory=set)
    is_chat: bool = False

    def passages(self) -> Iterator[Passage]:
        """Yields the passages of all files.

        Raises:
            ValueError: An example cannot be used; the message names its file and line.
        """
        for number, file in enumerate(self.files):
            if is_records(file):
                for line, example in read_records(file):
                    try:
                        yield self._passage(example, (number, line))
                    except ValueError as error:
                        raise ValueError(f"{error} It is in {place_text(self.files, number, line)}.") from error
            else:
                yield from _read_text(file, number)

    def _passage(self, example: Any, place: tuple[int, int]) -> Passage:
        kind = _kind(example)
        self.ignored.update(set(example) - set(kind))
        if kind == ("messages",):
            self.is_chat = True
            text, learned = self.tokenizer.render(check_messages(example["messages"]))
            return Passage(_checked(text, "messages"), learned, begins=False, ends=True, is_marked=False, place=place)
        texts = [_checked(example[name], name) for name in kind]
        start = len(texts[0])
        learned = None if kind == ("text",) else ((start, start + len(texts[1])),)
        return Passage("".join(texts), learned, begins=True, ends=True, is_marked=True, place=place)


def place_text(files: Sequence[Path], number: int, line: int) -> str:
    """Returns the place of an example as ``file:line``, or only the file of a text."""
    return printable(f"{files[number]}:{line}" if line else str(files[number]))


def _read_text(file: Path, number: int) -> Iterator[Passage]:
    """Yields a text file as passages of about a million characters, each up to the end of a line."""
    if not file.is_file():
        raise ValueError(
            f"text must come from a plain file; got {printable(str(file))}, a device or a pipe. Copy it to a file first."
        )
    decoder, text, begins = codecs.getincrementaldecoder("utf-8")(), "", True
    with file.open("rb") as opened:
        while True:
            block = opened.read(TEXT_BLOCK)
            try:
                text += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"text must be UTF-8; got {error.reason} in {printable(str(file))}. Convert the file, or remove it from "
                    "the folder."
                ) from error
            if "\0" in text:
                raise ValueError(
                    f"text must have no zero bytes; got some in {printable(str(file))}. Name a file or a folder of text alone."
                )
            if not block:
                break
            cut = text.rfind("\n") + 1
            if cut and len(text) >= TEXT_BLOCK // 2:
                yield Passage(text[:cut], None, begins, ends=False, is_marked=False, place=(number, 0))
                text, begins = text[cut:], False
    yield Passage(text, None, begins, ends=True, is_marked=True, place=(number, 0))


def _kind(example: Any) -> tuple[str, ...]:
    if not isinstance(example, Mapping):
        raise ValueError(f"an example must be an object with fields; got a {type(example).__name__}. Correct it.")
    kinds = [kind for kind in KINDS if set(kind) <= set(example)]
    if len(kinds) != 1:
        found = ", ".join(sorted(printable(str(name)) for name in example)) or "none"
        raise ValueError(
            f'an example must have "text", or "prompt" and "completion", or "messages"; got the fields {found}. Rename or '
            "remove fields."
        )
    return kinds[0]


def _checked(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f'"{name}" must be a string; got a {type(text).__name__}. Correct the example.')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f'"{name}" must be valid Unicode; got half of a surrogate pair. Correct the example.'
        ) from error
    return text


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages of a conversation; raises ValueError unless one is the assistant's and each has a role."""
    is_whole = isinstance(messages, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    )
    if not is_whole:
        raise ValueError(
            '"messages" must be a list of objects with "role" and "content"; got another form. Correct it.'
        )
    found = [{name: value for name, value in message.items() if value is not None} for message in messages]
    for message in found:
        if not isinstance(message.get("content"), str):
            raise ValueError(
                f'each message must have "content", a string; got none in one of {message["role"]!r}. Correct it.'
            )
    if not any(message["role"] == "assistant" for message in found):
        raise ValueError('messages must have one of the role "assistant", to learn from; got none. Remove the example.')
    return found
