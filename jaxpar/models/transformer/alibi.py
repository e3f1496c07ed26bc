"""ALiBi: a penalty on distance, a slope for each head, added to the scores (Press et al. 2021, arXiv 2108.12409)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar import context_parallel
from jaxpar.models.transformer.config import TransformerConfig


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the penalty of each head per unit of distance.

    For a power of two the slopes are 2^(-8/n), 2^(-16/n) and so on; for other numbers those of the power below, then every
    second slope of the power above.

    **Reference**: Press et al. 2021, arXiv 2108.12409, section 3 and the authors' code.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * power, 2) / power)
    return np.concatenate([slopes, between])[:num_heads]


def alibi_bias(
    config: TransformerConfig, ahead: Int[Array, "rows seq length"], dtype: jnp.dtype, slopes: Array | None
) -> Array:
    """Returns the penalties of queries for keys that are ``ahead``, of the given slopes or else those of all heads."""
    wide = dtype if config.attention != "xla" else jnp.promote_types(dtype, jnp.float32)
    of_heads = alibi_slopes(config.num_heads) if slopes is None else slopes
    slopes = jnp.asarray(of_heads, jnp.promote_types(dtype, jnp.float32))
    return (slopes[None, :, None, None] * ahead[:, None].astype(slopes.dtype)).astype(wide)


def own_slopes(config: TransformerConfig, parts: int) -> Float[Array, " heads"]:
    """Returns the penalties of the heads that a device gets by ``sequence_to_heads``."""
    shards = context_parallel.num_shards_of_heads(config.num_heads)
    by_part = jnp.asarray(alibi_slopes(config.num_heads).reshape(shards, parts, -1))
    return by_part[:, jax.lax.axis_index(context_parallel.CONTEXT)].reshape(-1)
