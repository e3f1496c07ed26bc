"""Kinds of arrays: which carry gradients, which are PRNG keys, how many bytes they take, and in which dtype they are added."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, ShapeDtypeStruct
from jax.experimental import multihost_utils
from jaxtyping import PyTree


def is_float(leaf: Any) -> bool:
    """Returns whether gradients flow through an array: whether it is floating-point or complex."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def wide_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype in which values of a floating-point or complex dtype are added: float32 or wider.

    >>> " ".join(wide_dtype(dtype).name for dtype in ("bfloat16", "float16", "float64", "complex64"))
    'float32 float32 float64 complex64'
    """
    is_wide = jnp.finfo(dtype).bits >= 32
    return np.dtype(dtype if is_wide else np.float32)


def widen(tree: PyTree) -> PyTree:
    """Returns a tree of floats cast to float32 or wider."""
    return jax.tree.map(lambda a: a.astype(wide_dtype(a.dtype)), tree)


def by_parts(reduce: Callable[[list[Array]], list[Array]], tree: PyTree) -> PyTree:
    """Returns a sum over devices of each leaf, that of complex ones by their real and imaginary parts.

    XLA ends the process where it reduces a complex constant. The gradient of a complex param that the loss does not use is one.

    Args:
        reduce: Returns the sum of each of some arrays, which are not complex.
        tree: Arrays of float32 or wider, or complex; their sums have the same dtypes.
    """

    def sent(leaf: Array) -> Array:
        if not jnp.iscomplexobj(leaf):
            return leaf
        return to_floats(leaf, leaf.real.dtype)

    def received(total: Array, leaf: Array) -> Array:
        if not jnp.iscomplexobj(leaf):
            return total
        return from_floats(total, leaf)

    leaves, treedef = jax.tree.flatten(tree)
    parts = [sent(leaf) for leaf in leaves]
    totals = reduce(parts)
    return treedef.unflatten(map(received, totals, leaves))


def to_floats(value: Array, dtype: Any) -> Array:
    """Returns an array in a floating-point dtype, complex numbers as their two parts along a new last dim."""
    if jnp.iscomplexobj(value):
        value = jnp.stack([value.real, value.imag], axis=-1)
    return value.astype(dtype)


def from_floats(value: Array, like: Any) -> Array:
    """Inverts ``to_floats`` in float32 or wider, given an array or ShapeDtypeStruct of the original dtype."""
    wide = widen(value)
    if not jnp.iscomplexobj(like):
        return wide
    return jax.lax.complex(wide[..., 0], wide[..., 1])


def float_indices(leaves: Iterable[Any]) -> list[int]:
    """Returns the indices of the leaves that carry gradients."""
    return [i for i, leaf in enumerate(leaves) if is_float(leaf)]


def merge(leaves: Sequence[Any], indices: Iterable[int], new: Iterable[Any]) -> list:
    """Returns ``leaves`` with those at ``indices`` replaced by ``new``."""
    merged = list(leaves)
    for i, leaf in zip(indices, new, strict=True):
        merged[i] = leaf
    return merged


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, an array or a ShapeDtypeStruct, holds PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def unwrap_key(value: Any) -> Any:
    """Returns the data of PRNG keys, which can be stored and sent, and any other array unchanged."""
    return jax.random.key_data(value) if is_key(value) else value


def rewrap_key(value: Any, like: Any) -> Any:
    """Inverts ``unwrap_key``, given an array or ShapeDtypeStruct like the original."""
    if not is_key(like):
        return value
    impls: list[Any] = []  # JAX reports the implementation of arrays and tracers only
    note = lambda key: impls.append(jax.random.key_impl(key))
    jax.eval_shape(note, ShapeDtypeStruct(like.shape, like.dtype))
    return jax.random.wrap_key_data(value, impl=impls[0])


def unwrapped_shape(like: Any) -> ShapeDtypeStruct:
    """Returns the shape of an array or ShapeDtypeStruct as it is stored: that of the data of PRNG keys."""
    if is_key(like):
        return jax.eval_shape(unwrap_key, like)
    return ShapeDtypeStruct(like.shape, like.dtype)


def is_spread(leaf: Any) -> bool:
    """Returns whether an array has parts that only other processes hold."""
    leaf = unwrap_key(leaf)
    if not isinstance(leaf, Array):
        return False
    return not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def on_host(leaf: Any) -> np.ndarray:
    """Returns a whole array on this host, PRNG keys as their data; every process must call it."""
    leaf = unwrap_key(leaf)
    if not isinstance(leaf, Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def num_bytes(arrays: Iterable[Any]) -> int:
    """Returns the bytes of arrays or ShapeDtypeStructs, PRNG keys as their data."""
    stored = map(unwrapped_shape, arrays)
    return sum(each.size * each.dtype.itemsize for each in stored)
