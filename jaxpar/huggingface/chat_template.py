"""The chat templates of a model's folder: programs that turn a conversation into the text that a model was trained on.

    chat_template.jinja                          the default one
    additional_chat_templates/tool_use.jinja     one for conversations with tools
    tokenizer_config.json                        in older folders, the default one, or a list of several by name

A file is read in place of the template of its name in ``tokenizer_config.json``, of whose list none is read beside
``chat_template.jinja``. As in transformers, a conversation with tools is written by the one called ``tool_use``, if there is
one.

A template is a Jinja program, untrusted, and runs in Jinja's sandbox. What the assistant says is marked by
``{% generation %}`` in some templates. In others it is what a message of the assistant adds to the text of the messages before
it and the prompt for an answer, if the text of the first messages of a conversation is a prefix of the text of all of it.
``strftime_now`` is left undefined: tokens must not depend on the day, and a template that calls it is refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from jaxpar.huggingface.folder import check_size, file_inside
from jaxpar.runtime.output import needing_extra, refusing

TEMPLATE = "chat_template.jinja"
DEFAULT, TOOL_USE = "default", "tool_use"  # as lists of templates have them
FOR_TOOLS = f"additional_chat_templates/{TOOL_USE}.jinja"
MAX_TEMPLATE_BYTES = 2**20
# Marks around what the assistant says, noncharacters of Unicode, which no text has.
BEGIN, END = "\ufdd0", "\ufdd1"
# The tags of a block of what the assistant says, which Jinja does not have: it runs as a block of the filter ``said``.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end|)generation(?=\s*[-+]?%\})")
TODAY = "strftime_now"
SHOWN = 24  # characters on each side of where two texts part
MARK = "mark what the assistant says by {% generation %} and {% endgeneration %} in the template"
Spans = tuple[tuple[int, int], ...]


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sources of a folder's chat templates by name; of these only ``DEFAULT`` and ``TOOL_USE`` are used.

    Args:
        folder: The folder.
        settings: Its ``tokenizer_config.json``.

    Raises:
        ValueError: A file is too large, or leads out of the folder.
    """
    if (folder / TEMPLATE).exists():
        found: dict[str, Any] = {DEFAULT: _read(file_inside(folder, TEMPLATE))}
    else:
        listed = settings.get("chat_template")
        if isinstance(listed, list):  # several by name
            named = [each for each in listed if isinstance(each, dict)]
            found = {str(each.get("name")): each.get("template") for each in named}
        else:
            found = {DEFAULT: listed}
    if (folder / FOR_TOOLS).exists():
        name = Path(FOR_TOOLS)
        found[TOOL_USE] = _read(file_inside(folder, name.name, under=str(name.parent)))
    return {
        name: source
        for name in (DEFAULT, TOOL_USE)
        if isinstance(source := found.get(name), str) and source.strip()
    }


def _read(path: Path) -> str:
    check_size(path, MAX_TEMPLATE_BYTES, path.name)
    with refusing(UnicodeDecodeError, "a chat template must be UTF-8", path, "Download it again."):
        return path.read_text(encoding="utf-8")


