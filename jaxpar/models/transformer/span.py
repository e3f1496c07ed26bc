"""Where the tokens of a call lie: their positions, and their segments where a row holds several documents."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxpar import context_parallel
from jaxpar.documents import Documents


class Span(NamedTuple):
    """The positions of the tokens that a call gets.

    Attributes:
        positions: Those of each row; one row if all have the same.
        lengths: The length of the row or document of each token, these included; one for a row, or for all.
        is_start: Whether these are the first tokens of each row; if not, there is one token a row, after those in a cache.
        segments: The segment of each token; None: each row is one.
        is_in_order: Whether the tokens are in the order of their row; if not, attention goes by positions.
        documents: Where the segments lie, for a kernel that takes them so (``documents_of``); None: it is given a bias.
    """

    positions: Int[Array, "rows seq"]
    lengths: Int[Array, "batch seq"] | Int[Array, "batch 1"] | int
    is_start: bool = True
    segments: Int[Array, "batch seq"] | None = None
    is_in_order: bool = True
    documents: Documents | None = None

    @classmethod
    def packed(cls, segments: Int[Array, "batch seq"]) -> "Span":
        """Returns the span of whole rows of several segments (``runs_in``), in each of which positions begin anew."""
        index = jnp.arange(segments.shape[1], dtype=jnp.int32)
        index = jnp.broadcast_to(index[None], segments.shape)
        begins = jnp.where(_changes(segments), index, 0)
        firsts = lax.cummax(begins, axis=1)
        return cls.given(index - firsts, segments)._replace(is_in_order=True)

    @classmethod
    def given(
        cls, positions: Int[Array, "batch seq"], segments: Int[Array, "batch seq"] | None
    ) -> "Span":
        """Returns the span of the tokens of whole rows in any order, and over ``context`` of a device's part of them.

        Args:
            positions: The position of each token in its segment, or row.
            segments: The segment of each token, a number below the tokens of a row.
        """
        lengths = max_of_segment(positions + 1, segments)
        return cls(positions, lengths, segments=segments, is_in_order=False)


def max_of_segment(
    values: Int[Array, "batch seq"], segments: Int[Array, "batch seq"] | None
) -> Int[Array, "batch seq"]:
    """Returns for each token the largest value in its segment, or row; over ``context`` in all parts of it.

    Args:
        values: Numbers of 0 or more.
        segments: The segment of each token, a number below the tokens of a row.
    """
    numbers = jnp.zeros_like(values) if segments is None else segments
    batch, seq = values.shape
    parts = context_parallel.num_parts()
    rows = jnp.arange(batch)[:, None]
    largest = jnp.zeros((batch, parts * seq), values.dtype)
    largest = largest.at[rows, numbers].max(values)
    if parts > 1:
        largest = lax.pmax(largest, context_parallel.CONTEXT)
    return jnp.take_along_axis(largest, numbers, 1)


def runs_in(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns the segments of each row numbered from 0, so that no two of them have the same number."""
    return jnp.cumsum(_changes(segments), axis=1, dtype=jnp.int32)


def _changes(segments: Int[Array, "batch seq"]) -> Array:
    """Returns whether a token is of another segment than the one before it."""
    differ = segments[:, 1:] != segments[:, :-1]
    return jnp.pad(differ, ((0, 0), (1, 0)))
