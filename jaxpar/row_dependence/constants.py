"""Arrays and numbers that a function closes over, or that are written in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar._compat import Tracer, is_jaxpr
from jaxpar.row_dependence.values import Place, Value, of_number

_LARGEST = 4096  # elements; of larger ones it is read only whether they are the same for more rows


def of_constant(few: Any, many: Any) -> Value:
    """Returns the value of an array, or of a number, that a function closes over or that is written in it."""
    pair = (few, many)
    if not all(map(_can_be_read, pair)):
        if np.shape(few) != np.shape(many):
            return Value(place=Place.OTHER)
        return Value(growth=1.0 if _are_equal(few, many) else None)
    dtypes = map(jnp.result_type, pair)
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):
        return Value(growth=1.0 if _are_same_keys(few, many) else None)
    if not all(map(np.size, pair)):
        return Value()
    return _of_array(np.asarray(few), np.asarray(many))


def _are_same_keys(few: Any, many: Any) -> bool:
    if few is many or not all(
        jnp.issubdtype(each.dtype, jax.dtypes.prng_key) for each in (few, many)
    ):
        return True
    with jax.ensure_compile_time_eval():
        numbers, others = map(jax.random.key_data, (few, many))
    return np.array_equal(np.asarray(numbers), np.asarray(others))


def _can_be_read(value: Any) -> bool:
    return _is_here(value) and np.size(value) <= _LARGEST


def _is_here(value: Any) -> bool:
    if isinstance(value, Tracer) or is_jaxpr(value):
        return False
    return getattr(value, "is_fully_addressable", True)


def _are_equal(few: Any, many: Any) -> bool:
    """Whether two arrays of one shape are the same; those that cannot be read are taken to be."""
    if few is many or not (_is_here(few) and _is_here(many)):
        return True
    dtype, other = map(jnp.result_type, (few, many))
    if dtype != other:
        return False
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True
    few = np.asarray(few)
    many = np.asarray(many)
    return np.array_equal(few, many, equal_nan=few.dtype.kind in "fc")


def _is_one_number(array: np.ndarray) -> bool:
    first = array.flat[0]
    is_first = array == first
    are_nan = (array != array) & (first != first)
    return bool(np.all(is_first | are_nan))


def _counts(array: np.ndarray) -> bool:
    """Whether an array is the index of each of its elements."""
    return np.array_equal(array, np.arange(array.size))


def _of_array(few: np.ndarray, many: np.ndarray) -> Value:
    """Returns the value of an array, of the same for any number of rows or of one made from it."""
    is_real = jnp.issubdtype(few.dtype, jnp.floating) or few.dtype.kind in "biu"
    if is_real and _is_one_number(few) and _is_one_number(many):
        first, second = few.flat[0], many.flat[0]
        return of_number(float(first), float(second))
    if few.shape != many.shape:
        both_count = _counts(few) and _counts(many)
        return Value(place=Place.INDEX if both_count else Place.OTHER)
    has_nan = few.dtype.kind in "fc"
    is_same = np.array_equal(few, many, equal_nan=has_nan)
    return Value(growth=1.0 if is_same else None)
