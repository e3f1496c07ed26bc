"""The keys and values of earlier positions, of all layers in one array.

A loop over layers and tokens carries it and writes it in place. Cut into layers, as inputs and outputs of such a loop, XLA
would copy it whole for each token. Heads come before positions, as the products of attention read them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.span import Span


class Cache(NamedTuple):
    """Keys and values by position.

    Attributes:
        both: Keys, then values. After the last position that was written they have no meaning.
        layer: The layer that reads and writes; None between layers.
    """

    both: Float[Array, "layers 2 batch kv_heads length head_dim"]
    layer: Int[Array, ""] | int | None = None

    @property
    def batch(self) -> int:
        """The number of its rows."""
        return self.both.shape[2]

    def write(
        self,
        k: Float[Array, "rows seq kv_heads head_dim"],
        v: Float[Array, "rows seq kv_heads head_dim"],
        span: Span,
    ) -> "Cache":
        """Returns the cache with the keys and values of a span in the layer; of copies of a row the first is written."""
        new = jnp.stack([k, v]).astype(self.both.dtype)
        new = new.transpose(0, 1, 3, 2, 4)
        if span.is_start:
            return self._with_slice(new, position=0)
        copies = new.shape[1] // self.batch
        new = new[:, ::copies]
        positions = span.positions.reshape(self.batch, -1)
        positions = positions[:, 0]
        if self.batch == 1:
            return self._with_slice(new, positions[0])
        return self._with_one_of_each_row(new, positions)

    def _with_slice(self, new: Array, position: Any) -> "Cache":
        """Returns the cache with keys and values of all rows from one position on."""
        at = _place(self.layer, position=position)
        both = lax.dynamic_update_slice(self.both, new[None], at)
        return self._replace(both=both)

    def _with_one_of_each_row(self, new: Array, positions: Int[Array, " batch"]) -> "Cache":
        """Returns the cache with one position's keys and values in each row."""
        rows = jnp.arange(self.batch)
        at = self.both.at[self.layer, :, rows, :, positions]
        both = at.set(
            new[:, :, :, 0].transpose(1, 0, 2, 3),
            mode="promise_in_bounds",  # a cache has room for all positions of its rows
            unique_indices=True,
            indices_are_sorted=True,
        )
        return self._replace(both=both)

    def read(self) -> tuple[Array, Array]:
        """Returns the keys and the values ``[batch, kv_heads, length, head_dim]`` of the layer."""
        return self._one_of_both(0), self._one_of_both(1)

    def _one_of_both(self, which: int) -> Array:
        sizes = (1, 1, *self.both.shape[2:])
        at = _place(self.layer, which)
        found = lax.dynamic_slice(self.both, at, sizes)
        return found[0, 0]


def _place(layer: Any, which: int = 0, position: Any = 0) -> list[Array]:
    """Returns indices of one dtype into the array of a cache."""
    indices = (layer, which, 0, 0, position, 0)
    return [jnp.asarray(index, jnp.int32) for index in indices]


def empty_cache(config: TransformerConfig, batch: int, length: int) -> Cache:
    """Returns zeros for the keys and values of ``length`` positions in all layers."""
    heads = config.kv_heads * config.kv_copies
    sizes = (config.num_layers, 2, batch, heads, length, config.head_dim)
    return Cache(jnp.zeros(sizes, config.compute_dtype))
