"""Tokenizers turn text into tokens and back: the interface, and the tokenizer of models whose tokens are bytes.

Tokenizers of published models are read by ``jaxpar.huggingface.read_tokenizer``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    @property
    def end(self) -> int | None:
        """The token after a document; None: there is none."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        ...

    def fingerprint(self) -> str:
        """Returns a digest of all that the tokens depend on."""
        ...

    def encode(self, texts: Sequence[str], *, begins: Sequence[bool]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each text its tokens and, for each token, the index after its last character; -1: none of the text's."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of tokens."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Returns a conversation as text, and the spans of what the assistant says."""
        ...


class ByteTokenizer:
    """Bytes of UTF-8 as tokens; a document ends with a zero byte."""

    end = 0
    vocab_size = 256
    has_chat_template = False

    def fingerprint(self) -> str:
        """Returns a constant."""
        return "bytes of UTF-8"

    def encode(self, texts: Sequence[str], *, begins: Sequence[bool]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the bytes of each text and the index after the character that each belongs to.

        Raises:
            ValueError: A text has zero bytes.
        """
        del begins
        found = []
        for text in texts:
            if "\0" in text:
                raise ValueError("text as bytes must have no zero bytes, which end a document; got one. Remove it.")
            widths = [len(character.encode()) for character in text]
            found.append((np.frombuffer(text.encode(), np.uint8), np.repeat(np.arange(len(text)) + 1, widths)))
        return found

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of bytes; bytes that are not UTF-8 become the replacement character."""
        return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")

    def render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Raises: bytes have no chat template."""
        del messages
        raise ValueError(
            "messages need a tokenizer with a chat template; got a model of bytes. Give prompt and completion, or name a "
            "model's folder by --init-from or --tokenizer."
        )
