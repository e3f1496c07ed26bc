"""The MLP of a layer, for all tokens: GELU(x w_up) w_down, or (SiLU(x w_gate) * x w_up) w_down."""

import jax
from jaxtyping import Array, Float, PyTree

from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.products import product


def mlp(config: TransformerConfig, params: PyTree, x: Float[Array, "batch seq embed"]) -> Array:
    """Returns the output of the MLP."""
    up = product(config, "btd,dgf->btgf", x, params["w_up"].astype(x.dtype))
    if "b_up" in params:
        up = up + params["b_up"].astype(x.dtype)[None, None]
    gate, up = (up[:, :, 0], up[:, :, 1]) if config.mlp == "swiglu" else (None, up[:, :, 0])
    out = product(config, "btf,fd->btd", activated(gate, up), params["w_down"].astype(x.dtype))
    return out + params["b_down"].astype(x.dtype)[None, None] if "b_down" in params else out


def activated(gate: Float[Array, "*dims"] | None, up: Float[Array, "*dims"]) -> Array:
    """Returns the hidden activations: SiLU(gate) * up, or GELU(up), in its tanh form, where there is no gate."""
    return jax.nn.gelu(up, approximate=True) if gate is None else jax.nn.silu(gate) * up
