"""ALiBi: a penalty on the distance between a query and a key, with a slope for each head, added to the scores."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar import context_parallel
from jaxpar.models.transformer.config import TransformerConfig


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the penalty of each head per unit of distance.

    For a power of two the slopes are 2^(-8/n), 2^(-16/n) and so on; for other numbers those of the
    power below, then every second slope of the power above.

    **Reference**: Press et al. 2021, arXiv 2108.12409, section 3 and the authors' code.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * power, 2) / power)
    return np.concatenate([slopes, between])[:num_heads]


def alibi_bias(
    config: TransformerConfig,
    ahead: Int[Array, "rows seq length"],
    dtype: jnp.dtype,
    slopes: Array | None,
) -> Float[Array, "rows heads seq length"]:
    """Returns the penalties of queries for keys that are ``ahead``.

    Args:
        config: The model.
        ahead: How many positions a key is after a query; negative before it.
        dtype: That of the scores.
        slopes: Those of the heads; None: ``alibi_slopes`` of all heads.
    """
    exact = jnp.promote_types(dtype, jnp.float32)
    of_heads = alibi_slopes(config.num_heads) if slopes is None else slopes
    slopes = jnp.asarray(of_heads, exact)
    slopes = slopes[None, :, None, None]
    penalties = slopes * ahead[:, None].astype(exact)
    return penalties.astype(exact if config.attention == "xla" else dtype)


def own_slopes(config: TransformerConfig, parts: int) -> Float[Array, " heads"]:
    """Returns the penalties of the heads that a device gets by ``sequence_to_heads``."""
    slopes = np.tile(alibi_slopes(config.num_heads), context_parallel.copies_of_heads.value)
    shards = context_parallel.num_shards_of_heads(len(slopes))
    slopes = slopes.reshape(shards, parts, -1)
    part = jax.lax.axis_index(context_parallel.CONTEXT)
    return jnp.asarray(slopes)[:, part].reshape(-1)
