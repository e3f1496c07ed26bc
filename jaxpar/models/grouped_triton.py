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

_COLUMNS, _DEPTH = (
    128,
    64,
)  # of a tile of the result, and of the products that are added to it at a time


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
    num_tiles, step, columns = len(owner), _block(depth, _DEPTH), _block(width, _COLUMNS)
    size = len(rows) // num_tiles

    def kernel(owner_ref: Any, rows_ref: Any, weights_ref: Any, out_ref: Any) -> None:
        tile, column = pl.program_id(0) * size, pl.program_id(1) * columns
        expert = owner_ref[pl.program_id(0)]
        known = jnp.minimum(expert, experts - 1)

        def add(i: Any, total: Array) -> Array:
            here = rows_ref[pl.ds(tile, size), pl.ds(i * step, step)]
            if transposed:
                return total + _dot(
                    here, weights_ref[known, pl.ds(column, columns), pl.ds(i * step, step)].T
                )
            return total + _dot(
                here, weights_ref[known, pl.ds(i * step, step), pl.ds(column, columns)]
            )

        steps = (expert < experts).astype(jnp.int32) * (depth // step)
        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((size, columns), wide_dtype(rows.dtype)))
        out_ref[pl.ds(tile, size), pl.ds(column, columns)] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((len(rows), width), rows.dtype)
    return _call(kernel, (num_tiles, width // columns), out)(owner, rows, weights)


def contract(
    rows: Float[Array, "rows in"], ct: Float[Array, "rows out"], sizes: Int[Array, " experts"]
) -> Float[Array, "experts in out"]:
    """Returns for each group its rows, transposed, times their cotangents."""
    experts, depth, width = len(sizes), rows.shape[1], ct.shape[1]
    height, columns = _block(depth, _COLUMNS), _block(width, _COLUMNS)
    ends = jnp.cumsum(sizes).astype(jnp.int32) // _DEPTH

    def kernel(begins_ref: Any, ends_ref: Any, rows_ref: Any, ct_ref: Any, out_ref: Any) -> None:
        row, column, expert = (
            pl.program_id(0) * height,
            pl.program_id(1) * columns,
            pl.program_id(2),
        )

        def add(i: Any, total: Array) -> Array:
            here = rows_ref[pl.ds(i * _DEPTH, _DEPTH), pl.ds(row, height)]
            return total + _dot(here.T, ct_ref[pl.ds(i * _DEPTH, _DEPTH), pl.ds(column, columns)])

        start = jnp.zeros((height, columns), wide_dtype(rows.dtype))
        total = jax.lax.fori_loop(begins_ref[expert], ends_ref[expert], add, start)
        out_ref[expert, pl.ds(row, height), pl.ds(column, columns)] = total.astype(out_ref.dtype)

    out = jax.ShapeDtypeStruct((experts, depth, width), rows.dtype)
    call = _call(kernel, (depth // height, width // columns, experts), out)
    return call(ends - sizes.astype(jnp.int32) // _DEPTH, ends, rows, ct)


def _call(
    kernel: Callable[..., None], grid: tuple[int, ...], out: jax.ShapeDtypeStruct
) -> Callable[..., Array]:
    interpret = not on_gpus()
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out,
        interpret=interpret,
        name="grouped_product",  # by which ``inspect/costs.py`` knows it in a compiled program
        compiler_params=None if interpret else triton.CompilerParams(num_warps=8, num_stages=3),
    )


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=wide_dtype(a.dtype))


def _block(width: int, most: int) -> int:
    """Returns the largest power of two that divides a width, up to ``most``."""
    return min(width & -width, most)
