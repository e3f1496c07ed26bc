"""The tokenizer of a model's folder, as the tokenizers library reads it: text to tokens and back; and its chat template.

    tokenizer.json           the tokenizer
    tokenizer_config.json    its special tokens and, in older folders, the chat template
    chat_template.jinja      the chat template
    config.json              the id of the token that ends a text, if tokenizer_config.json names none

A chat template turns a conversation into the text that a model was trained on. It is a Jinja program, untrusted, and runs in
Jinja's sandbox. What the assistant says is marked by ``{% generation %}`` in some templates. In others it is what a message of
the assistant adds to the text of the messages before it and the prompt for an answer, if the text of the first messages of a
conversation is a prefix of the text of all of it. ``strftime_now`` is left undefined: tokens must not depend on the day, and
a template that calls it is refused.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.text import Tokenizer
from jaxpar.fields import arg
from jaxpar.huggingface.folder import brief, check_size, file_inside, read_json, shorten
from jaxpar.runtime.output import needing_extra, refusing

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
MAX_TOKENIZER_BYTES = 2**27  # the largest published ones have about 33 MB
MAX_TEMPLATE_BYTES = 2**20
# Marks around what the assistant says, noncharacters of Unicode, which no text has.
BEGIN, END = "\ufdd0", "\ufdd1"
# The tags of a block of what the assistant says, which Jinja does not have: it runs as a block of the filter ``said``.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end|)generation(?=\s*[-+]?%\})")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # whose texts templates use
TODAY = "strftime_now"
SHOWN = 24  # characters on each side of where two texts part
MARK = "mark what the assistant says by {% generation %} and {% endgeneration %} in the template"
REPLACEMENT = "\ufffd"  # in the text of bytes that are no whole character
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # a byte of SentencePiece
# The bytes by the characters that stand for them in byte-level BPE: those that can be printed for themselves, and others.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(256)} - {*_PRINTED})
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}
Spans = tuple[tuple[int, int], ...]


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has a ``tokenizer.json``."""
    return (folder / TOKENIZER).exists()


def read_tokenizer(folder: Path) -> "FolderTokenizer":
    """Returns the tokenizer of a model's folder.

    Raises:
        FileNotFoundError: The folder has no ``tokenizer.json``.
        ImportError: The tokenizers library is not installed.
        ValueError: A file is damaged, too large, or leads out of the folder.
    """
    return FolderTokenizer(Path(folder))


