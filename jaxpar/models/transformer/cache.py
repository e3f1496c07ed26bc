"""The keys and values of earlier positions, of all layers in one array.

A loop over layers and tokens carries it and writes it in place. Cut into layers, as inputs and outputs of such a loop, XLA
would copy it whole for each token. Heads come before positions, as the products of attention read them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
        self, k: Float[Array, "rows seq kv_heads head_dim"], v: Float[Array, "rows seq kv_heads head_dim"], span: Span
    ) -> "Cache":
        """Returns the cache with the keys and values of a span in the layer; of copies of a row the first is written."""
        new = jnp.stack([k, v]).astype(self.both.dtype).transpose(0, 1, 3, 2, 4)
        if span.is_start:
            return self._replace(both=jax.lax.dynamic_update_slice(self.both, new[None], _place(self.layer)))
        new, positions = new[:, :: new.shape[1] // self.batch], span.positions.reshape(self.batch, -1)[:, 0]
        if self.batch == 1:
            at = _place(self.layer, position=positions[0])
            return self._replace(both=jax.lax.dynamic_update_slice(self.both, new[None], at))
        # A cache has room for all positions of its rows, so none is out of bounds.
        how = {"mode": "promise_in_bounds", "unique_indices": True, "indices_are_sorted": True}
        at = self.both.at[self.layer, :, jnp.arange(self.batch), :, positions]
        return self._replace(both=at.set(new[:, :, :, 0].transpose(1, 0, 2, 3), **how))

    def read(self) -> tuple[Array, Array]:
        """Returns the keys and the values ``[batch, kv_heads, length, head_dim]`` of the layer."""
        sizes = (1, 1, *self.both.shape[2:])
        k, v = (jax.lax.dynamic_slice(self.both, _place(self.layer, which), sizes) for which in range(2))
        return k[0, 0], v[0, 0]


def _place(layer: Any, which: int = 0, position: Any = 0) -> list[Array]:
    """Returns indices of one dtype into the array of a cache."""
    return [jnp.asarray(index, jnp.int32) for index in (layer, which, 0, 0, position, 0)]


def empty_cache(config: TransformerConfig, batch: int, length: int) -> Cache:
    """Returns zeros for the keys and values of ``length`` positions in all layers."""
    heads = config.kv_heads * config.kv_copies
    return Cache(jnp.zeros((config.num_layers, 2, batch, heads, length, config.head_dim), config.compute_dtype))
