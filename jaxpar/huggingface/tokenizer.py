"""The tokenizer of a model's folder, as the tokenizers library reads it: text to tokens and back; and its chat templates.

tokenizer.json           the tokenizer
tokenizer_config.json    its special tokens
special_tokens_map.json  the same in folders of older versions, in whose tokenizer_config.json no token is added
config.json              the id of the token that ends a text, if tokenizer_config.json names none
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.text import Tokenizer
from jaxpar.fields import arg
from jaxpar.huggingface import chat_template
from jaxpar.huggingface.chat_template import DEFAULT, TEMPLATE, TOOL_USE, ChatTemplate, Spans
from jaxpar.huggingface.folder import brief, check_size, file_inside, read_json, shorten
from jaxpar.runtime.output import needing_extra, refusing

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
MAX_TOKENIZER_BYTES = 2**27  # the largest published ones have about 33 MB
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens_decoder"
SPECIAL = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)  # empty in a template where a folder names none
# Objects with further tokens by name, and a list of those without names, which a template has as the first of the two.
BY_NAME, WITHOUT_NAMES = (
    ("extra_special_tokens", "model_specific_special_tokens"),
    ("additional_special_tokens", "extra_special_tokens"),
)
REPLACEMENT = "\ufffd"  # in the text of bytes that are no whole character
NOWHERE = "\U0010fffd"  # a character for private use
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # a byte of SentencePiece
# The bytes by the characters that stand for them in byte-level BPE: those that can be printed for themselves, and others.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(256)} - {*_PRINTED})
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}


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


def end_of_tokenizer(folder: Path) -> int | None:
    """Returns the ``eos_token`` of a folder's tokenizer, read without the tokenizers library; None if it names none."""
    if not has_tokenizer(folder) or (text := _text_of(_settings(folder).get("eos_token"))) is None:
        return None
    path = file_inside(folder, TOKENIZER)
    check_size(path, MAX_TOKENIZER_BYTES, TOKENIZER)
    kinds = (ValueError, RecursionError, LookupError, TypeError, AttributeError)
    rule = f"{TOKENIZER} must be a tokenizer of the tokenizers library"
    with refusing(kinds, rule, path, "Download it again."):
        file = json.loads(path.read_bytes())
        for each in file.get("added_tokens") or ():
            if each["content"] == text:
                return int(each["id"])
        vocab = (file.get("model") or {}).get("vocab")
        token = vocab.get(text) if isinstance(vocab, dict) else None
        return None if token is None else int(token)