class FolderTokenizer(Tokenizer):
    """A tokenizer of a folder, with its chat template.

    Attributes:
        end: The token after a document; None: the folder names none.
        vocab_size: The number of tokens, with those added.
        has_chat_template: Whether messages can be rendered.
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        if not has_tokenizer(folder):
            raise FileNotFoundError(
                f"{arg('a tokenizer')} must be a folder with a {TOKENIZER}; got none in {folder}. Name the folder of a model "
                "that has one, or make it there by AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers."
            )
        path = file_inside(folder, TOKENIZER)
        settings = _optional_json(folder, SETTINGS)
        template = _read_template(folder, settings)
        self._digest = hashlib.sha256()
        for content in (
            path.read_bytes(),
            repr(sorted(settings.items())).encode(),
            (template or "").encode(),
        ):
            self._digest.update(hashlib.sha256(content).digest())
        self._tokenizer = _open(path)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.end = self._end(_text_of(settings.get("eos_token")), folder)
        self._special = {name: _text_of(settings.get(name)) or "" for name in SPECIAL}
        added = self._tokenizer.get_added_tokens_decoder()
        _check_added(settings, {t.content: index for index, t in added.items()}, folder)
        self._written = re.compile(
            "|".join(re.escape(t.content) for t in added.values() if t.special and t.content)
            or "(?!)"
        )
        self.folder, self.has_chat_template, self._marks_answers = (
            folder,
            template is not None,
            False,
        )
        self._names = frozenset(re.findall(r"\w+", template or ""))
        if template is not None:
            self._compile(template)

    def _end(self, text: str | None, folder: Path) -> int | None:
        if text is not None:
            token = self._tokenizer.token_to_id(text)
            if token is None:
                raise ValueError(
                    f"the eos_token of {SETTINGS} must be a token of {TOKENIZER}; got {brief(text)} in {folder}. Correct one "
                    "of the two files."
                )
            return token
        token = _optional_json(folder, "config.json").get("eos_token_id")
        token = token[0] if isinstance(token, list) and token else token
        return token if isinstance(token, int) and 0 <= token < self.vocab_size else None

    def _compile(self, template: str) -> None:
        filtered = lambda tag: tag[1] + ("endfilter" if tag[2] else "filter said")
        template, num_tags = _GENERATION.subn(filtered, template)
        self._marks_answers, environment = num_tags > 0, _environment()
        # A TemplateSyntaxError, or a RecursionError.
        remedy = "Correct it, or give prompt and completion."
        with refusing(Exception, "a chat template must be a Jinja template", self.folder, remedy):
            self._template = environment.from_string(template)

    def fingerprint(self) -> str:
        """Returns a digest of the folder's tokenizer, its settings and its chat template, and of the library's version."""
        import tokenizers

        return f"{self._digest.hexdigest()} tokenizers {tokenizers.__version__} end {self.end}"

    def encode(
        self, texts: Sequence[str], *, begins: Sequence[bool]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each text its tokens and, for each token, the index after its last character; -1: none of the text's.

        Args:
            texts: The texts.
            begins: Whether each gets the tokens that the tokenizer adds to a whole text, such as one for its beginning.
        """
        found: list[Any] = [None] * len(texts)
        for special in (False, True):
            chosen = [i for i, begin in enumerate(begins) if begin == special]
            encoded = self._tokenizer.encode_batch(
                [texts[i] for i in chosen], add_special_tokens=special
            )
            for i, encoding in zip(chosen, encoded, strict=True):
                ends = np.array([end for _, end in encoding.offsets], np.int64)
                ends[np.array(encoding.special_tokens_mask, bool)] = -1
                found[i] = np.array(encoding.ids, np.int64), ends
        return found

    def decode(self, tokens: np.ndarray, *, special: bool = False) -> str:
        """Returns the text of tokens, ``special``: of special ones too; tokens of padding rows of the embedding have none."""
        known = [int(token) for token in np.ravel(tokens) if 0 <= token < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=not special)

    def text_of(self, token: int) -> str:
        """Returns the text of a token, also of a special one."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character; where they are not known, those of its text."""
        text = self.decode(np.array([token]), special=True)
        if REPLACEMENT not in text:
            return text.encode()
        written = self._tokenizer.id_to_token(token)
        if byte := _FALLBACK.fullmatch(written):
            return bytes.fromhex(byte[1])
        if not {*written} <= _BYTES.keys():
            return text.encode()
        found = bytes(_BYTES[character] for character in written)
        return found if found.decode(errors="replace") == text else text.encode()

    def special_in(self, text: str) -> set[str]:
        """Returns the special tokens that ``encode`` would read in a text, as they are written."""
        return set(self._written.findall(text))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        ask: bool = False,
    ) -> tuple[str, Spans]:
        """Returns a conversation as text by the chat template, and the spans of characters that the assistant says.

        Args:
            messages: Objects with ``role`` and ``content``.
            tools: The tools that the model may call, for a template that writes them.
            ask: Whether the text is to end with the beginning of an answer, for a model to go on; there are no spans then.

        Raises:
            ValueError: There is no template, it refuses the messages or fails, or the assistant's part cannot be told.
        """
        if not self.has_chat_template:
            raise ValueError(
                f"messages need a chat template; got none in {self.folder}. Add {TEMPLATE}, or give prompt and completion."
            )
        if re.search(r"\\ufdd[01]", ascii(list(messages))):
            raise ValueError(
                "messages must have no noncharacters of Unicode; got U+FDD0 or U+FDD1. Remove them."
            )
        text_of = partial(self._text, tools)
        text = text_of(messages, ask=ask)
        if ask:
            return text.replace(BEGIN, "").replace(END, ""), ()
        return (
            _split_marked(text)
            if self._marks_answers
            else (text, self._added_by_assistant(messages, text, text_of))
        )

    def uses(self, name: str) -> bool:
        """Returns whether the chat template has this name, and so may write such a field of a message."""
        return name in self._names

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
        where = f"the template of {self.folder}"
        try:
            with refusing(
                Exception, rule, where, "Correct the messages."
            ):  # the program in it may fail in any way
                return self._template.render(**given, **self._special)
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
            before = text_of(messages[:i], ask=True)
            after = whole if i + 1 == len(messages) else text_of(messages[: i + 1], ask=False)
            if not after.startswith(before):
                raise ValueError(self._other_beginning(messages[: i + 1], before, after, text_of))
            if not whole.startswith(after):
                got, instead = _where_they_part(after, whole)
                raise ValueError(
                    "the text of a conversation must begin with that of its first messages, for the assistant's part to be "
                    f"told; got {got} for the first {i + 1} of {len(messages)} messages and {instead} for all of them from the "
                    f"chat template of {self.folder}. End each conversation with its first answer, {MARK}, or give prompt and "
                    "completion as texts."
                )
            spans.append((len(before), len(after)))
        return tuple(spans)

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
            f"{got} to ask and {instead} for message {len(messages)} from the chat template of {self.folder}. "
            f"{remedy[0].upper()}{remedy[1:]}."
        )


def _where_they_part(one: str, other: str) -> tuple[str, str]:
    """Returns what each of two texts has where they are no longer the same, for a message."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    first = max(at - SHOWN, 0)
    shown = lambda text: ("..." if first else "") + repr(text[first : at + SHOWN])
    return shown(one), shown(other)


def _open(path: Path) -> Any:
    check_size(path, MAX_TOKENIZER_BYTES, TOKENIZER)
    with needing_extra("reading tokenizer.json needs the tokenizers library", "hf"):
        import tokenizers
    rule = f"{TOKENIZER} must be a tokenizer of the tokenizers library"
    with refusing(Exception, rule, path, "Download it again."):  # the library raises no other kind
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise ValueError(
            f"a tokenizer must give the same tokens for the same text; got a dropout of {dropout:g} in {path}. Set it to null."
        )
    tokenizer.no_truncation()  # settings for inference, which would cut examples silently
    tokenizer.no_padding()
    return tokenizer


def _check_added(settings: Mapping[str, Any], added: Mapping[str, int], folder: Path) -> None:
    """Raises for a token that the settings add, as transformers would, and the tokenizer has not."""
    listed = settings.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    texts = {_text_of(token): index for index, token in listed.items()}
    missing = [text for text, index in texts.items() if text and str(added.get(text)) != str(index)]
    if missing:
        raise ValueError(
            f"a token of added_tokens_decoder in {SETTINGS} must be an added token of {TOKENIZER} with the same number; got "
            f"{shorten(missing)} in {folder}, which {TOKENIZER} would cut into several. Write both files anew: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) of transformers."
        )


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    return read_json(file_inside(folder, name)) if (folder / name).exists() else {}


def _text_of(token: Any) -> str | None:
    """The text of a special token, which is stored as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (folder / TEMPLATE).exists():
        path = file_inside(folder, TEMPLATE)
        check_size(path, MAX_TEMPLATE_BYTES, TEMPLATE)
        text = path.read_text(encoding="utf-8")
        return text if text.strip() else None
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and found.strip() else None


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
