"""Weights are finite numbers of their dtype: which tensors have NaN, infinity, or a number that another dtype cannot hold.

float32 [1e5, 2.0]    as float16    1e+05, where the largest float16 is 65504
float32 [nan, 2.0]    as float32    NaN in 1 of 2 values
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.output import printable

TOLD = 3  # tensors of a message


class OutOfRangeError(ValueError):
    """A finite number has no place in the dtype that was asked for."""


def to_infinity() -> np.errstate:
    """Returns a context in which numbers that are too large for a dtype become infinite without a warning."""
    return np.errstate(over="ignore", invalid="ignore")


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns an array in another dtype, in which numbers that are too large are infinite."""
    with to_infinity():
        return array.astype(dtype)


def is_finite(array: np.ndarray) -> bool:
    """Returns whether all numbers of an array are finite; takes no memory of its size."""
    with np.errstate(invalid="ignore"):
        return array.size == 0 or bool(np.isfinite(array.max()) and np.isfinite(array.min()))


def what_is_wrong(array: np.ndarray, dtype: np.dtype) -> tuple[str, bool]:
    """Returns what is not finite in an array as a dtype, and whether it is so in that dtype alone.

    >>> what_is_wrong(np.array([1e5, 2.0], np.float32), np.dtype("float16"))
    ('100000, where the largest float16 is 65504', True)
    """
    own = ~np.isfinite(array)
    if own.any():
        kind = "NaN" if np.isnan(array).any() else "infinity"
        return f"{kind} in {int(own.sum())} of {array.size} values", False
    largest = np.abs(array).max()
    return (
        f"{float(largest):g}, where the largest {dtype} is {float(ml_dtypes.finfo(dtype).max):g}",
        True,
    )


def check_finite(
    wrong: Mapping[str, tuple[str, bool]], what: str, dtype: np.dtype, remedy: str
) -> None:
    """Raises on every process if one of them has found tensors that are not finite; all must call it.

    Args:
        wrong: What is wrong with tensors, by name, as ``what_is_wrong`` describes it.
        what: What was read or is to be written, for the message.
        dtype: The dtype.
        remedy: What to do where a tensor has NaN or infinity.

    Raises:
        OutOfRangeError: All numbers are finite, and one is too large for the dtype.
        ValueError: A number is not finite.
    """
    found: dict[str, Any] = {}
    for each in exchange("weights that are not finite", dict(wrong)):
        found |= each
    if not found:
        return
    if only := {name: about for name, (about, is_of_dtype) in found.items() if not is_of_dtype}:
        raise ValueError(f"weights must be finite; got {_told(only)} {what}. {remedy}")
    abouts = {name: about for name, (about, _) in found.items()}
    raise OutOfRangeError(
        f"weights must be numbers of the dtype {dtype}; got {_told(abouts)} {what}. Choose bfloat16 or float32."
    )


def _told(wrong: Mapping[str, str]) -> str:
    names: Sequence[str] = sorted(wrong)
    listed = "; ".join(f"{wrong[name]}, in {printable(name)}" for name in names[:TOLD])
    return listed + (f"; and {len(names) - TOLD} more tensors" if len(names) > TOLD else "")
