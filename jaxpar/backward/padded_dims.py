"""Functions of the entries before a padding, computed with the padding in place.

A vocabulary of 100 words may be padded to 128, so that a mesh axis divides it. A model and its loss see the words alone:

    scores [t, 128] --without_padding--> [t, 100] --exp--> [t, 100] --sum--> [t]

A step keeps the padding from there on, so that sharded words stay where they are, and masks it where entries meet:

    scores [t, 128] --exp--> [t, 128] --where(is word, x, 0)--> --sum--> [t]

What lies in the padding is arbitrary. Operations on each entry compute it too; reductions replace it by what changes nothing;
the gradient of ``scores`` is 0 there. Other operations get the words: all words on each shard, since a slice across shards
would be a permute, which does not end where only some devices run it.

The function is a jaxpr that has its gradients in it, so no derivative is taken of what is masked here.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode
from jaxtyping import Array, Shaped

from jaxpar._compat import Literal, bind, called, equations, evaluate, is_remat, literal_value
from jaxpar.backward.padded_values import (
    EACH,
    LATER,
    Kept,
    Known,
    Later,
    Sizes,
    Value,
    again,
    cut,
    each_wide,
    with_entry,
)


def without_padding(x: Shaped[Array, "*dims padded"], count: int) -> Shaped[Array, "*dims entries"]:
    """Returns the first entries of the last dim, the others of which are padding.

    In a step their padding is kept where that computes the same, so that shards of the dim are not gathered.
    """
    return x if x.shape[-1] == count else _without_padding(x, count)


@partial(jax.jit, static_argnums=1)
def _without_padding(x: Array, count: int) -> Array:
    return cut(x, x.ndim - 1, count)


_MARK = "_without_padding"  # the name of that function, in the equations of a jaxpr


def keep_padding(closed: Any, leaves: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a closed jaxpr, with padding in place after ``without_padding``."""
    sizes: Sizes = {}
    for mark in filter(_is_mark, equations(closed)):
        count, padded = sorted(_sizes_at(mark))
        if sizes.setdefault(count, padded) != padded:
            # two vocabularies of as many words with other padding
            return evaluate(closed, leaves)
    if not sizes:
        return evaluate(closed, leaves)
    values = _run(closed, [Known(leaf) for leaf in leaves], sizes)
    return [value.plain for value in values]


def _is_mark(equation: Any) -> bool:
    return equation.params.get("name") == _MARK


def _sizes_at(mark: Any) -> tuple[int, int]:
    """Returns the sizes of the last dim before and after a ``without_padding``, or after and before it in the gradient."""
    return mark.invars[0].aval.shape[-1], mark.outvars[0].aval.shape[-1]


# Running --------------------------------------------------------------------------------------------------------------------


