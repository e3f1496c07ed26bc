"""The prompts of `generate`: checked, padded on the right to a power of two, and the tokens that come back checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxpar._compat import Tracer
from jaxpar.models.transformer.config import TransformerConfig

NO_TOKEN = -1
LEAST = 16  # below it a program for each power of two would save nothing


@dataclass(frozen=True)
class Prompts:
    """Prompts as a compiled program takes them.

    Attributes:
        tokens: ``[batch, seq]``, padded with zeros to a power of two.
        lengths: The tokens of each row.
        longest: The tokens of the longest row.
        cache_length: The positions that the cache must have.
        room: The columns for new tokens.
        rows: The rows as they were given, on the host, if they are of unequal lengths.
    """

    tokens: Any
    lengths: Any
    longest: int
    cache_length: int
    room: int
    rows: tuple[np.ndarray, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether all rows were given as one array."""
        return not self.rows


def read_prompts(config: TransformerConfig, prompt: Any, num_tokens: int) -> Prompts:
    """Returns prompts ready for a model; raises for those that it cannot continue by ``num_tokens`` tokens."""
    given = _as_array(prompt)
    if isinstance(given, list):
        lengths = [len(row) for row in given]
        _check_shape((len(given), min(lengths)))
        for row in given:
            _check_tokens(config, row)
        tokens = np.zeros((len(given), max(lengths)), np.int32)
        for i, row in enumerate(given):
            tokens[i, : len(row)] = row
        rows = tuple(row.astype(np.int32) for row in given)
    else:
        _check_shape(given.shape)
        _check_tokens(config, given)
        tokens, lengths, rows = given, [given.shape[1]] * len(given), ()
    longest = max(lengths)
    _check_num_tokens(config, longest, num_tokens)
    most = config.max_positions if config.positions == "learned" else None
    width = round_up(longest, most)
    padded = jnp.pad(jnp.asarray(tokens, jnp.int32), ((0, 0), (0, width - longest)))
    cache_length = round_up(longest + num_tokens, most)
    return Prompts(padded, np.asarray(lengths, np.int32), longest, cache_length, round_up(num_tokens, None), rows)


def next_power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not below ``count``, which is positive.

    >>> next_power_of_two(3)
    4
    """
    return 1 << (count - 1).bit_length()


def round_up(length: int, most: int | None) -> int:
    """Returns the smallest power of two from 16 on that is not below ``length``, and at most ``most``."""
    rounded = max(LEAST, next_power_of_two(length))
    return rounded if most is None else min(rounded, most)


def _as_array(prompt: Any) -> jax.Array | np.ndarray | list[np.ndarray]:
    """Returns prompts as one array, or as a list of rows if their lengths differ."""
    if isinstance(prompt, (jax.Array, np.ndarray)) or not isinstance(prompt, Sequence):
        return prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
    rows = [np.asarray(row) for row in prompt]
    if rows and all(row.ndim == 1 for row in rows) and len({len(row) for row in rows}) > 1:
        return rows
    return np.asarray(prompt)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"a prompt must be tokens [batch, seq], at least one a row; got shape {shape}. Give rows of tokens."
        )


def _check_num_tokens(config: TransformerConfig, longest: int, num_tokens: int) -> None:
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be positive; got {num_tokens}. Choose 1 or more.")
    if config.positions == "learned" and (room := config.max_positions - longest) < num_tokens:
        raise ValueError(
            "a model with learned positions has no more positions than its table; got a prompt of "
            f"{longest} and num_tokens={num_tokens}, max_positions={config.max_positions}. Cut the prompt"
            + (f", or ask for at most {room} tokens." if room > 0 else ".")
        )


def _check_tokens(config: TransformerConfig, prompt: jax.Array | np.ndarray) -> None:
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers; got {prompt.dtype}. Give those that the model's tokenizer makes.")
    if isinstance(prompt, Tracer):
        return
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= config.vocab_size:
        raise ValueError(
            f"tokens must be from 0 to vocab_size - 1; got tokens from {lowest} to {highest}, vocab_size={config.vocab_size}. "
            "Give those that the model's own tokenizer makes."
        )


def check_drawn(tokens: jax.Array | np.ndarray) -> None:
    """Raises if a token could not be drawn."""
    if not isinstance(tokens, Tracer) and int(tokens.min()) == NO_TOKEN:
        raise FloatingPointError(
            "a model's scores must be finite for a token to be drawn; got some that are not. Look for NaN or infinity in the "
            'params, or compute in a wider dtype, such as compute_dtype="float32".'
        )


def on_host(x: jax.Array) -> np.ndarray:
    """Returns a whole array on this host; every process must call it."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
