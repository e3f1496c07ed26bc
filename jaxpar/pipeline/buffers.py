"""The buffers of a stage: arrays of slots in the carry of a loop, updated in place.

The residuals of a layer are written at ``[slot, position]`` while the loop over layers runs. Collecting them first and copying
them to a slot afterwards would move every byte twice.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._compat import empty
from jaxpar.dtypes import rewrap_key, unwrap_key, unwrapped_shape

Arrays = list[Any]


def zeros(shapes: Sequence[Any]) -> Arrays:
    """Returns zeros for arrays of the given shapes."""
    return [jnp.zeros(a.shape, a.dtype) for a in map(unwrapped_shape, shapes)]


def make_rings(rings: Mapping[str, tuple[Sequence[Any], Sequence[int]]], *, clear: bool) -> dict[str, Arrays]:
    """Returns rings by name: arrays ``[*dims, ...]`` for the shapes of what is stored at one index.

    Args:
        rings: By name ``(shapes, dims)``: the dims are the number of slots, and of positions if a slot has positions.
        clear: Whether slots hold zeros before they are written, for programs that read such slots. On a CPU it takes up to a
            tenth of a step's time to write them.
    """
    numbers = count()
    new = lambda shape, dtype: jnp.zeros(shape, dtype) if clear else empty(shape, dtype, next(numbers))
    return {
        name: [new((*dims, *a.shape), a.dtype) for a in map(unwrapped_shape, shapes)]
        for name, (shapes, dims) in rings.items()
    }


def put(ring: Arrays, values: Sequence[Any], *index: Any) -> Arrays:
    """Returns the ring with ``values`` written at an index of its leading dims."""
    return [_write(array, unwrap_key(value), index) for array, value in zip(ring, values, strict=True)]


def get(ring: Arrays, shapes: Sequence[Any], *index: Any, as_stored: bool = False) -> Arrays:
    """Returns the values of a ring at an index of its leading dims, as arrays like ``shapes``.

    Args:
        ring: The ring.
        shapes: What it stores.
        index: The slot, and the position of a layer.
        as_stored: Whether XLA must read the values as they are in memory. Otherwise it may transpose the whole ring first, for
            the products that read it; it does so on GPUs.
    """
    return [rewrap_key(_read(array, index, as_stored), like) for array, like in zip(ring, shapes, strict=True)]


def add_at(totals: Arrays, values: Sequence[Any], index: Any, *, as_stored: bool = False) -> Arrays:
    """Returns ``totals`` with ``values`` added at an index of their leading dim, in the dtype of the totals."""
    return [
        _write(total, _read(total, (index,), as_stored) + value.astype(total.dtype), (index,))
        for total, value in zip(totals, values, strict=True)
    ]


def add_to(totals: Arrays, indices: Sequence[int], values: Sequence[Any]) -> Arrays:
    """Returns ``totals`` with ``values`` added to those at ``indices``, in the dtype of the totals."""
    totals = list(totals)
    for i, value in zip(indices, values, strict=True):
        totals[i] = totals[i] + value.astype(totals[i].dtype)
    return totals


def take(arrays: Sequence[Any], index: Any, *, as_stored: bool = False) -> Arrays:
    """Returns the arrays at an index of their leading dim."""
    return [_read(array, (index,), as_stored) for array in arrays]


def _starts(array: Any, index: tuple) -> tuple:
    zero = jnp.int32(0)
    return (*(jnp.asarray(i, jnp.int32) for i in index), *[zero] * (array.ndim - len(index)))


def _write(array: Any, value: Any, index: tuple) -> Any:
    return jax.lax.dynamic_update_slice(array, value.reshape((1,) * len(index) + value.shape), _starts(array, index))


def _read(array: Any, index: tuple, as_stored: bool = False) -> Any:
    rest = array.shape[len(index) :]
    value = jax.lax.dynamic_slice(array, _starts(array, index), (1,) * len(index) + rest).reshape(rest)
    return jax.lax.optimization_barrier(value) if as_stored else value
