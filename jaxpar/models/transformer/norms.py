"""LayerNorm and RMSNorm, with statistics in float32 or wider."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxpar.models.transformer.config import TransformerConfig


def norm(config: TransformerConfig, params: PyTree, x: Float[Array, "batch seq embed"]) -> Array:
    """Returns ``x`` normalized over its width."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if config.norm == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    wide = _scaled_rms(wide, params["scale"], config.norm_epsilon, (-1,))
    return (wide + params["shift"].astype(wide.dtype)[None, None] if "shift" in params else wide).astype(x.dtype)


def rms_norm(x: Float[Array, "batch seq heads head_dim"], scale: PyTree, epsilon: float) -> Array:
    """Returns queries or keys normalized over as many of their last dims as ``scale`` has."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return _scaled_rms(wide, scale, epsilon, range(-scale.ndim, 0)).astype(x.dtype)


def _scaled_rms(wide: Array, scale: PyTree, epsilon: float, dims: Sequence[int]) -> Array:
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(tuple(dims), keepdims=True) + epsilon)
    return wide * scale.astype(wide.dtype).reshape((1,) * (wide.ndim - scale.ndim) + scale.shape)
