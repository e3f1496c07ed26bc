"""The field ``logprobs`` of a completion: how likely the tokens of a prompt and its answer are, in the form of OpenAI's API.

    {"tokens": ["def", " f"], "token_logprobs": [null, -2.3], "top_logprobs": [null, {" f": -2.3, " main": -1.9}],
     "text_offset": [0, 3]}

Nothing is known of the first token of a prompt. The likeliest tokens of a place are named by their text, with the token that is
there; of two with one text the likelier is kept.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from jaxpar.data.text import Tokenizer
from jaxpar.models.transformer.scoring import TokenScores
from jaxpar.serve.language_model import TextStream

MOST_TOP = 5


def logprobs(
    tokenizer: Tokenizer, row: Sequence[int], scores: TokenScores, *, first: int, num_top: int
) -> dict[str, list[Any]]:
    """Returns the field for the tokens of a row from ``first`` on.

    Args:
        tokenizer: Turns tokens into text.
        row: The tokens of the prompt, then those of the answer.
        scores: How likely they are.
        first: 0 where the prompt is told too, else its length.
        num_top: The likeliest tokens to tell of each place, at most ``MOST_TOP``.
    """
    text = cache(lambda token: tokenizer.decode(np.array([token], np.int64)))
    stream, offset = TextStream(tokenizer, np.array(row[:first], np.int64)), 0
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for at in range(first, len(row)):
        own = float(scores.log_probs[at])
        top = {text(row[at]): own}
        for token, value in zip(scores.top[at][:num_top], scores.top_log_probs[at], strict=False):
            top[text(int(token))] = max(float(value), top.get(text(int(token)), float(value)))
        is_first = at == 0
        values = text(row[at]), None if is_first else own, None if is_first else top, offset
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
        offset += len(stream.add(row[at]))
    return found
