"""Products of rows with one of several weights each, as a kernel on GPUs.

    rows [r, in]   weights [e, in, out]   sizes [e]: the first sizes[0] rows are for weights[0], the next for weights[1] ...

    forward               out[i] = rows[i] @ weights[e of i]
    gradient of rows      the same with transposed weights
    gradient of weights   rows[of e].T @ ct[of e]

``jax.lax.ragged_dot`` does the same, but on GPUs XLA multiplies each row by all weights. Here sizes must be multiples of
``TILE``, so that a tile of rows has one weight; rows that fill a group up are zero. Rows after the last group give zeros.

The three are separate calls of a ``jax.custom_vjp``, since a pipeline's backward pass computes the gradient of weights later
than that of rows. Sums are in float32 at least. Each is one operation of a traced function, ``PRODUCT`` or ``OF_WEIGHTS``,
which becomes one of these where it is compiled:

    "mosaic"   grouped_mosaic.py, on Hopper, in 16-bit floats, where 128 divides the widths
    "triton"   grouped_triton.py, on other GPUs and for what the former does not take
    "plain"    elsewhere, written out below
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar._compat import operation
from jaxpar.devices import num_multiprocessors, on_gpus, on_hopper
from jaxpar.dtypes import wide_dtype

TILE = 128  # rows

Form = Literal["mosaic", "triton", "plain"]
Kernel = Callable[..., Array]


def fits(dtype: Any, *widths: int) -> bool:
    """Returns whether a kernel takes weights of these widths, which 16 must divide, and of this dtype, of up to 32 bits."""
    is_narrow = jnp.dtype(dtype).itemsize <= 4
    return is_narrow and all(width % 16 == 0 for width in widths)


def form_of(dtype: Any, *widths: int) -> Form:
    """Returns what products of this dtype with weights of these widths become where this is traced."""
    if not on_gpus():
        return "plain"
    is_narrow = jnp.dtype(dtype).itemsize == 2
    has_tiles = all(width % 128 == 0 for width in widths)
    return "mosaic" if on_hopper() and is_narrow and has_tiles else "triton"


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
    of_rows = each(partial(_multiply, transposed=True), ct, weights, sizes)
    of_weights = each(_contract, rows, ct, sizes)
    return of_rows, of_weights, None


grouped_product.defvjp(lambda each, *given: (grouped_product(each, *given), given), _backward)


def _multiply(rows: Array, weights: Array, sizes: Array, *, transposed: bool) -> Array:
    return PRODUCT.bind(
        sizes,
        rows,
        weights,
        transposed=transposed,
        **_settings(rows, weights.shape[2:]),
    )


def _contract(rows: Array, ct: Array, sizes: Array) -> Array:
    widths = rows.shape[2], ct.shape[2]
    return OF_WEIGHTS.bind(sizes, rows, ct, **_settings(rows, widths))


def _settings(rows: Array, widths: tuple[int, ...]) -> dict[str, Any]:
    form = form_of(rows.dtype, *widths)
    return {"form": form, "blocks": num_multiprocessors()}


# Operations -----------------------------------------------------------------------------------------------------------------


def _product(
    sizes: Array,
    rows: Array,
    weights: Array,
    *,
    transposed: bool,
    form: Form,
    blocks: int,
) -> Array:
    """Returns the products ``[1, rows, out]`` of rows ``[1, rows, in]`` with weights ``[1, experts, in, out]``."""
    # The group of each tile; for those after the last group there is none.
    ends = jnp.cumsum(sizes[0]) // TILE
    tiles = jnp.arange(rows.shape[1] // TILE)
    owner = jnp.sum(ends[:, None] <= tiles[None], 0, dtype=jnp.int32)
    run, _ = _kernels(form, blocks)
    return run(rows[0], weights[0], owner, transposed=transposed)[None]


def _of_weights(sizes: Array, rows: Array, ct: Array, *, form: Form, blocks: int) -> Array:
    """Returns the gradients ``[1, experts, in, out]`` of the weights."""
    _, run = _kernels(form, blocks)
    return run(rows[0], ct[0], sizes[0])[None]


def _kernels(form: Form, blocks: int) -> tuple[Kernel, Kernel]:
    """Returns ``multiply`` and ``contract`` of a form, imported here: few programs need them."""
    if form == "mosaic":
        from jaxpar.models import grouped_mosaic as mosaic

        of_rows = partial(mosaic.multiply, blocks=blocks)
        of_weights = partial(mosaic.contract, blocks=blocks)
        return of_rows, of_weights
    if form == "triton":
        from jaxpar.models import grouped_triton as triton

        return triton.multiply, triton.contract
    return multiply, contract


def multiply(
    rows: Float[Array, "rows depth"],
    weights: Float[Array, "experts _ _"],
    owner: Int[Array, " tiles"],
    *,
    transposed: bool,
) -> Float[Array, "rows width"]:
    """Returns each tile of rows times the weight of its owner, or times that transposed, and zeros where it has none."""
    own = jnp.take(weights, owner, axis=0, mode="fill", fill_value=0)
    own = own.swapaxes(1, 2) if transposed else own
    return _wide("mti,mio->mto", _in_tiles(rows), own).reshape(len(rows), -1)


def contract(
    rows: Float[Array, "rows in"],
    ct: Float[Array, "rows out"],
    sizes: Int[Array, " experts"],
) -> Float[Array, "experts in out"]:
    """Returns for each group its rows, transposed, times their cotangents."""
    ends = jnp.cumsum(sizes) // TILE
    tiles = jnp.arange(len(rows) // TILE)
    begins = ends - sizes // TILE
    is_after = tiles[None] >= begins[:, None]
    is_before = tiles[None] < ends[:, None]
    is_of = (is_after & is_before).astype(rows.dtype)
    return _wide("em,mti,mto->eio", is_of, _in_tiles(rows), _in_tiles(ct))


def _in_tiles(rows: Array) -> Array:
    return rows.reshape(-1, TILE, rows.shape[-1])


def _wide(legend: str, *arrays: Array) -> Array:
    dtype = arrays[-1].dtype
    total = jnp.einsum(legend, *arrays, preferred_element_type=wide_dtype(dtype))
    return total.astype(dtype)


def _product_shape(sizes: Any, rows: Any, weights: Any, *, transposed: bool, **_: Any) -> Any:
    del sizes
    width = weights.shape[2 if transposed else 3]
    return rows.update(shape=(*rows.shape[:2], width))


def _weights_shape(sizes: Any, rows: Any, ct: Any, **_: Any) -> Any:
    shape = (*sizes.shape, rows.shape[2], ct.shape[2])
    return rows.update(shape=shape)


PRODUCT = operation("grouped_product", _product, _product_shape)
OF_WEIGHTS = operation("grouped_product_of_weights", _of_weights, _weights_shape)
