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
    pairs = [_sizes_at(each) for each in equations(closed) if _is_mark(each)]
    if not pairs:
        return evaluate(closed, leaves)
    sizes = {min(pair): max(pair) for pair in pairs}
    if any(max(pair) != sizes[min(pair)] for pair in pairs):
        return evaluate(closed, leaves)  # two vocabularies of as many words with other padding
    return [value.plain for value in _run(closed, [Known(leaf) for leaf in leaves], sizes)]


def _is_mark(equation: Any) -> bool:
    return equation.params.get("name") == _MARK


def _sizes_at(mark: Any) -> tuple[int, int]:
    """Returns the sizes of the last dim before and after a ``without_padding``, or after and before it in the gradient."""
    return mark.invars[0].aval.shape[-1], mark.outvars[0].aval.shape[-1]


# Running --------------------------------------------------------------------------------------------------------------------


def _run(closed: Any, inputs: Sequence[Value], sizes: Sizes) -> list[Value]:
    jaxpr = closed.jaxpr
    constants = [Known(constant) for constant in closed.consts]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))
    value = lambda atom: Known(literal_value(atom)) if isinstance(atom, Literal) else known[atom]
    for equation in jaxpr.eqns:
        made = _made(equation, [value(atom) for atom in equation.invars], sizes)
        known.update(zip(equation.outvars, made, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _made(equation: Any, values: Sequence[Value], sizes: Sizes) -> list[Value]:
    """Returns the outputs of an equation."""
    if _is_mark(equation):
        return [_at_mark(equation, values[0])]
    name, inner = equation.primitive.name, None if is_remat(equation) else called(equation)
    if name in _NEUTRAL and isinstance(values[0], Later):
        values = [_kept_for_reduction(values[0], equation.params["axes"], sizes)]
    is_kept = any(isinstance(value, Kept) for value in values)
    may_wait = any(sizes.keys() & v.aval.shape for v in equation.outvars)
    if inner is not None and (is_kept or may_wait or _has_mark(inner)):
        return _run(inner, values, sizes)
    made = _RULES.get(name, _none)(equation, values) if is_kept else None
    if (
        made is None
        and not is_kept
        and may_wait
        and name in LATER
        and _waits(equation, values, sizes)
    ):
        made = Later(equation, values)
    if made is not None:
        return [made]
    return [Known(array) for array in bind(equation, [value.plain for value in values])]


def _kept_for_reduction(value: Later, axes: Sequence[int], sizes: Sizes) -> Value:
    """Returns a value with padding in a dim that is reduced, if it has one."""
    dims = [dim for dim in axes if value.shape[dim] in sizes]
    if not dims:
        return value
    count = value.shape[dims[-1]]
    return Kept(value.wide(dims[-1], sizes[count]), dims[-1], count)


def _has_mark(jaxpr: Any) -> bool:
    return any(map(_is_mark, equations(jaxpr)))


def _at_mark(equation: Any, value: Value) -> Value:
    """Returns the entries before the padding; or, of its transpose, the gradients with zeros in the padding."""
    before, after = _sizes_at(equation)
    dim = len(value.shape) - 1
    if after < before:
        return Kept(jnp.asarray(value.plain), dim, after)
    return Known(Kept(value.wide(dim, after), dim, before).masked(0))


def _waits(equation: Any, values: Sequence[Value], sizes: Sizes) -> bool:
    """Whether an output may be made later: what it is made of may be, up to numbers that are the same for all entries."""
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    if name in ("broadcast_in_dim", "iota"):
        return True
    if name not in EACH:
        return isinstance(values[0], Later)
    dims = [dim for dim, size in enumerate(shape) if size in sizes]
    is_one = lambda value: not value.shape or any(value.shape[dim] == 1 for dim in dims)
    return all(isinstance(value, Later) or is_one(value) for value in values)


# Operations on kept padding -------------------------------------------------------------------------------------------------
# Each returns its output, or None where it has to see the entries alone.


def _each_kept(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = next(value for value in values if isinstance(value, Kept))
    made = each_wide(equation, values, kept.dim, kept.array.shape[kept.dim])
    return None if made is None else Kept(made, kept.dim, kept.count)


def _broadcast(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = _first_alone(values)
    if kept is None:
        return None
    dim = int(equation.params["broadcast_dimensions"][kept.dim])
    shape = with_entry(equation.params["shape"], dim, kept.array.shape[kept.dim])
    return Kept(again(equation, [kept.array], shape=shape), dim, kept.count)


def _reduction(
    lowest: Callable[[Any], Any], equation: Any, values: Sequence[Value]
) -> Value | None:
    (kept,) = values
    assert isinstance(kept, Kept)
    axes = equation.params["axes"]
    if kept.dim in axes:
        return Known(again(equation, [kept.masked(lowest(kept.array.dtype))]))
    dim = kept.dim - sum(axis < kept.dim for axis in axes)
    return Kept(again(equation, [kept.array]), dim, kept.count)


def _reshape(equation: Any, values: Sequence[Value]) -> Value | None:
    (kept, *others), new = values, equation.params["new_sizes"]
    if others or not isinstance(kept, Kept) or equation.params["dimensions"] is not None:
        return None
    before = math.prod(kept.shape[: kept.dim])
    places = [at for at, n in enumerate(new) if n == kept.count and math.prod(new[:at]) == before]
    if not places:
        return None
    shape = with_entry(new, places[-1], kept.array.shape[kept.dim])
    return Kept(again(equation, [kept.array], new_sizes=shape), places[-1], kept.count)


def _transpose(equation: Any, values: Sequence[Value]) -> Value | None:
    (kept,) = values
    assert isinstance(kept, Kept)
    dim = tuple(equation.params["permutation"]).index(kept.dim)
    return Kept(again(equation, [kept.array]), dim, kept.count)


def _squeeze(equation: Any, values: Sequence[Value]) -> Value | None:
    (kept,), dims = values, equation.params["dimensions"]
    assert isinstance(kept, Kept)
    dim = kept.dim - sum(each < kept.dim for each in dims)
    return None if kept.dim in dims else Kept(again(equation, [kept.array]), dim, kept.count)


def _slice(equation: Any, values: Sequence[Value]) -> Value | None:
    (kept,), params = values, equation.params
    assert isinstance(kept, Kept)
    strides = params["strides"] or (1,) * len(kept.shape)
    own = tuple(
        int(each[kept.dim]) for each in (params["start_indices"], params["limit_indices"], strides)
    )
    if own != (0, kept.count, 1):
        return None
    limits = with_entry(params["limit_indices"], kept.dim, kept.array.shape[kept.dim])
    return Kept(again(equation, [kept.array], limit_indices=limits), kept.dim, kept.count)


def _pad(equation: Any, values: Sequence[Value]) -> Value | None:
    kept = _first_alone(values)
    if kept is None or any(equation.params["padding_config"][kept.dim]):
        return None
    return Kept(again(equation, [kept.array, values[1].plain]), kept.dim, kept.count)


def _gather(equation: Any, values: Sequence[Value]) -> Value | None:
    """Looks entries up, as ``jnp.take_along_axis`` does; one in the padding is not there."""
    kept, dims, params = _first_alone(values), equation.params["dimension_numbers"], equation.params
    mode = jax.lax.GatherScatterMode.from_any(params["mode"])
    if (
        kept is None
        or kept.dim not in dims.collapsed_slice_dims
        or mode == jax.lax.GatherScatterMode.CLIP
    ):
        return None
    is_float = jnp.issubdtype(kept.array.dtype, jnp.floating)
    if mode != jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS and not is_float:
        return None
    fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
    return Known(again(equation, [kept.masked(fill if is_float else 0), values[1].plain]))


def _first_alone(values: Sequence[Value]) -> Kept | None:
    """Returns the first value, if it alone has kept padding."""
    kept = [isinstance(value, Kept) for value in values]
    return values[0] if isinstance(values[0], Kept) and kept.count(True) == 1 else None


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf
    return False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf
    return True if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).max


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
