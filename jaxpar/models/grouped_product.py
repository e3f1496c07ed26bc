"""Products of rows with one of several weights each, as a kernel for GPUs (Pallas, by way of Triton).

    rows [r, in]   weights [e, in, out]   sizes [e]: the first sizes[0] rows are for weights[0], the next for weights[1] ...

    forward               out[i] = rows[i] @ weights[e of i]            a program for each tile of rows and columns
    gradient of rows      the same with transposed weights
    gradient of weights   rows[of e].T @ ct[of e]                       a program for each expert and tile of its weight

``jax.lax.ragged_dot`` does the same, but on GPUs XLA multiplies each row by all weights. Here sizes must be multiples of
``TILE``, so that a tile of rows has one weight; rows that fill a group up are zero. Rows after the last group give zeros.

The three are separate calls of a ``jax.custom_vjp``, since a pipeline's backward pass computes the gradient of weights later
than that of rows. Sums are in float32 at least. Elsewhere than on GPUs the kernel is interpreted, which is slow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.context_parallel import platform
from jaxpar.dtypes import wide_dtype

TILE = 128  # rows
_COLUMNS, _DEPTH = 128, 64  # of a tile of the result, and of the products that are added to it at a time


def on_gpus() -> bool:
    """Returns whether this is traced for GPUs."""
    return platform() in ("gpu", "cuda", "rocm")


def fits(dtype: Any, *widths: int) -> bool:
    """Returns whether the kernel takes weights of these widths, which 16 must divide, and of this dtype, of up to 32 bits."""
    return all(width % 16 == 0 for width in widths) and jnp.dtype(dtype).itemsize <= 4


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_product(
    each: Callable[..., Array],
    rows: Float[Array, "shards rows in"],
    weights: Float[Array, "shards experts in out"],
    sizes: Int[Array, "shards experts"],
) -> Float[Array, "shards rows out"]:
    """Returns each row times the weight of its group.

    Args:
        each: ``each(kernel, *arrays)`` runs the kernel on each shard, with a leading dim of 1.
        rows: The rows, in the order of their groups.
        weights: A weight for each group.
        sizes: The rows of each group, multiples of ``TILE``.
    """
    return each(partial(_multiply, transposed=False), rows, weights, sizes)


def _backward(each: Callable[..., Array], given: tuple, ct: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = given
    return each(partial(_multiply, transposed=True), ct, weights, sizes), each(_contract, rows, ct, sizes), None


grouped_product.defvjp(lambda each, *given: (grouped_product(each, *given), given), _backward)


def _multiply(rows: Array, weights: Array, sizes: Array, *, transposed: bool) -> Array:
    _, experts, *widths = weights.shape
    depth, width = reversed(widths) if transposed else widths
    num_tiles, step, columns = rows.shape[1] // TILE, _block(depth, _DEPTH), _block(width, _COLUMNS)
    # The group of each tile; for those after the last group there is none.
    ends, tiles = jnp.cumsum(sizes[0]) // TILE, jnp.arange(num_tiles)
    owner = jnp.sum(ends[:, None] <= tiles[None], 0, dtype=jnp.int32)

    def kernel(owner_ref: Any, rows_ref: Any, weights_ref: Any, out_ref: Any) -> None:
        tile, column = pl.program_id(0) * TILE, pl.program_id(1) * columns
        expert = owner_ref[pl.program_id(0)]
        known = jnp.minimum(expert, experts - 1)

        def add(i: Any, total: Array) -> Array:
            here = rows_ref[0, pl.ds(tile, TILE), pl.ds(i * step, step)]
            if transposed:
                return total + _dot(here, weights_ref[0, known, pl.ds(column, columns), pl.ds(i * step, step)].T)
            return total + _dot(here, weights_ref[0, known, pl.ds(i * step, step), pl.ds(column, columns)])

        steps = (expert < experts).astype(jnp.int32) * (depth // step)
        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((TILE, columns), wide_dtype(rows.dtype)))
        out_ref[0, pl.ds(tile, TILE), pl.ds(column, columns)] = total.astype(out_ref.dtype)

    pl = _pallas()
    out = jax.ShapeDtypeStruct((1, num_tiles * TILE, width), rows.dtype)
    return _call(kernel, (num_tiles, width // columns), out)(owner, rows, weights)


def _contract(rows: Array, ct: Array, sizes: Array) -> Array:
    experts, depth, width = sizes.shape[1], rows.shape[2], ct.shape[2]
    height, columns = _block(depth, _COLUMNS), _block(width, _COLUMNS)
    ends = jnp.cumsum(sizes[0]).astype(jnp.int32) // _DEPTH

    def kernel(begins_ref: Any, ends_ref: Any, rows_ref: Any, ct_ref: Any, out_ref: Any) -> None:
        row, column, expert = pl.program_id(0) * height, pl.program_id(1) * columns, pl.program_id(2)

        def add(i: Any, total: Array) -> Array:
            here = rows_ref[0, pl.ds(i * _DEPTH, _DEPTH), pl.ds(row, height)]
            return total + _dot(here.T, ct_ref[0, pl.ds(i * _DEPTH, _DEPTH), pl.ds(column, columns)])

        start = jnp.zeros((height, columns), wide_dtype(rows.dtype))
        total = jax.lax.fori_loop(begins_ref[expert], ends_ref[expert], add, start)
        out_ref[0, expert, pl.ds(row, height), pl.ds(column, columns)] = total.astype(out_ref.dtype)

    pl = _pallas()
    out = jax.ShapeDtypeStruct((1, experts, depth, width), rows.dtype)
    call = _call(kernel, (depth // height, width // columns, experts), out)
    return call(ends - sizes[0].astype(jnp.int32) // _DEPTH, ends, rows, ct)


def _call(kernel: Callable[..., None], grid: tuple[int, ...], out: jax.ShapeDtypeStruct) -> Callable[..., Array]:
    from jax.experimental.pallas import triton

    options = triton.CompilerParams(num_warps=8, num_stages=3)
    interpret = not on_gpus()
    return _pallas().pallas_call(
        kernel,
        grid=grid,
        out_shape=out,
        interpret=interpret,
        name="grouped_product",  # by which ``inspect/costs.py`` knows it in a compiled program
        compiler_params=None if interpret else options,
    )


def _pallas() -> Any:
    from jax.experimental import pallas  # imported here: few programs need it

    return pallas


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=wide_dtype(a.dtype))


def _block(width: int, most: int) -> int:
    """Returns the largest power of two that divides a width, up to ``most``."""
    return min(width & -width, most)
