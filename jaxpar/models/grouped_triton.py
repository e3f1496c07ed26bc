"""Products of rows with one of several weights each, for GPUs without the kernels of ``grouped_mosaic.py`` (Pallas, Triton).

    multiply    out[i] = rows[i] @ weights[e of i]      a program for each tile of rows and columns
    contract    rows[of e].T @ ct[of e]                 a program for each expert and tile of its weight

They take what those do not: GPUs before and after Hopper, float32, and widths that 128 does not divide. XLA's own product
would multiply each row by all weights there. Elsewhere than on GPUs they are interpreted, for tests.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxpar.devices import on_gpus
from jaxpar.dtypes import wide_dtype

_COLUMNS = 128  # of a tile of the result
_DEPTH = 64  # of the products that are added to it at a time


def multiply(
    rows: Float[Array, "rows depth"],
    weights: Float[Array, "experts _ _"],
    owner: Int[Array, " tiles"],
    *,
    transposed: bool,
) -> Float[Array, "rows width"]:
    """Returns each tile of rows times the weight of its owner, or times that transposed, and zeros where it has none."""
    experts, *widths = weights.shape
    depth, width = reversed(widths) if transposed else widths
    num_tiles = len(owner)
    size = len(rows) // num_tiles
    step = _block(depth, _DEPTH)
    columns = _block(width, _COLUMNS)

    def kernel(owner_ref: Any, rows_ref: Any, weights_ref: Any, out_ref: Any) -> None:
        tile = pl.ds(pl.program_id(0) * size, size)
        column = pl.ds(pl.program_id(1) * columns, columns)
        expert = owner_ref[pl.program_id(0)]
        known = jnp.minimum(expert, experts - 1)

        def add(i: Any, total: Array) -> Array:
            inner = pl.ds(i * step, step)
            here = rows_ref[tile, inner]
            if transposed:
                weight = weights_ref[known, column, inner].T
            else:
                weight = weights_ref[known, inner, column]
            return total + _dot(here, weight)

        steps = (expert < experts).astype(jnp.int32) * (depth // step)
        start = jnp.zeros((size, columns), wide_dtype(rows.dtype))
        total = jax.lax.fori_loop(0, steps, add, start)
        out_ref[tile, column] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((len(rows), width), rows.dtype)
    call = _call(kernel, (num_tiles, width // columns), out)
    return call(owner, rows, weights)


def contract(
    rows: Float[Array, "rows in"], ct: Float[Array, "rows out"], sizes: Int[Array, " experts"]
) -> Float[Array, "experts in out"]:
    """Returns for each group its rows, transposed, times their cotangents."""
    experts = len(sizes)
    depth, width = rows.shape[1], ct.shape[1]
    height = _block(depth, _COLUMNS)
    columns = _block(width, _COLUMNS)
    ends = jnp.cumsum(sizes).astype(jnp.int32) // _DEPTH
    begins = ends - sizes.astype(jnp.int32) // _DEPTH

    def kernel(begins_ref: Any, ends_ref: Any, rows_ref: Any, ct_ref: Any, out_ref: Any) -> None:
        row = pl.ds(pl.program_id(0) * height, height)
        column = pl.ds(pl.program_id(1) * columns, columns)
        expert = pl.program_id(2)

        def add(i: Any, total: Array) -> Array:
            inner = pl.ds(i * _DEPTH, _DEPTH)
            here = rows_ref[inner, row]
            return total + _dot(here.T, ct_ref[inner, column])

        start = jnp.zeros((height, columns), wide_dtype(rows.dtype))
        total = jax.lax.fori_loop(begins_ref[expert], ends_ref[expert], add, start)
        out_ref[expert, row, column] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((experts, depth, width), rows.dtype)
    call = _call(kernel, (depth // height, width // columns, experts), out)
    return call(begins, ends, rows, ct)


def _call(kernel: Callable[..., None], grid: tuple[int, ...], out: Any) -> Callable[..., Array]:
    interpret = not on_gpus()
    params = triton.CompilerParams(num_warps=8, num_stages=3)
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out,
        interpret=interpret,
        name="grouped_product",  # by which ``inspect/costs.py`` knows it in a compiled program
        compiler_params=None if interpret else params,
    )


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=wide_dtype(a.dtype))


def _block(width: int, most: int) -> int:
    """Returns the largest power of two that divides a width, up to ``most``."""
    return min(width & -width, most)