def _run(closed: Any, inputs: Sequence[Value], sizes: Sizes) -> list[Value]:
    jaxpr = closed.jaxpr
    constants = [Known(constant) for constant in closed.consts]
    known: dict[Any, Value] = dict(zip(jaxpr.constvars, constants, strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def value_of(atom: Any) -> Value:
        return Known(literal_value(atom)) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [value_of(atom) for atom in equation.invars]
        made = _made(equation, values, sizes)
        known.update(zip(equation.outvars, made, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _made(equation: Any, values: Sequence[Value], sizes: Sizes) -> list[Value]:
    """Returns the outputs of an equation."""
    if _is_mark(equation):
        return [_at_mark(equation, values[0])]
    name = equation.primitive.name
    inner = None if is_remat(equation) else called(equation)
    if name in _NEUTRAL:
        values = [_kept_for_reduction(values[0], equation.params["axes"], sizes)]
    is_kept = any(isinstance(value, Kept) for value in values)
    may_wait = any(sizes.keys() & v.aval.shape for v in equation.outvars)
    if inner is not None and (is_kept or may_wait or _has_mark(inner)):
        return _run(inner, values, sizes)
    made = None
    if is_kept:
        made = _RULES.get(name, _none)(equation, values)
    elif may_wait and _waits(equation, values, sizes):
        made = Later(equation, values)
    if made is not None:
        return [made]
    plain = [value.plain for value in values]
    return [Known(array) for array in bind(equation, plain)]


def _kept_for_reduction(value: Value, axes: Sequence[int], sizes: Sizes) -> Value:
    """Returns a value that is made when needed with padding in a dim that is reduced, if it has one."""
    dims = [dim for dim in axes if value.shape[dim] in sizes]
    if not isinstance(value, Later) or not dims:
        return value
    dim = dims[-1]
    count = value.shape[dim]
    return Kept(value.wide(dim, sizes[count]), dim, count)


def _has_mark(jaxpr: Any) -> bool:
    return any(map(_is_mark, equations(jaxpr)))


def _at_mark(equation: Any, value: Value) -> Value:
    """Returns the entries before the padding; or, of its transpose, the gradients with zeros in the padding."""
    before, after = _sizes_at(equation)
    dim = len(value.shape) - 1
    if after < before:
        return Kept(jnp.asarray(value.plain), dim, after)
    padded = Kept(value.wide(dim, after), dim, before)
    return Known(padded.masked(0))


def _waits(equation: Any, values: Sequence[Value], sizes: Sizes) -> bool:
    """Whether an output may be made later: what it is made of may be, up to numbers that are the same for all entries."""
    name = equation.primitive.name
    if name not in LATER:
        return False
    if name in ("broadcast_in_dim", "iota"):
        return True
    if name not in EACH:
        return isinstance(values[0], Later)
    shape = equation.outvars[0].aval.shape
    dims = [dim for dim, size in enumerate(shape) if size in sizes]

    def is_one(value: Value) -> bool:
        return not value.shape or any(value.shape[dim] == 1 for dim in dims)

    return all(isinstance(value, Later) or is_one(value) for value in values)


def _again(equation: Any, kept: Kept, dim: int, **changes: Any) -> Value:
    """Returns the output of an equation with one input, the padding of which is in a dim of the output."""
    return Kept(again(equation, [kept.array], **changes), dim, kept.count)


# Operations on kept padding -------------------------------------------------------------------------------------------------
# Each returns its output, or None where it has to see the entries alone.


def _each_kept(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = next(value for value in values if isinstance(value, Kept))
    made = each_wide(equation, values, kept.dim, kept.size)
    return None if made is None else Kept(made, kept.dim, kept.count)


def _broadcast(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = _first_alone(values)
    if kept is None:
        return None
    params = equation.params
    dim = int(params["broadcast_dimensions"][kept.dim])
    shape = with_entry(params["shape"], dim, kept.size)
    return _again(equation, kept, dim, shape=shape)


def _reduction(
    lowest: Callable[[Any], Any], equation: Any, values: Sequence[Value]
) -> Value | None:
    kept = _only(values)
    axes = equation.params["axes"]
    if kept.dim in axes:
        return Known(again(equation, [kept.masked(lowest(kept.array.dtype))]))
    return _again(equation, kept, _without(axes, kept.dim))


def _only(values: Sequence[Value]) -> Kept:
    (kept,) = values
    assert isinstance(kept, Kept)
    return kept


def _without(removed: Sequence[int], dim: int) -> int:
    """Returns the place of a dim after some others were removed."""
    return dim - sum(each < dim for each in removed)


def _reshape(equation: Any, values: Sequence[Value]) -> Value | None:
    kept, *others = values
    new = equation.params["new_sizes"]
    if others or not isinstance(kept, Kept) or equation.params["dimensions"] is not None:
        return None
    before = math.prod(kept.shape[: kept.dim])
    places = [at for at, n in enumerate(new) if n == kept.count and math.prod(new[:at]) == before]
    if not places:
        return None
    dim = places[-1]
    return _again(equation, kept, dim, new_sizes=with_entry(new, dim, kept.size))


def _transpose(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = _only(values)
    permutation = tuple(equation.params["permutation"])
    return _again(equation, kept, permutation.index(kept.dim))


def _squeeze(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = _only(values)
    dims = equation.params["dimensions"]
    if kept.dim in dims:
        return None
    return _again(equation, kept, _without(dims, kept.dim))


def _slice(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = _only(values)
    params = equation.params
    dim = kept.dim
    start = params["start_indices"][dim]
    limit = params["limit_indices"][dim]
    stride = params["strides"][dim] if params["strides"] else 1
    if (start, limit, stride) != (0, kept.count, 1):
        return None
    limits = with_entry(params["limit_indices"], dim, kept.size)
    return _again(equation, kept, dim, limit_indices=limits)


def _pad(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = _first_alone(values)
    if kept is None or any(equation.params["padding_config"][kept.dim]):
        return None
    return Kept(again(equation, [kept.array, values[1].plain]), kept.dim, kept.count)


def _gather(equation: Any, values: Sequence[Value]) -> Value | None:
    """Looks entries up, as ``jnp.take_along_axis`` does; one in the padding is not there."""
    kept = _first_alone(values)
    params = equation.params
    mode = GatherScatterMode.from_any(params["mode"])
    if kept is None or mode == GatherScatterMode.CLIP:
        return None
    if kept.dim not in params["dimension_numbers"].collapsed_slice_dims:
        return None
    is_float = jnp.issubdtype(kept.array.dtype, jnp.floating)
    if mode != GatherScatterMode.PROMISE_IN_BOUNDS and not is_float:
        return None
    fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
    masked = kept.masked(fill if is_float else 0)
    return Known(again(equation, [masked, values[1].plain]))


def _first_alone(values: Sequence[Value]) -> Kept | None:
    """Returns the first value, if it alone has kept padding."""
    first, *others = values
    if not isinstance(first, Kept) or any(isinstance(value, Kept) for value in others):
        return None
    return first


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.iinfo(dtype).max


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_or": lambda dtype: 0,
    "reduce_and": lambda dtype: _highest(dtype) if jnp.issubdtype(dtype, jnp.bool_) else -1,
    "reduce_max": _lowest,
    "reduce_min": _highest,
    "argmax": _lowest,
    "argmin": _highest,
}


def _none(equation: Any, values: Sequence[Value]) -> Value | None:
    return None


_RULES: dict[str, Callable[..., Value | None]] = {
    "broadcast_in_dim": _broadcast,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
    **{name: partial(_reduction, neutral) for name, neutral in _NEUTRAL.items()},
    **dict.fromkeys(EACH, _each_kept),
}
