"""LayerNorm and RMSNorm, with statistics in float32 or wider, and products with a number."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxpar.models.transformer.config import TransformerConfig


def norm(
    config: TransformerConfig,
    params: PyTree,
    x: Float[Array, "batch seq embed"],
) -> Array:
    """Returns ``x`` normalized over its width."""
    wide = _wide(x)
    if config.norm == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    normalized = _scaled_rms(wide, params["scale"], config.norm_epsilon, (-1,))
    if "shift" in params:
        shift = params["shift"].astype(wide.dtype)
        normalized = normalized + shift[None, None]
    return normalized.astype(x.dtype)


def rms_norm(
    x: Float[Array, "batch seq heads head_dim"],
    scale: PyTree,
    epsilon: float,
) -> Array:
    """Returns queries or keys normalized over as many of their last dims as ``scale`` has."""
    dims = range(-scale.ndim, 0)
    normalized = _scaled_rms(_wide(x), scale, epsilon, dims)
    return normalized.astype(x.dtype)


def scaled(x: Array, factor: float) -> Array:
    """Returns ``x`` times a number, which is not rounded to 16 bits."""
    if factor == 1:
        return x
    product = _wide(x) * factor
    return product.astype(x.dtype)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scaled_rms(
    wide: Array,
    scale: PyTree,
    epsilon: float,
    dims: Sequence[int],
) -> Array:
    """Returns wide / sqrt(mean(wide^2 over dims) + epsilon) * scale, whose dims are the last ones."""
    mean_square = jnp.square(wide).mean(tuple(dims), keepdims=True)
    normalized = wide * jax.lax.rsqrt(mean_square + epsilon)
    leading = (1,) * (wide.ndim - scale.ndim)
    scale = scale.astype(wide.dtype)
    return normalized * scale.reshape(leading + scale.shape)
