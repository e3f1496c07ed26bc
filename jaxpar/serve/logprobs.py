r"""The field ``logprobs`` of a completion: how likely the tokens of a prompt and its answer are, in the form of OpenAI's API.

    {"tokens": ["def", " f"], "token_logprobs": [null, -2.3], "top_logprobs": [null, {" f": -2.3, " main": -1.9}],
     "text_offset": [0, 3]}

Nothing is known of the first token of a prompt. The likeliest tokens of a place are named by their text, with the token that is
there. It is their text after other text: tokenizers of SentencePiece leave out the space of a token that begins a text. A token
that has a part of a character alone is named by its bytes, such as bytes:\xe6\x97; one whose name is that of another token of
the place by its number, such as token_id:98. Special tokens are named too. An offset is where the text of a token begins in the
text of the completion; a token that the text does not show, such as one that ends it, has that of the next.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.text import Tokenizer
from jaxpar.models.transformer.scoring import TokenScores
from jaxpar.serve.language_model import TextStream

MOST_TOP = 5


class Echo(NamedTuple):
    """A prompt as the text of its completion begins with it.

    Attributes:
        text: Its text.
        offsets: Where each of its tokens begins in it.
    """

    text: str
    offsets: list[int]


def echo_of(tokenizer: Tokenizer, given: str | None, tokens: np.ndarray) -> Echo:
    """Returns a prompt that was given as text, or, where that is None, as tokens, of which the special ones are shown too."""
    if given is not None:
        _, ends = tokenizer.encode_prompt(given)
        return Echo(given, _starts(ends.tolist()))
    stream, text = TextStream(tokenizer, (), special=True), _texts(tokenizer)
    return Echo(*_placed(stream, [(token, text(token), False) for token in tokens.tolist()], 0))


def _starts(ends: Sequence[int]) -> list[int]:
    """Returns where each token begins, of the indices after the last character of each; -1: the text does not have it."""
    starts, start, at = [], 0, 0
    for end in ends:
        if (
            end > at
        ):  # else it is not of the text, or a further part of the character of the token before it
            start, at = at, end
        starts.append(start if end == at else at)
    return starts


def logprobs(
    tokenizer: Tokenizer,
    row: Sequence[int],
    scores: TokenScores,
    *,
    num_prompt: int,
    num_top: int,
    echo: Echo | None = None,
) -> dict[str, list[Any]]:
    """Returns the field for the tokens of an answer, and for those of its prompt where the text begins with it.

    Args:
        tokenizer: Turns tokens into text.
        row: The tokens of the prompt, then those of the answer.
        scores: How likely they are.
        num_prompt: The number of tokens of the prompt.
        num_top: The likeliest tokens to tell of each place, at most ``MOST_TOP``.
        echo: The prompt, where the text begins with it.
    """
    text = cache(_texts(tokenizer))
    name = cache(lambda token: _name(text(token), tokenizer.bytes_of(token)))
    stream, at = TextStream(tokenizer, row[:num_prompt]), len(echo.text) if echo else 0
    own = [(token, text(token), not text(token, special=False)) for token in row[num_prompt:]]
    _, answer = _placed(stream, own, at)
    offsets = [*(echo.offsets if echo else ()), *answer]
    first = 0 if echo else num_prompt
    names = [name(token) for token in row[first:]]
    begins = _of_beginning(tokenizer, row, text, echo)
    if begins is not None and begins >= first:
        token = row[begins]
        names[begins - first] = _name(_alone(tokenizer, token, True), tokenizer.bytes_of(token))
    found: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": offsets,
    }
    for at, named in enumerate(names, first):
        own = float(scores.log_probs[at])
        top = {named: own}
        likeliest = zip(scores.top[at][:num_top].tolist(), scores.top_log_probs[at], strict=False)
        for token, value in likeliest:
            if token == row[at]:
                continue
            other = name(token)
            top[f"token_id:{token}" if other in top else other] = float(value)
        is_first = at == 0
        found["tokens"].append(named)
        found["token_logprobs"].append(None if is_first else own)
        found["top_logprobs"].append(None if is_first else top)
    return found


def _texts(tokenizer: Tokenizer) -> Callable[..., str]:
    """Returns what gives the text of a token as it stands after other text; ``special``: of special ones too."""
    [(before, _)] = tokenizer.encode(["a"], begins=[False])
    shown = tokenizer.decode(before)

    def text(token: int, *, special: bool = True) -> str:
        after = tokenizer.decode(np.array([*before, token], np.int64), special=special)
        is_after = after.startswith(shown)
        return after.removeprefix(shown) if is_after else _alone(tokenizer, token, special)

    return text


def _alone(tokenizer: Tokenizer, token: int, special: bool) -> str:
    return tokenizer.decode(np.array([token], np.int64), special=special)


def _of_beginning(
    tokenizer: Tokenizer, row: Sequence[int], text: Callable[..., str], echo: Echo | None
) -> int | None:
    """Returns the place of the token with which the text begins; None where special tokens are shown before it."""
    at = next((at for at, token in enumerate(row) if text(token, special=False)), None)
    before = tokenizer.decode(np.array(row[:at], np.int64), special=True)
    return None if echo and before and echo.text.startswith(before) else at


def _name(text: str, own: bytes) -> str:
    """Returns a token's text, or its bytes in the form of OpenAI's API where they are no whole characters."""
    try:
        own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
    return text


def _placed(
    stream: TextStream, tokens: Sequence[tuple[int, str, bool]], at: int
) -> tuple[str, list[int]]:
    """Returns a text that goes on at ``at``, and where that of each token begins.

    A token may show what was held back of those before it, which were no whole character.

    Args:
        stream: Turns the tokens into the text.
        tokens: Each with its own text, and whether the text does not show it.
        at: The length of the text before them.
    """
    text, offsets = "", list[int]()
    for token, own, _ in tokens:
        shown = stream.add(token)
        text += shown
        offsets.append(at + len(text) - len(own if shown.endswith(own) else shown))
    text += stream.end()
    following = at + len(text)
    for number in reversed(range(len(tokens))):
        if tokens[number][2]:
            offsets[number] = following
        following = offsets[number]
    return text, offsets
