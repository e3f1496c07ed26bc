"""The text of a row of tokens while it grows: complete characters only, and nothing of a stop string."""

from collections.abc import Sequence

import numpy as np

from jaxpar.data.tokenizer import Tokenizer

# Tokens of the prompt that are decoded with the first new ones, since a tokenizer may put spaces between tokens.
CONTEXT = 6
INCOMPLETE = "\ufffd"  # what a tokenizer makes of part of a character


class TextStream:
    """The text that new tokens add to a prompt, in pieces.

    Args:
        tokenizer: Turns tokens into text.
        prompt: The tokens of the prompt.
        stop: Texts before which the row ends.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens = [int(token) for token in prompt[-CONTEXT:]]
        self._num_read = len(self._tokens)  # the tokens whose text was returned; they are kept to decode the next ones
        self._held = ""  # text that may be the beginning of a stop string
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Returns the text that is complete with one more token; "" if there is none."""
        self._tokens.append(token)
        return self._until_stop(self._decode(at_end=False))

    def end(self) -> str:
        """Returns the rest of the text, once the row has ended."""
        text = self._until_stop(self._decode(at_end=True))
        rest, self._held = self._held, ""
        return text if self.is_stopped else text + rest

    def _decode(self, *, at_end: bool) -> str:
        """Returns the text that was not returned yet; "" if it ends within a character of several bytes."""
        before, text = (self._text(self._tokens[:end]) for end in (self._num_read, None))
        old = _shared(before, text)  # not all of before, if the prompt ends within a character
        if len(text) == old or (text.endswith(INCOMPLETE) and not at_end):
            return ""
        self._tokens = self._tokens[self._num_read :]
        self._num_read = len(self._tokens)
        return text[old:]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(np.array(tokens, np.int64))

    def _until_stop(self, text: str) -> str:
        """Returns text up to the first stop string, and holds back what may be the beginning of one."""
        if self.is_stopped:
            return ""
        text = self._held + text
        if found := [at for at in map(text.find, self._stop) if at >= 0]:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _shared(one: str, other: str) -> int:
    """Returns the number of characters with which both texts begin."""
    both = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of a text that is a beginning of a stop string, not all of it."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
