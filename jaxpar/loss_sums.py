"""The sums of a loss with ``has_aux=True``: floats that a step adds and reduces as it does ``loss_sum``, and their means.

    loss_sum, weight_sum, {"correct": int32}         what a loss returns of a microbatch
    (loss_sum, [{"correct": IntegerSum}])            what a step adds, reduces in one all-reduce, and takes from the last stage
    (loss, {"correct": correct / weight})            what value_and_grad returns of the batch

Without ``has_aux`` the list is empty, and the rest of a step is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar.dtypes import wide_dtype

_BITS = 8  # of an integer in each float: float32 has 24, so those of 65,536 microbatches are added without rounding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IntegerSum:
    """An integer as floats that hold a byte of it each: it is then reduced with the loss, and its total is exact.

    Attributes:
        parts: The floats, that of the lowest byte first.
        dtype: The dtype of the integer.
    """

    parts: list[PyTree]
    dtype: Any = field(metadata={"static": True})

    def total(self) -> jax.Array:
        """Returns the integer."""
        shifted = []
        for at, part in enumerate(self.parts):
            byte = part.astype(self.dtype)
            shifted.append(byte << (_BITS * at))
        return sum(shifted[1:], shifted[0])


def with_float_sums(loss: Callable) -> Callable:
    """Returns a loss whose sums beside loss_sum and weight_sum, if it has any, are floats and not differentiated."""

    def of_floats(outputs: PyTree, batch: PyTree) -> tuple:
        loss_sum, weight_sum, *sums = loss(outputs, batch)
        dtype = wide_dtype(jnp.result_type(loss_sum))
        floats = jax.tree.map(lambda value: _as_floats(value, dtype), sums)
        return loss_sum, weight_sum, *floats

    return of_floats


def gradient_of_sum(
    loss_sum: jax.Array,
    total_weight: jax.Array,
) -> jax.Array:
    """Returns the gradient of ``loss_sum / total_weight`` by ``loss_sum``, rounded once, to the dtype of ``loss_sum``."""
    wider = jnp.promote_types(loss_sum.dtype, total_weight.dtype)
    weight = total_weight.astype(wider)
    return jnp.reciprocal(weight).astype(loss_sum.dtype)


def sums_of(loss: Callable, outputs: PyTree, batch: PyTree) -> tuple[jax.Array, list]:
    """Returns ``(loss_sum, further sums)``, the value and the auxiliary output for ``jax.vjp(..., has_aux=True)``."""
    loss_sum, _, *further = loss(outputs, batch)
    return loss_sum, further


def _as_floats(value: Any, dtype: np.dtype) -> PyTree:
    """Returns a sum in ``dtype``, in which the loss is reduced, or in its own if that is wider; an integer in parts."""
    value = jax.lax.stop_gradient(jnp.asarray(value))
    if jnp.issubdtype(value.dtype, jnp.floating):
        own = wide_dtype(value.dtype)
        return value.astype(np.promote_types(dtype, own))
    is_unsigned = jnp.issubdtype(value.dtype, jnp.unsignedinteger)
    narrow = jnp.uint32 if is_unsigned else jnp.int32
    integer = value if value.dtype.itemsize > 4 else value.astype(narrow)
    starts = range(0, jnp.iinfo(integer.dtype).bits, _BITS)
    *lower, last = [integer >> start for start in starts]
    # The last one has the sign.
    parts = [*(part & (2**_BITS - 1) for part in lower), last]
    floats = [part.astype(dtype) for part in parts]
    return IntegerSum(floats, integer.dtype)


def value_of(sums: tuple[jax.Array, list], total_weight: jax.Array, dtype: Any) -> PyTree:
    """Returns the loss, or ``(loss, means)`` of a loss with further sums, from their totals.

    Args:
        sums: ``(loss_sum, further sums)``.
        total_weight: The weight of the whole batch.
        dtype: The dtype of the loss.
    """
    loss_sum, further = sums
    loss = (loss_sum / total_weight).astype(dtype)

    def mean(total: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return jnp.divide(total, total_weight)

    means = jax.tree.map(mean, totals_of(further))
    return (loss, *means) if means else loss


def totals_of(further: list) -> list:
    """Returns the totals of further sums, those of integers as integers."""
    is_integer = lambda node: isinstance(node, IntegerSum)
    total_of = lambda each: each.total() if is_integer(each) else each
    return jax.tree.map(total_of, further, is_leaf=is_integer)
