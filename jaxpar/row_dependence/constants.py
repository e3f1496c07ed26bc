"""Arrays and numbers that a function closes over, or that are written in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar._compat import Tracer, is_jaxpr
from jaxpar.row_dependence.values import Place, Value, of_number

_LARGEST = 4096  # elements; of larger ones only the shape is read


def of_constant(few: Any, many: Any) -> Value:
    """Returns the value of an array, or of a number, that a function closes over or that is written in it."""
    pair = few, many
    if not all(map(_can_be_read, pair)):
        return Value(place=Place.OTHER if np.shape(few) != np.shape(many) else Place.NONE)
    is_key = any(jnp.issubdtype(jnp.result_type(each), jax.dtypes.extended) for each in pair)
    if is_key or not all(map(np.size, pair)):
        return Value()
    return _of_array(np.asarray(few), np.asarray(many))


def _can_be_read(value: Any) -> bool:
    if isinstance(value, Tracer) or is_jaxpr(value):
        return False
    return getattr(value, "is_fully_addressable", True) and np.size(value) <= _LARGEST


def _of_array(few: np.ndarray, many: np.ndarray) -> Value:
    """Returns the value of an array that is written into a function."""
    is_one_number = few.dtype.kind in "biuf" or few.dtype.name.startswith(("bfloat", "float", "int"))
    if is_one_number and np.all(few == few.flat[0]) and np.all(many == many.flat[0]):
        return of_number(float(few.flat[0]), float(many.flat[0]))
    if few.shape != many.shape:
        counts = np.array_equal(few, np.arange(few.size))
        return Value(place=Place.INDEX if counts else Place.OTHER)
    has_nan = few.dtype.kind in "fc"
    return Value(growth=1.0 if np.array_equal(few, many, equal_nan=has_nan) else None)
