"""The MLP of a layer, for all tokens: GELU(x w_up) w_down, or (SiLU(x w_gate) * x w_up) w_down."""

import jax
from jaxtyping import Array, Float, PyTree

from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.products import product


def mlp(
    config: TransformerConfig,
    params: PyTree,
    x: Float[Array, "batch seq embed"],
) -> Array:
    """Returns the output of the MLP."""
    up_weight = params["w_up"].astype(x.dtype)
    up = product(config, "btd,dgf->btgf", x, up_weight)
    if "b_up" in params:
        up = up + _as_bias(params["b_up"], x)
    if config.mlp == "swiglu":
        hidden = activated(up[:, :, 0], up[:, :, 1])
    else:
        hidden = activated(None, up[:, :, 0])
    down_weight = params["w_down"].astype(x.dtype)
    out = product(config, "btf,fd->btd", hidden, down_weight)
    if "b_down" in params:
        out = out + _as_bias(params["b_down"], x)
    return out


def _as_bias(
    bias: Float[Array, "*width"],
    x: Array,
) -> Float[Array, "1 1 *width"]:
    return bias.astype(x.dtype)[None, None]


def activated(
    gate: Float[Array, "*dims"] | None,
    up: Float[Array, "*dims"],
) -> Array:
    """Returns the hidden activations: SiLU(gate) * up, or GELU(up), in its tanh form, where there is no gate."""
    if gate is None:
        return jax.nn.gelu(up, approximate=True)
    return jax.nn.silu(gate) * up