class FolderTokenizer(Tokenizer):
    """A tokenizer of a folder, with its chat templates.

    Attributes:
        end: The token after a document; None: the folder names none.
        vocab_size: The number of tokens, with those added.
        has_chat_template: Whether messages can be rendered; a template for conversations with tools alone renders those.
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        if not has_tokenizer(folder):
            raise FileNotFoundError(
                f"{arg('a tokenizer')} must be a folder with a {TOKENIZER}; got none in {folder}. Name the folder of a model "
                "that has one, or make it there by AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers."
            )
        path = file_inside(folder, TOKENIZER)
        settings = _settings(folder)
        sources = chat_template.read_templates(folder, settings)
        contents = [repr(sorted(settings.items())), sources.get(DEFAULT, "")]
        if TOOL_USE in sources:
            contents.append(sources[TOOL_USE])
        self._digest = hashlib.sha256(hashlib.sha256(path.read_bytes()).digest())
        for content in contents:
            self._digest.update(hashlib.sha256(content.encode()).digest())
        self._tokenizer = _open(path)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.end = self._end(_text_of(settings.get("eos_token")), folder)
        added = self._tokenizer.get_added_tokens_decoder()
        _check_added(settings, {t.content: index for index, t in added.items()}, folder)
        self._written = re.compile(
            "|".join(re.escape(t.content) for t in added.values() if t.special and t.content)
            or "(?!)"
        )
        # Of a character that no tokenizer knows but by its bytes.
        probe = self._tokens_of(NOWHERE) or []
        is_known = NOWHERE in self._tokenizer.decode(probe, skip_special_tokens=False)
        self._unknown = frozenset(
            token for token in probe if not is_known and self.text_of(token).strip()
        )
        self._looked_at: set[str] = set()
        self._odd: set[str] = set()
        special = _special_texts(settings)
        self.folder, self.has_chat_template = folder, DEFAULT in sources
        self._templates = {
            name: ChatTemplate(source, folder, special) for name, source in sources.items()
        }

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

    def fingerprint(self) -> str:
        """Returns a digest of the folder's tokenizer, its settings and its chat template, and of the library's version."""
        import tokenizers

        return f"{self._digest.hexdigest()} tokenizers {tokenizers.__version__} end {self.end}"

    def num_unlike(self, other: "FolderTokenizer") -> int:
        """Returns how many of its tokens have the number of another token in ``other``."""
        texts = {number: text for text, number in other._tokenizer.get_vocab().items()}
        own = self._tokenizer.get_vocab().items()
        return sum(texts.get(number, text) != text for text, number in own)

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

    def lost_in(self, text: str) -> str:
        """Returns the characters of a text that the tokenizer does not know, each once; looks at few texts twice for it."""
        self._look_at({*text} - self._looked_at)
        if self._odd.isdisjoint(text):
            return ""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        known, shows = (
            np.zeros(len(text), bool),
            {each: self._shows(each) for each in {*encoding.ids}},
        )
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            known[start:end] |= shows[token]  # one for a space may cover what is left out behind it
        lost = (text[at] for at in np.flatnonzero(~known))
        return "".join(dict.fromkeys(each for each in lost if each in self._odd))

    def _look_at(self, characters: set[str]) -> None:
        """Finds those of which no token shows anything; a longer token may have them all the same."""
        self._looked_at |= characters
        for each in characters:
            tokens = self._tokens_of(each) if each.isprintable() and not each.isspace() else None
            if tokens is not None and not any(map(self._shows, tokens)):
                self._odd.add(each)

    def _tokens_of(self, character: str) -> list[int] | None:
        """Returns the tokens of a character alone; None where the library has an error for one that it does not know."""
        try:
            return self._tokenizer.encode(character, add_special_tokens=False).ids
        except Exception:  # the library raises no other kind
            return None

    def _shows(self, token: int) -> bool:
        return token not in self._unknown and bool(self.text_of(token).strip())

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
            tools: The tools that the model may call, for a template that writes them; if there is one for tools, it is used.
            ask: Whether the text is to end with the beginning of an answer, for a model to go on; there are no spans then.

        Raises:
            ValueError: There is no template, it refuses the messages or fails, or the assistant's part cannot be told.
        """
        template = self._template(has_tools=bool(tools))
        if template is None:
            got = f"{TOOL_USE} alone, which is for tools," if self._templates else "none"
            raise ValueError(
                f"messages need a chat template; got {got} in {self.folder}. Add {TEMPLATE}, or give prompt and completion."
            )
        return template.render(messages, tools=tools, ask=ask)

    def _template(self, *, has_tools: bool) -> ChatTemplate | None:
        """Returns the template of conversations with tools, or without."""
        default = self._templates.get(DEFAULT)
        return self._templates.get(TOOL_USE, default) if has_tools else default

    def uses(self, name: str, *, has_tools: bool = False) -> bool:
        """Returns whether the template of such conversations has this name, and so may write such a field of a message."""
        template = self._template(has_tools=has_tools)
        return template is not None and name in template.names


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
    listed = settings.get(ADDED)
    listed = listed if isinstance(listed, dict) else {}
    texts = {_text_of(token): index for index, token in listed.items()}
    missing = [text for text, index in texts.items() if text and str(added.get(text)) != str(index)]
    if missing:
        raise ValueError(
            f"a token of added_tokens_decoder in {SETTINGS} must be an added token of {TOKENIZER} with the same number; got "
            f"{shorten(missing)} in {folder}, which {TOKENIZER} would cut into several. Write both files anew: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) of transformers."
        )


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of a tokenizer, with the special tokens of ``SPECIAL_MAP`` where transformers reads them there."""
    settings = _optional_json(folder, SETTINGS)
    if ADDED in settings:
        return settings
    special = {
        name: token
        for name, token in _optional_json(folder, SPECIAL_MAP).items()
        if name.endswith("_token") or name in (*BY_NAME, *WITHOUT_NAMES)
    }
    return settings | special


def _special_texts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a template may name of the special tokens: their texts by name, and a list of those without names."""
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    for name in BY_NAME:
        named |= settings[name] if isinstance(settings.get(name), dict) else {}
    found: dict[str, Any] = dict.fromkeys(SPECIAL, "")
    found |= {name: text for name, token in named.items() if (text := _text_of(token)) is not None}
    for listed in (settings.get(name) for name in WITHOUT_NAMES):
        if isinstance(listed, list) and listed:
            found[WITHOUT_NAMES[0]] = [
                text for each in listed if (text := _text_of(each)) is not None
            ]
    return found


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    return read_json(file_inside(folder, name)) if (folder / name).exists() else {}


def _text_of(token: Any) -> str | None:
    """The text of a special token, which is stored as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
