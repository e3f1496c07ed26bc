"""Chat templates: a conversation as the text that a model was trained on, and which part of it the assistant says.

A template is a Jinja program in the model's folder. It is untrusted and runs in Jinja's sandbox. What the assistant says is
marked by ``{% generation %}`` in some templates. In others it is what a message of the assistant adds to the text of the
messages before it and the prompt for an answer, if the text of the first messages of a conversation is a prefix of the text of
all of it. ``strftime_now`` is left undefined: tokens must not depend on the day.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.huggingface.untrusted import brief
from jaxpar.runtime.extras import install_extra

# Marks around what the assistant says, noncharacters of Unicode, which no text has.
BEGIN, END = "\ufdd0", "\ufdd1"
Spans = tuple[tuple[int, int], ...]


class ChatTemplate:
    """A compiled template.

    Args:
        source: The template.
        special: The texts of special tokens, by the names that templates use.
        where: Where it comes from, for messages.
    """

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        self._special, self._where = special, where
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # a TemplateSyntaxError, or a RecursionError
            raise ValueError(
                f"a chat template must be a Jinja template; got {brief(str(error))} in {where}. Correct it, or give prompt and "
                "completion."
            ) from error
        self._marks_answers = "generation" in source and _has_generation_block(environment, source)

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool = False) -> tuple[str, Spans]:
        """Returns a conversation as text, and the spans of characters that the assistant says.

        Args:
            messages: Objects with ``role`` and ``content``.
            ask: Whether the text is to end with the beginning of an answer; there are no spans then.

        Raises:
            ValueError: The template refuses the messages or fails, or the assistant's part cannot be told.
        """
        if any(
            mark in str(message) for message in messages for mark in (ascii(BEGIN)[1:-1], ascii(END)[1:-1], BEGIN, END)
        ):
            raise ValueError("messages must have no noncharacters of Unicode; got U+FDD0 or U+FDD1. Remove them.")
        text = self._text(messages, ask=ask)
        if ask:
            return text.replace(BEGIN, "").replace(END, ""), ()
        return _split_marked(text) if self._marks_answers else (text, self._added_by_assistant(messages, text))

    def _text(self, messages: Sequence[Mapping[str, Any]], *, ask: bool) -> str:
        given = {"messages": list(messages), "add_generation_prompt": ask, "tools": None, "documents": None}
        try:
            return self._template.render(**given, **self._special)
        except Exception as error:  # the program in the template may fail in any way
            raise ValueError(
                f"a conversation must be one that the model's chat template takes; got {brief(str(error))} from that of "
                f"{self._where}. Correct the messages."
            ) from error

    def _added_by_assistant(self, messages: Sequence[Mapping[str, Any]], whole: str) -> Spans:
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:i], ask=True)
            after = whole if i + 1 == len(messages) else self._text(messages[: i + 1], ask=False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    "the text of a conversation must begin with that of its first messages, for the assistant's part to be "
                    f"told; got another text for the first {i + 1} of {len(messages)} messages from the chat template of "
                    f"{self._where}. End each conversation with the first answer that is to be learned, or give prompt and "
                    "completion."
                )
            spans.append((len(before), len(after)))
        return tuple(spans)


def _environment() -> Any:
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(
            f"messages need Jinja for the chat template; got no such package. {install_extra('hf')}."
        ) from error
    extensions = [loopcontrols, _generation_block()]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **others)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _generation_block() -> Any:
    """Returns Jinja's extension for ``{% generation %}``, which puts marks around what is inside."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012, Jinja's own form

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = [nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (BEGIN, END)]
            return [marks[0], *body, marks[1]]

    return GenerationBlock


def _has_generation_block(environment: Any, source: str) -> bool:
    return any(kind == "name" and value == "generation" for _, kind, value in environment.lex(source))


def _split_marked(marked: str) -> tuple[str, Spans]:
    """Returns the text without marks, and the spans between them."""
    text, spans = "", []
    for number, piece in enumerate(marked.split(BEGIN)):
        if number == 0:
            text += piece
            continue
        said, _, rest = piece.partition(END)
        spans.append((len(text), len(text) + len(said)))
        text += said + rest
    return text, tuple(spans)