class ChatTemplate:
    """A chat template.

    Args:
        source: The Jinja program.
        folder: The folder that it is of, for messages.
        special: The special tokens that it may name, such as ``bos_token``, and their texts. Messages go before them.

    Attributes:
        names: All names in the program; a field of a message that is not among them is not written.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: It is not a Jinja template.
    """

    def __init__(self, source: str, folder: Path, special: Mapping[str, Any]) -> None:
        self.names = frozenset(re.findall(r"\w+", source))
        self._folder, self._special = folder, special
        filtered = lambda tag: tag[1] + ("endfilter" if tag[2] else "filter said")
        source, num_tags = _GENERATION.subn(filtered, source)
        self._marks_answers, environment = num_tags > 0, _environment()
        # A TemplateSyntaxError, or a RecursionError.
        remedy = "Correct it, or give prompt and completion."
        with refusing(Exception, "a chat template must be a Jinja template", folder, remedy):
            self._program = environment.from_string(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None, ask: bool
    ) -> tuple[str, Spans]:
        """Returns a conversation as text, and the spans that the assistant says, as ``FolderTokenizer.render`` has it."""
        for name, given in (("messages", messages), ("tools", tools)):
            if any(BEGIN in text or END in text for text in _texts(given)):
                raise ValueError(
                    f"{name} must have no noncharacters of Unicode; got U+FDD0 or U+FDD1. Remove them."
                )
        text_of = partial(self._text, tools)
        text = text_of(messages, ask=ask)
        if ask:
            return text.replace(BEGIN, "").replace(END, ""), ()
        if self._marks_answers:
            return _split_marked(text)
        return text, self._added_by_assistant(messages, text, text_of)

    def _text(
        self,
        tools: Sequence[Any] | None,
        messages: Sequence[Mapping[str, Any]],
        *,
        ask: bool,
    ) -> str:
        given = {
            "messages": list(messages),
            "add_generation_prompt": ask,
            "tools": tools,
            "documents": None,
        }
        rule = "a conversation must be one that the model's chat template takes"
        where = f"the template of {self._folder}"
        try:
            # The program in it may fail in any way.
            with refusing(Exception, rule, where, "Correct the messages, or the template."):
                return self._program.render({**self._special, **given})
        except ValueError as error:
            if f"'{TODAY}' is undefined" not in str(error):
                raise
            raise ValueError(
                "a chat template must give the same text on every day, for tokens that are cached and runs that are resumed; "
                f"got {TODAY}, which asks for today's date, in {where}. Write a date into the template in its place, such as "
                '"26 Jul 2024".'
            ) from error

    def _added_by_assistant(
        self,
        messages: Sequence[Mapping[str, Any]],
        whole: str,
        text_of: Callable[..., str],
    ) -> Spans:
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._prompt(messages[:i], text_of)
            after = whole if i + 1 == len(messages) else text_of(messages[: i + 1], ask=False)
            if not after.startswith(before):
                raise ValueError(self._other_beginning(messages[: i + 1], before, after, text_of))
            if not whole.startswith(after):
                got, instead = _where_they_part(after, whole)
                raise ValueError(
                    "the text of a conversation must begin with that of its first messages, for the assistant's part to be "
                    f"told; got {got} for the first {i + 1} of {len(messages)} messages and {instead} for all of them from the "
                    f"chat template of {self._folder}. End each conversation with its first answer, {MARK}, or give prompt and "
                    "completion as texts."
                )
            spans.append((len(before), len(after)))
        return tuple(spans)

    def _prompt(self, messages: Sequence[Mapping[str, Any]], text_of: Callable[..., str]) -> str:
        """Returns what the template writes to ask for an answer; of no messages it may not be able to."""
        try:
            return text_of(messages, ask=True)
        except ValueError as error:
            if messages:
                raise
            raise ValueError(
                "a conversation must begin with what is answered, for this chat template to ask for the answer; got one that "
                f"begins with an answer, for the template of {self._folder}. Put a message of the user before it, or remove it."
            ) from error

    def _other_beginning(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt: str,
        text: str,
        text_of: Callable[..., str],
    ) -> str:
        """Returns the error where the last message, an answer, does not begin as the prompt for it ends."""
        *others, answer = messages
        with_content = lambda content: text_of([*others, {**answer, "content": content}], ask=False)
        remedies = [MARK, "or give prompt and completion as texts"]
        with suppress(ValueError):  # the template may refuse these contents
            header = with_content(BEGIN).partition(BEGIN)[0]
            rest = prompt[len(header) :]
            if with_content(f"{rest}{answer['content']}").startswith(prompt):
                remedies.insert(0, f"begin each answer with {rest!r}")
        got, instead = _where_they_part(prompt, text)
        remedy = ", ".join(remedies)
        return (
            "an answer must begin with what the chat template writes to ask for one, for the assistant's part to be told; got "
            f"{got} to ask and {instead} for message {len(messages)} from the chat template of {self._folder}. "
            f"{remedy[0].upper()}{remedy[1:]}."
        )


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in messages, at any depth."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, Sequence):
            left += each


def _where_they_part(one: str, other: str) -> tuple[str, str]:
    """Returns what each of two texts has where they are no longer the same, for a message."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    first = max(at - SHOWN, 0)
    shown = lambda text: ("..." if first else "") + repr(text[first : at + SHOWN])
    return shown(one), shown(other)


def _environment() -> Any:
    with needing_extra("messages need Jinja for the chat template", "hf"):
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, "said": lambda text: BEGIN + text + END}
    environment.globals |= {"raise_exception": _refuse}
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **others)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _split_marked(marked: str) -> tuple[str, Spans]:
    """Returns the text without marks, and the spans between them."""
    pieces = re.split(f"[{BEGIN}{END}]", marked)  # every second one is the assistant's
    ends = list(accumulate(map(len, pieces)))
    return "".join(pieces), tuple(zip(ends[::2], ends[1::2], strict=False))
