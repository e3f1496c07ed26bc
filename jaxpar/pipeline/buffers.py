"""The arrays that wait on a stage: rings of slots that a scan's carry holds and that are written in place.

A layer's values are written at ``[slot, layer]`` while the scan over layers runs. To collect them first and copy them to a
slot afterwards would move every stored byte twice.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Arrays = list[Any]


def make_ring(shapes: Sequence[Any], *dims: int) -> Arrays:
    """Returns zeros ``[*dims, ...]`` for arrays of the given shapes; idle slots hold zeros, never NaN."""
    return [jnp.zeros((*dims, *raw.shape), raw.dtype) for raw in map(_raw_shape, shapes)]


def put(ring: Arrays, values: Sequence[Any], *index: Any) -> Arrays:
    """Returns the ring with ``values`` written at an index of its leading dims."""
    return [_write(array, to_raw(value), index) for array, value in zip(ring, values, strict=True)]


def get(ring: Arrays, shapes: Sequence[Any], *index: Any) -> Arrays:
    """Returns what the ring holds at an index of its leading dims, as arrays like ``shapes``."""
    return [from_raw(_read(array, index), like) for array, like in zip(ring, shapes, strict=True)]


def add_at(totals: Arrays, values: Sequence[Any], index: Any) -> Arrays:
    """Returns ``totals`` with ``values`` added at an index of their leading dim."""
    return [
        _write(total, _read(total, (index,)) + value.astype(total.dtype), (index,))
        for total, value in zip(totals, values, strict=True)
    ]


def take(arrays: Sequence[Any], index: Any) -> Arrays:
    """Returns the arrays at an index of their leading dim."""
    return [_read(array, (index,)) for array in arrays]


def to_raw(value: Any) -> Any:
    """Returns a PRNG key's data, which can be stored and sent, and any other array as it is."""
    return jax.random.key_data(value) if _is_key(value) else value


def from_raw(value: Any, like: Any) -> Any:
    """Returns the array that ``to_raw`` was given, which was like ``like``, an array or a ShapeDtypeStruct."""
    return jax.random.wrap_key_data(value, impl=_key_impl(like)) if _is_key(like) else value


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _key_impl(like: Any) -> Any:
    impls: list[Any] = []  # JAX tells it of arrays and tracers only
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(like.shape, like.dtype))
    return impls[0]


def _raw_shape(shape: Any) -> Any:
    return jax.eval_shape(to_raw, jax.ShapeDtypeStruct(shape.shape, shape.dtype))


def _starts(array: Any, index: tuple) -> tuple:
    zero = jnp.int32(0)
    return (*(jnp.asarray(i, jnp.int32) for i in index), *[zero] * (array.ndim - len(index)))


def _write(array: Any, value: Any, index: tuple) -> Any:
    return jax.lax.dynamic_update_slice(array, value.reshape((1,) * len(index) + value.shape), _starts(array, index))


def _read(array: Any, index: tuple) -> Any:
    rest = array.shape[len(index) :]
    return jax.lax.dynamic_slice(array, _starts(array, index), (1,) * len(index) + rest).reshape(rest)
