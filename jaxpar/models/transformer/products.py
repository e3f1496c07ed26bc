"""The products of a layer with its weights: in the compute dtype, or in FP8 (``jaxpar.fp8``).

    w_qkv [embed] to [kv_heads, qkv, head_dim]    w_out [heads, head_dim] to [embed]
    w_up  [embed] to [gate, mlp]                  w_down [mlp] to [embed]

In FP8 are those with a weight whose two widths are large (``fp8.fits``). All others are in the
compute dtype: scores of attention, routers, experts, factors of LoRA, embedding and head.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import fp8
from jaxpar.fields import arg
from jaxpar.models import lora
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.params import (
    LAYER_WEIGHTS,
    layer_table,
)


def product(
    config: TransformerConfig,
    spec: str,
    x: jax.Array,
    weight: Any,
) -> jax.Array:
    """Returns ``jnp.einsum(spec, x, weight)``, with the factors of a weight that has any.

    Args:
        config: The model.
        spec: Such as "btd,df->btf". The dims that are summed over are the last of x and the first
            of the weight.
        x: The input.
        weight: An array, or an Adapted of arrays.
    """

    def times(spec: str, x: jax.Array, weight: Any) -> jax.Array:
        _, dims, result = spec.replace("->", ",").split(",")
        num_in = sum(dim not in result for dim in dims)
        widths = _widths(weight.shape, num_in)
        if _is_in_fp8(config, widths):
            return fp8.dot(x, weight, num_in)
        return jnp.einsum(spec, x, weight)

    return lora.einsum(spec, x, weight, times)


def fp8_weights(config: TransformerConfig) -> dict[str, bool]:
    """Returns the weights of a layer, "w_up 4096 x 28672", and whether each has products in FP8."""
    found = {}
    for name, widths in _layer_widths(config):
        ins, outs = widths
        found[f"{name} {ins} x {outs}"] = _is_in_fp8(config, widths)
    return found


def _layer_widths(
    config: TransformerConfig,
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the names and widths of the weights of one of the stacked layers."""
    table = layer_table(config)
    for part in ("attention", "mlp", "shared"):
        for name, spec in table.get(part, {}).items():
            if name in LAYER_WEIGHTS:
                yield name, _widths(spec.shape, LAYER_WEIGHTS[name])


def _is_in_fp8(
    config: TransformerConfig,
    widths: tuple[int, int],
) -> bool:
    return config.products == "fp8" and fp8.fits(*widths)


def _widths(shape: Sequence[int], num_in: int) -> tuple[int, int]:
    ins, outs = shape[:num_in], shape[num_in:]
    return math.prod(ins), math.prod(outs)


def check_products(config: TransformerConfig) -> None:
    """Raises ValueError for a model that asks for FP8 and has no product that is large enough."""
    weights = fp8_weights(config)
    if config.products == "fp8" and not any(weights.values()):
        raise ValueError(
            "products in FP8 are those with a weight whose widths are both at least "
            f"{fp8.LEAST_WIDTH:,} and multiples of {fp8.MULTIPLE}; got a layer with "
            f"{', '.join(weights)}. Choose {arg(products='compute')}, or a wider model."
        )


def describe_products(config: TransformerConfig) -> str:
    """Returns a line on which products of a layer are in FP8; "" if none was asked to be."""
    if config.products != "fp8":
        return ""
    weights = fp8_weights(config)
    own = [name for name, is_own in weights.items() if is_own]
    others = [name for name in weights if name not in own]
    count = f"{len(own)} of {len(weights)}"
    line = f"FP8: {count} products of a layer, with {', '.join(own)}"
    if others:
        line += f"; not with {', '.join(others)}"
    if config.experts is not None:
        line += f"; experts in {jnp.dtype(config.compute_dtype)}"
    return line
