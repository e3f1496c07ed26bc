"""Values of a function that is computed with padding in place (``padded_dims.py``): with it, without it, or made when needed.

Known   an array without padding; with it where an array beside it has some
Kept    an array with padding; without it for an operation that has to see the entries alone
Later   a broadcast, an iota or what is made of them, which is as easily made with padding as without
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxpar._compat import bind

_EACH = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not one_minus_square or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt
    square stop_gradient sub tan tanh xor
    """
EACH = frozenset(_EACH.split())


@dataclass(frozen=True, eq=False)
class Known:
    """An array.

    Attributes:
        plain: The array.
    """

    plain: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return np.shape(self.plain)

    def wide(self, dim: int, size: int) -> Array:
        """Returns the array with padding after the entries of a dim, up to a size."""
        whole = _whole(jnp.asarray(self.plain))
        config = [(0, 0, 0)] * whole.ndim
        config[dim] = (0, size - whole.shape[dim], 0)
        return lax.pad(whole, np.zeros((), whole.dtype), config)


@dataclass(frozen=True, eq=False)
class Kept:
    """An array with padding in place.

    Attributes:
        array: The array, padded.
        dim: The dim that has padding.
        count: The entries before it.
    """

    array: Array
    dim: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return with_entry(self.array.shape, self.dim, self.count)

    @property
    def size(self) -> int:
        """The entries and their padding."""
        return self.array.shape[self.dim]

    @cached_property
    def plain(self) -> Array:
        """The array without padding."""
        return cut(self.array, self.dim, self.count)

    def wide(self, dim: int, size: int) -> Array:
        """Returns the array with padding in a dim."""
        return self.array if dim == self.dim else Known(self.plain).wide(dim, size)

    def masked(self, value: Any) -> Array:
        """Returns the array, padded with a value."""
        place = lax.broadcasted_iota(jnp.int32, self.array.shape, self.dim)
        padding = jnp.asarray(value, self.array.dtype)
        return jnp.where(place < self.count, self.array, padding)


@dataclass(frozen=True, eq=False)
class Later:
    """The output of an operation that can make its entries with padding too, such as a broadcast; made when it is needed.

    Attributes:
        equation: The operation.
        inputs: Its inputs.
    """

    equation: Any
    inputs: Sequence["Value"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return self.equation.outvars[0].aval.shape

    @cached_property
    def plain(self) -> Array:
        """The array without padding."""
        inputs = [each.plain for each in self.inputs]
        return bind(self.equation, inputs)[0]

    def wide(self, dim: int, size: int) -> Array:
        """Returns the array with padding in a dim."""
        make = LATER[self.equation.primitive.name]
        made = make(self.equation, self.inputs, dim, size)
        return Known(self.plain).wide(dim, size) if made is None else made


Value = Known | Kept | Later
Made = Array | None
Sizes = dict[int, int]  # of a dim with its padding, by its size without


def cut(x: Array, dim: int, count: int) -> Array:
    """Returns the first entries of a dim, on each shard of a step."""
    return lax.slice_in_dim(_whole(x), 0, count, axis=dim)


def _whole(x: Array) -> Array:
    """Returns an array that every shard of a step has whole."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh.auto_axes if mesh.manual_axes else ()
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    if num_shards == 1:
        return x
    return lax.with_sharding_constraint(x, PartitionSpec())


def again(equation: Any, inputs: Sequence[Any], **changes: Any) -> Array:
    """Returns the output of an equation for inputs with padding, with some parameters changed."""
    changed = equation.replace(params=equation.params | changes)
    return bind(changed, inputs)[0]


def with_entry(entries: Sequence[int], at: int, entry: int) -> tuple[int, ...]:
    """Returns a shape, or what has an entry for each dim, with another one at a dim."""
    return (*entries[:at], entry, *entries[at + 1 :])


# Arrays made with padding ---------------------------------------------------------------------------------------------------


def each_wide(equation: Any, inputs: Sequence[Value], dim: int, size: int) -> Made:
    """Returns the output of an operation on each entry, from inputs with padding."""

    def wide(value: Value) -> Array:
        is_kept = isinstance(value, Kept)
        is_one = not value.shape or (value.shape[dim] == 1 and not is_kept)
        return value.plain if is_one else value.wide(dim, size)

    if any(isinstance(value, Kept) and value.dim != dim for value in inputs):
        return None
    return bind(equation, [wide(value) for value in inputs])[0]


def _broadcast_wide(equation: Any, inputs: Sequence[Value], dim: int, size: int) -> Made:
    of = inputs[0]
    targets = enumerate(equation.params["broadcast_dimensions"])
    mapped = [place for place, to in targets if to == dim and of.shape[place] != 1]
    array = of.wide(mapped[0], size) if mapped else of.plain
    return _of_size(equation, [array], dim, size)


def _of_size(equation: Any, inputs: Sequence[Array], dim: int, size: int) -> Made:
    """Returns the output of an equation that has its shape as a parameter."""
    shape = with_entry(equation.params["shape"], dim, size)
    return again(equation, inputs, shape=shape)


def _pad_wide(equation: Any, inputs: Sequence[Value], dim: int, size: int) -> Made:
    of, padding = inputs
    if any(equation.params["padding_config"][dim]):
        return None
    return again(equation, [of.wide(dim, size), padding.plain])


def _scatter_wide(equation: Any, inputs: Sequence[Value], dim: int, size: int) -> Made:
    of, *others = inputs
    if dim not in equation.params["dimension_numbers"].inserted_window_dims:
        return None
    others = [value.plain for value in others]
    return again(equation, [of.wide(dim, size), *others])


LATER: dict[str, Callable[..., Made]] = {
    "broadcast_in_dim": _broadcast_wide,
    "iota": _of_size,
    "pad": _pad_wide,
    "scatter-add": _scatter_wide,
    **dict.fromkeys(EACH, each_wide),
}
