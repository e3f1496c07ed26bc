"""The products of a layer with its weights: in the compute dtype, or in FP8 (``jaxpar.fp8``) where both widths are large.

    w_qkv [embed] to [kv_heads, qkv, head_dim]    w_out [heads, head_dim] to [embed]
    w_up  [embed] to [gate, mlp]                  w_down [mlp] to [embed]

All others are in the compute dtype: scores of attention, routers, experts, factors of LoRA, embedding and head.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import fp8
from jaxpar.fields import arg
from jaxpar.models import lora
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.params import LAYER_WEIGHTS, layer_table


def product(config: TransformerConfig, spec: str, x: jax.Array, weight: Any) -> jax.Array:
    """Returns ``jnp.einsum(spec, x, weight)``, with the factors of a weight that has any.

    Args:
        config: The model.
        spec: Such as "btd,df->btf". The dims that are summed over are the last of x and the first of the weight.
        x: The input.
        weight: An array, or an Adapted of arrays.
    """

    def times(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        _, dims, result = spec.replace("->", ",").split(",")
        num_in = sum(dim not in result for dim in dims)
        is_fp8 = config.products == "fp8" and fp8.fits(*_widths(weight.shape, num_in))
        return fp8.dot(x, weight, num_in) if is_fp8 else jnp.einsum(spec, x, weight)

    return lora.einsum(spec, x, weight, times)


def fp8_weights(config: TransformerConfig) -> dict[str, bool]:
    """Returns the weights of a layer with their widths, "w_up 4096 x 28672", and whether their products are in FP8."""
    found = {}
    for part in ("attention", "mlp", "shared"):
        for name, spec in layer_table(config).get(part, {}).items():
            if name in LAYER_WEIGHTS:
                widths = _widths(spec.shape, LAYER_WEIGHTS[name])
                found[f"{name} {widths[0]} x {widths[1]}"] = config.products == "fp8" and fp8.fits(*widths)
    return found


def check_products(config: TransformerConfig) -> None:
    """Raises ValueError for a model that asks for FP8 and has no product that is large enough for it."""
    weights = fp8_weights(config)
    if config.products == "fp8" and not any(weights.values()):
        raise ValueError(
            f"products in FP8 are those with a weight whose widths are both at least {fp8.LEAST_WIDTH:,} and multiples of "
            f"{fp8.MULTIPLE}; got a layer with {', '.join(weights)}. Choose {arg(products='compute')}, or a wider model."
        )


def describe_products(config: TransformerConfig) -> str:
    """Returns a line on which products of a layer are in FP8; "" if none was asked to be."""
    if config.products != "fp8":
        return ""
    weights = fp8_weights(config)
    own, others = ([name for name, is_fp8 in weights.items() if is_fp8 is wanted] for wanted in (True, False))
    line = f"FP8: {len(own)} of {len(weights)} products of a layer, with {', '.join(own)}"
    line += f"; not with {', '.join(others)}" if others else ""
    return line + (f"; experts in {jnp.dtype(config.compute_dtype)}" if config.num_experts else "")


def _widths(shape: tuple[int, ...], num_in: int) -> tuple[int, int]:
    return math.prod(shape[:num_in]), math.prod(shape[num_in:])
