"""Which tokens of a batch are padding, so that experts compute none of them and routers count none of them.

    tokens     a0 a1 a2 b0 b1 ..      a prompt and an answer, a document, and the end of the row
    learned     -  1  1  1  -  -      "-": the weight is 0, or the target -100
    real        1  1  1  1  -  -

A token is padding if no loss depends on it: neither it nor a later token of its row or segment is learned, and attention looks
back alone. So a prompt is not padding, and what follows the last learned token of a document is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from jaxpar.models.transformer.span import Span, max_of_segment

IGNORED = -100  # the label that jaxpar.losses.softmax_cross_entropy ignores


def token_weights(batch: PyTree) -> Array | None:
    """Returns the weights of a batch's tokens, ``[batch, seq]`` or ``[batch]``: ``weight``, and 0 where ``targets`` is -100.

    None for a batch without ``weight`` and without integer ``targets`` of the shape of its ``tokens``: all tokens count.
    """
    weight, targets = batch.get("weight"), batch.get("targets")
    if not _are_labels(targets, batch.get("tokens")):
        return weight
    is_learned = jnp.asarray(targets) != IGNORED
    if weight is None:
        return is_learned.astype(jnp.float32)
    weight = _with_dims(jnp.asarray(weight), is_learned.ndim)
    return jnp.where(is_learned, weight, 0)


def _with_dims(weights: Array, num_dims: int) -> Array:
    """Returns weights with dims of 1 after their own."""
    trailing = (1,) * (num_dims - weights.ndim)
    return weights.reshape(*weights.shape, *trailing)


def _are_labels(targets: Any, tokens: Any) -> bool:
    if targets is None:
        return False
    if not jnp.issubdtype(targets.dtype, jnp.signedinteger):
        return False  # no unsigned label is -100
    return tokens is None or targets.shape == tokens.shape


def real_tokens(weights: Any, span: Span, shape: tuple[int, ...]) -> Bool[Array, "batch seq"]:
    """Returns which tokens are real: they, or a later token of their row or segment, are of another weight than 0.

    Args:
        weights: The weights of the tokens, ``[batch, seq]`` or ``[batch]``.
        span: The positions and segments of the tokens.
        shape: The batch and seq of the tokens.
    """
    counts = _with_dims(jnp.asarray(weights), 2) != 0
    counts = jnp.broadcast_to(counts, shape)
    if not span.is_in_order:
        positions = jnp.broadcast_to(span.positions, shape)
        ends = jnp.where(counts, positions + 1, 0)
        return positions < max_of_segment(ends, span.segments)
    return _next_that_counts(counts, span.segments)


def _next_that_counts(
    counts: Bool[Array, "batch seq"], segments: Int[Array, "batch seq"] | None
) -> Bool[Array, "batch seq"]:
    """Returns whether the next token that counts, this one included, is of the same segment; their numbers rise in a row."""
    numbers = jnp.zeros(counts.shape, jnp.int32) if segments is None else segments
    nothing = counts.shape[1]  # above all numbers
    of_those = jnp.where(counts, numbers, nothing)
    return jax.lax.cummin(of_those, axis=1, reverse=True) == numbers
