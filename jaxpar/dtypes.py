"""Which dtypes carry gradients, and in which dtype values are added up: float32 at least."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def is_float(leaf: Any) -> bool:
    """Returns whether gradients flow through an array: whether it is floating-point or complex."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def wide_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype in which values of a floating-point or complex dtype are added: float32 at least.

    >>> [wide_dtype(dtype).name for dtype in ("bfloat16", "float16", "float64", "complex64")]
    ['float32', 'float32', 'float64', 'complex64']
    """
    return np.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)


def widen(tree: PyTree) -> PyTree:
    """Returns a tree of floats in float32 at least."""
    return jax.tree.map(lambda a: a.astype(wide_dtype(a.dtype)), tree)
