"""Examples to learn from, read from files: text, and records of several formats; each with its place, for messages.

    a text file                   one example, its text
    .jsonl, .json, .csv, .tsv,    an example a line, object, row or record, with one of these:
    .parquet, .arrayrecord          text                    all of it is learned
                                    prompt and completion   the completion is learned
                                    messages                what the assistant says is learned; the tokenizer's chat template
                                    others (forms.py)       turned into one of these

Other fields are ignored, and named by ``ignored``. A .json, .csv or .tsv without such fields is text.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar import fields
from jaxpar.data.forms import as_learned, kind_of
from jaxpar.data.left_out import roles_left_out
from jaxpar.data.readers import (
    UTF_16,
    is_of_lines,
    is_records,
    parse_json,
    read_records,
    unread_fields,
)
from jaxpar.data.text import Tokenizer
from jaxpar.data.tool_arguments import (
    called_functions,
    read_arguments,
    takes_objects,
    with_arguments_read,
)
from jaxpar.data.unused_fields import UnusedFields
from jaxpar.runtime.output import printable, refusing

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".7z")
EMPTY = "an empty answer, which the model learns to give"
EMPTY_TEXT = "an empty text"
UNREADABLE = "arguments of a call of a tool that are not the JSON of an object, which are learned as they are"
NOT_AN_ANSWER = 'a "weight" of 1 for a message that is not the assistant\'s, which is not learned'
UNANSWERED = "a last message that no answer follows, of which nothing is learned"
ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
)  # of the messages of published data
JOINED = (
    "a token that reaches from the prompt into the completion, which the prompt alone does not have"
)
UNKNOWN = (
    "characters that the tokenizer does not know: it leaves them out, or has one token for all"
)
MOST_ODD = 8
FURTHER = "more that may not be meant, of kinds that are not named here"
TEXT_BLOCK = 2**20  # characters of a text file that are tokenised at once, up to the end of a line


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

    @property
    def has_prompt(self) -> bool:
        """Whether it is a prompt and its completion, both of them text."""
        return self.learned is not None and self.is_marked

    @property
    def num_prompt(self) -> int:
        """The number of characters before those that are learned."""
        return self.learned[0][0] if self.learned else 0


@dataclass
class Examples:
    """The examples of files.

    Attributes:
        files: The files, in order.
        tokenizer: Renders messages.
        ignored: The names of fields that were met and ignored.
        is_chat: Whether messages were met.
        odd: What examples have that is learned but may not be meant, the number of these examples, and the place of the first.
    """

    files: Sequence[Path]
    tokenizer: Tokenizer
    ignored: set[str] = field(default_factory=set)
    is_chat: bool = False
    odd: dict[str, tuple[int, tuple[int, int]]] = field(default_factory=dict)
    _as_objects: dict[bool, bool] = field(default_factory=dict, init=False)
    _unused: UnusedFields = field(init=False)
    _last_unknown: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._unused = UnusedFields(self.tokenizer.render)

    def passages(self) -> Iterator[Passage]:
        """Yields the passages of all files.

        Raises:
            ValueError: An example cannot be used; the message names its file, and its line or number.
        """
        for number, file in enumerate(self.files):
            if is_records(file):
                self.ignored.update(unread_fields(file))
                for line, example in read_records(file):
                    try:
                        yield self._passage(example, (number, line))
                    except ValueError as error:
                        raise ValueError(
                            f"{error} It is in {place_text(self.files, number, line)}."
                        ) from error
            else:
                yield from self._text(file, number)
        self.ignored |= self._unused.names()

    def _text(self, file: Path, number: int) -> Iterator[Passage]:
        special: set[str] = set()
        for passage in _read_text(file, number):
            special.update(self._special_in([passage.text]))
            yield passage
        self.note(special, (number, 0))

    def _passage(self, example: Any, place: tuple[int, int]) -> Passage:
        example, ignored = as_learned(example, has_chat_template=self.tokenizer.has_chat_template)
        self.ignored.update(ignored)
        if "messages" in example:
            self.is_chat = True
            tools = self._tools(example.get("tools"))
            text, learned = self._conversation(example["messages"], tools, place)
            return Passage(
                _checked(text, "messages"),
                learned,
                begins=False,
                ends=True,
                is_marked=False,
                place=place,
            )
        texts = [_checked(value, name) for name, value in example.items()]
        if not texts[-1].strip():
            self.note([EMPTY_TEXT if "text" in example else EMPTY], place)
        self.note(self._special_in(texts), place)
        start = len(texts[0])
        learned = None if "text" in example else ((start, start + len(texts[1])),)
        return Passage("".join(texts), learned, begins=True, ends=True, is_marked=True, place=place)

    def _tools(self, given: Any) -> list[Any] | None:
        """Returns the tools that an example lists, for a template that writes them."""
        if given is not None and not self.tokenizer.uses("tools", has_tools=True):
            self.ignored.update(["tools"] if given else [])
            return None
        return check_tools(given)

    def _conversation(
        self, given: Any, tools: list[Any] | None, place: tuple[int, int]
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Returns the text of messages, and the spans that are learned."""
        uses = partial(self.tokenizer.uses, has_tools=bool(tools))
        takes_calls = uses("tool_calls")
        messages = check_messages(given, takes_calls=takes_calls)
        self.note(
            [NOT_AN_ANSWER] * any(m["role"] != "assistant" and m.get("weight") for m in messages),
            place,
        )
        self.note([UNANSWERED] * (messages[-1]["role"] != "assistant"), place)
        weights = [_weight(message.pop("weight", 1)) for message in messages]
        others = {name for message in messages for name in message} - {"role", "content"}
        self.ignored.update(f"{name} of messages" for name in others if not uses(name))
        self.note(
            {what for message in messages for what in _odd(message, takes_calls=takes_calls)}, place
        )
        self.note(self._special_in([message["content"] for message in messages]), place)
        if takes_calls and self._reads_arguments(tools):
            messages = [with_arguments_read(message) for message in messages]
        text, spans = self.tokenizer.render(messages, tools=tools)
        self._unused.look_at(messages, {*filter(uses, others - {"tool_calls"})}, text, tools)
        self.note(_left_out(messages, text), place)
        answers = [
            w
            for message, w in zip(messages, weights, strict=True)
            if message["role"] == "assistant"
        ]
        return text, spans if all(answers) else _weighted(spans, answers)

    def _reads_arguments(self, tools: list[Any] | None) -> bool:
        """Returns whether the chat template takes arguments of calls as objects, of which it writes the JSON or the entries."""
        if (
            bool(tools) not in self._as_objects
        ):  # as conversations with tools may have a template of their own
            self._as_objects[bool(tools)] = takes_objects(
                partial(self.tokenizer.render, tools=tools)
            )
        return self._as_objects[bool(tools)]

    def _special_in(self, texts: Iterable[str]) -> set[str]:
        """Returns what to say of special tokens that somebody wrote in texts, where they are read as these tokens."""
        tokens = {token for text in texts for token in self.tokenizer.special_in(text)}
        return {
            f"{printable(token)} in their text, which is read as the special token"
            for token in tokens
        }

    def note(self, found: Iterable[str], place: tuple[int, int]) -> None:
        """Counts what is odd about an example; of many kinds, those beyond the first ones together.

        Args:
            found: What is odd.
            place: The file and the line.
        """
        has_more = False
        for what in sorted(found):
            if what in self.odd or len(self.odd) < MOST_ODD:
                self._count(what, place)
            else:
                has_more = True
        if has_more:
            self._count(FURTHER, place)

    def note_tokens(
        self, passages: Sequence[Passage], encoded: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Notes prompts whose last token goes on in the completion, and characters that the tokenizer does not know.

        Only prompts that such a token seems to end are tokenised again: some tokenizers leave out spaces between two tokens.

        Args:
            passages: The passages.
            encoded: What the tokenizer's ``encode`` returns of their texts.
        """
        self._note_unknown(passages)
        joined = []
        for passage, (ids, ends) in zip(passages, encoded, strict=True):
            of_text = ends >= 0
            if passage.has_prompt and _reaches_over(ends[of_text], passage.num_prompt):
                joined.append((passage, ids[of_text]))
        prompts = [passage.text[: passage.num_prompt] for passage, _ in joined]
        begins = [False] * len(prompts)
        alone = self.tokenizer.encode(prompts, begins=begins) if prompts else ()
        for (passage, whole), (ids, ends) in zip(joined, alone, strict=True):
            own = ids[ends >= 0]
            if not np.array_equal(own, whole[: len(own)]):
                self.note([JOINED], passage.place)

    def _note_unknown(self, passages: Sequence[Passage]) -> None:
        """Notes examples with characters that the tokenizer does not know, each example once."""
        for passage in passages:
            if passage.place != self._last_unknown and self.tokenizer.lost_in(passage.text):
                self._last_unknown = passage.place
                self.note([UNKNOWN], passage.place)

    def _count(self, what: str, place: tuple[int, int]) -> None:
        count, first = self.odd.get(what, (0, place))
        self.odd[what] = count + 1, first


def _reaches_over(ends: np.ndarray, border: int) -> bool:
    """Returns whether a token begins before a character and ends after it, of the indices after each token's last one."""
    at = int(np.searchsorted(ends, border, "right"))
    return at < len(ends) and (ends[at - 1] if at else 0) < border


def _odd(message: Mapping[str, Any], *, takes_calls: bool) -> Iterator[str]:
    """Yields what of a message is learned but may not be meant."""
    role, has_calls = message["role"], takes_calls and message.get("tool_calls")
    if role not in ROLES:
        yield f"messages of the role {printable(repr(role))[:80]}"
    if role == "assistant" and not (message["content"].strip() or has_calls):
        yield EMPTY
    given = [call.get("arguments") for call in (called_functions(message) if has_calls else ())]
    if any(isinstance(text, str) and isinstance(read_arguments(text), str) for text in given):
        yield UNREADABLE


def _left_out(messages: Sequence[Mapping[str, Any]], text: str) -> set[str]:
    """Returns what to say of messages that a chat template did not write as they are, but for spaces around them."""
    return {
        f"a message of the role {printable(repr(role))[:80]} that the chat template leaves out or cuts"
        for role in roles_left_out(messages, text)
    }


def _weight(given: Any) -> bool:
    if given not in (0, 1):
        raise ValueError(
            f'"weight" of a message must be 0, for an answer that is not learned, or 1; got {fields.shown(given)}. Correct it.'
        )
    return bool(given)


def _weighted(
    spans: Sequence[tuple[int, int]], answers: Sequence[bool]
) -> tuple[tuple[int, int], ...]:
    """Returns the spans of the answers that have a weight."""
    if len(spans) != len(answers):
        raise ValueError(
            f'"weight" of 0 needs a chat template that marks each answer; got {len(spans)} marked parts for {len(answers)} '
            "answers. Remove the weights, or the example."
        )
    if not any(answers):
        raise ValueError(
            'messages must have an answer of "weight" 1, to learn from; got 0 for all. Correct a weight, or remove the example.'
        )
    return tuple(span for span, is_learned in zip(spans, answers, strict=True) if is_learned)


def check_examples(file: Path) -> None:
    """Raises ValueError unless a file of records begins with an example that can be learned."""
    line, example = next(iter(read_records(file)), (0, None))
    place = f"It is in {place_text([file], 0, line)}; to learn the file as plain text, rename it to .txt."
    if not line:
        raise ValueError(f"a {file.suffix} must have an example to learn from; got none. {place}")
    try:
        kind_of(example)
    except ValueError as error:
        raise ValueError(f"{error} {place}") from error


def place_text(files: Sequence[Path], number: int, line: int) -> str:
    """Returns the place of an example as ``file:line`` or ``file, example N``, or only the file of a text."""
    if not line:
        return printable(str(files[number]))
    return printable(f"{files[number]}{':' if is_of_lines(files[number]) else ', example '}{line}")


def _read_text(file: Path, number: int) -> Iterator[Passage]:
    """Yields a text file as passages of about a million characters, each up to the end of a line."""
    if not file.is_file():
        raise ValueError(
            f"text must come from a plain file; got {printable(str(file))}, a device or a pipe. Copy it to a file first."
        )
    _check_is_text(file)
    decoder, text, begins = codecs.getincrementaldecoder("utf-8-sig")(), "", True
    remedy = "Convert the file, or remove it from the folder."
    with file.open("rb") as opened:
        while True:
            block = opened.read(TEXT_BLOCK)
            with refusing(UnicodeDecodeError, "text must be UTF-8", file, remedy):
                text += decoder.decode(block, final=not block)
            if "\0" in text:
                raise ValueError(
                    f"text must have no zero bytes; got some in {printable(str(file))}. Name a file or a folder of text alone."
                )
            if not block:
                break
            cut = text.rfind("\n") + 1
            if cut and len(text) >= TEXT_BLOCK // 2:
                yield Passage(
                    text[:cut], None, begins, ends=False, is_marked=False, place=(number, 0)
                )
                text, begins = text[cut:], False
    yield Passage(text, None, begins, ends=True, is_marked=True, place=(number, 0))


def _check_is_text(file: Path) -> None:
    """Raises ValueError where a file that is named as text is compressed, in UTF-16, or has an example a line."""
    named = printable(str(file))
    if file.suffix.lower() in COMPRESSED:
        raise ValueError(
            f"data must not be compressed; got {named}. Decompress it, or remove it from the folder."
        )
    with file.open("rb") as opened:
        line = opened.readline(TEXT_BLOCK)
    if line.startswith(UTF_16):
        raise ValueError(
            f"text must be UTF-8; got UTF-16 in {named}. Save it as UTF-8: iconv -f UTF-16 -t UTF-8."
        )
    if file.suffix == ".txt" or not line.lstrip().startswith(b"{"):
        return
    try:
        kind_of(parse_json(line, str(file)))
    except ValueError:
        return
    raise ValueError(
        f"a file with an example a line must be named .jsonl; got {named}. Rename it, or to learn the lines as plain text, "
        "rename it to .txt."
    )


def _checked(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise ValueError(
            f'"{name}" must be a string; got {fields.shown(text)}. Correct the example.'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f'"{name}" must be valid Unicode; got half of a surrogate pair. Correct the example.'
        ) from error
    return text


def check_messages(messages: Any, *, takes_calls: bool = False) -> list[dict[str, Any]]:
    """Returns the messages of a conversation.

    Args:
        messages: The messages.
        takes_calls: Whether a message may have ``tool_calls`` in place of ``content``.

    Raises:
        ValueError: None is the assistant's, or one has no role or no content.
    """
    is_whole = isinstance(messages, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str)
        for message in messages
    )
    if not is_whole:
        raise ValueError(
            '"messages" must be a list of objects with "role" and "content"; got another form. Correct it.'
        )
    given = lambda message: {name: value for name, value in message.items() if value is not None}
    content = lambda message: _content(
        {"content": "", **given(message)} if takes_calls and message.get("tool_calls") else message
    )
    found = [given(message) | {"content": content(message)} for message in messages]
    if not any(message["role"] == "assistant" for message in found):
        roles = (
            ", ".join(dict.fromkeys(printable(repr(message["role"]))[:80] for message in found))
            or "no messages"
        )
        raise ValueError(
            f'messages must have one of the role "assistant", to learn from; got {roles}. Rename the role of the answers, or '
            "remove the example."
        )
    return found


def check_tools(tools: Any) -> list[Any] | None:
    """Returns the tools of a conversation; None if there are none.

    Raises:
        ValueError: They are no list of objects, nor the JSON of one.
    """
    found = None if tools == "" else tools
    if found and isinstance(tools, str):
        with suppress(ValueError):
            found = parse_json(tools.encode(), "tools")
    if found is not None and not (
        isinstance(found, list) and all(isinstance(each, Mapping) for each in found)
    ):
        raise ValueError(
            f'"tools" must be a list of objects, or a string with the JSON of one; got {fields.shown(tools)}. Correct it.'
        )
    return found or None


def _content(message: Mapping[str, Any]) -> str:
    """Returns the text of a message, whose parts are joined where it has a list of them."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    others = [part for part in parts if not _is_text(part)]
    if not others:
        return "".join(part["text"] for part in parts)
    if content is None and message.get("tool_calls"):
        raise ValueError(
            'a message with "tool_calls" and no "content" needs a chat template that writes "tool_calls"; got one without '
            "them. Take a model whose template has them, or write the call as the content."
        )
    got = "none" if content is None else fields.shown(content)
    got = f"a list with {printable(repr(others[0]))[:80]}" if isinstance(content, list) else got
    raise ValueError(
        'each message must have "content", a string or a list of {"type": "text", "text": "..."}; got '
        f"{got} in one of {printable(repr(message['role']))[:80]}. Correct it."
    )


def _is_text(part: Any) -> bool:
    given = (
        {name: value for name, value in part.items() if value is not None}
        if isinstance(part, Mapping)
        else {}
    )
    return (
        given.keys() == {"type", "text"}
        and given["type"] == "text"
        and isinstance(given["text"], str)
    )
