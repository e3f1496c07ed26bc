"""Programs of a few operations, drawn at random: what the checks of rows and of positions read.

A program is a list of steps; a step applies a function to earlier arrays. Each is drawn with arrays of two sizes, and kept if
it fits both, as a program must that is split: its numbers are then those of the whole, or the checks refuse it or warn of it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MOST_ELEMENTS = 20_000


class Step(NamedTuple):
    """One operation: its name, the numbers of the arrays that it reads, and its function."""

    name: str
    reads: tuple[int, ...]
    apply: Callable[..., Any]


def _mask_of(a: jax.Array, dim: int) -> jax.Array:
    """The places along a dim, as they broadcast over the others."""
    shape = [-1 if d == dim else 1 for d in range(a.ndim)]
    return jnp.arange(a.shape[dim]).reshape(shape)


def _scanned(a: jax.Array, dim: int) -> jax.Array:
    x = jnp.moveaxis(a, dim, 0)
    _, out = lax.scan(lambda carry, row: (carry / 2 + row, carry), jnp.zeros_like(x[0]), x)
    return jnp.moveaxis(out, 0, dim)


def _halved_until_small(a: jax.Array, dim: int) -> jax.Array:
    is_large = lambda x: jnp.max(jnp.abs(x)) > 1
    each = lambda x: lax.while_loop(is_large, lambda x: x / 2, x)
    return jax.vmap(each, dim, dim)(a)


def _shifted(a: jax.Array, dim: int) -> jax.Array:
    widths = [(1, 0) if d == dim else (0, 0) for d in range(a.ndim)]
    return lax.slice_in_dim(jnp.pad(a, widths), 0, a.shape[dim], axis=dim)


OF_EACH: Mapping[str, Callable] = {
    "sin": jnp.sin,
    "square": jnp.square,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "stop_gradient": lax.stop_gradient,
    "rounded": lambda a: jnp.clip(3 * a, -5, 5).astype(jnp.int32),
}
ALONG: Mapping[str, Callable] = {
    "sum": lambda a, dim: a.sum(dim),
    "mean": lambda a, dim: a.mean(dim),
    "mean beside": lambda a, dim: a - a.mean(dim, keepdims=True),
    "max": lambda a, dim: a.max(dim),
    "max beside": lambda a, dim: a.max(dim, keepdims=True),
    "logsumexp": lambda a, dim: jax.nn.logsumexp(a, dim),
    "softmax": lambda a, dim: jax.nn.softmax(a, dim),
    "median": lambda a, dim: jnp.median(a, dim),
    "cumsum": lambda a, dim: jnp.cumsum(a, dim),
    "sort": lambda a, dim: jnp.sort(a, dim),
    "argmax": lambda a, dim: jnp.argmax(a, dim),
    "flip": lambda a, dim: jnp.flip(a, dim),
    "shift": _shifted,
    "first": lambda a, dim: lax.index_in_dim(a, 0, dim),
    "every other": lambda a, dim: lax.slice_in_dim(a, 0, None, 2, dim),
    "number of": lambda a, dim: a / a.shape[dim],
    "places": lambda a, dim: a + _mask_of(a, dim),
    "few alone": lambda a, dim: jnp.where(_mask_of(a, dim) < 3, a, 0),
    "case by number": lambda a, dim: lax.cond(a.shape[dim] > 4, jnp.sin, jnp.cos, a),
    "drawn": lambda a, dim: (
        a * jax.random.normal(jax.random.key(0), (a.shape[dim],))[_mask_of(a, dim)]
    ),
    "scan": _scanned,
    "while of each": _halved_until_small,
    "of each by vmap": lambda a, dim: jax.vmap(lambda x: x / (1 + jnp.vdot(x, x)), dim, dim)(a),
    "to the front": lambda a, dim: jnp.moveaxis(a, dim, 0),
    "joined dims": lambda a, dim: a.reshape(-1, *a.shape[2:]),
    "parted dim": lambda a, dim: a.reshape(-1, 2, *a.shape[1:]),
}
OF_PAIRS: Mapping[str, Callable] = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "maximum": jnp.maximum,
    "where": lambda a, b: jnp.where(a > b, a, b / 2),
    "matmul": jnp.matmul,
    "concatenate": lambda a, b: jnp.concatenate([a, b]),
    "stack": lambda a, b: jnp.stack([a, b]),
    "pairs": lambda a, b: jnp.einsum("r...d,s...d->rs...", a, b),
    "of the same row": lambda a, b: jnp.einsum("r...d,r...d->r...", a, b),
    "over rows": lambda a, b: jnp.tensordot(a, b, (0, 0)),
    "first of another": lambda a, b: a.at[0].set(b[0]),
}
WITH_INTEGERS: Mapping[str, Callable] = {
    "taken": lambda a, i: a[i % a.shape[0]],
    "of the table": lambda a, i: a[i % 3],
    "along the last": lambda a, i: jnp.take_along_axis(a, i[..., None] % a.shape[-1], -1),
    "segment sum": lambda a, i: jax.ops.segment_sum(a, i % 4, 4),
    "masked": lambda a, i: jnp.where((i > 0)[..., None], a, 0),
    "times": lambda a, i: a * i,
}


def draw(
    rng: random.Random,
    shapes: tuple[Sequence[Any], Sequence[Any]],
    num_steps: int,
    sent: Mapping[str, Callable] | None = None,
) -> list[Step]:
    """Returns a program.

    Args:
        rng: Draws it.
        shapes: ShapeDtypeStructs of the arrays that it is given, for the whole and for a part of it.
        num_steps: The most steps.
        sent: Functions of positions that devices exchange, for arrays with positions in dim 1, which others are then along
            now and then alone.
    """
    whole, part = map(list, shapes)
    steps: list[Step] = []
    for _ in range(100 * num_steps):
        step = _drawn(rng, whole, part, sent or {})
        if step is None:
            continue
        try:
            made = [
                jax.eval_shape(step.apply, *(arrays[i] for i in step.reads))
                for arrays in (whole, part)
            ]
        except (TypeError, ValueError, IndexError, ZeroDivisionError):  # it does not fit the arrays
            continue
        if not 0 < made[0].size <= MOST_ELEMENTS or made[1].size == 0 or made[0].ndim > 5:
            continue
        steps.append(step)
        whole.append(made[0])
        part.append(made[1])
        if len(steps) == num_steps:
            break
    return steps


def _drawn(
    rng: random.Random, whole: Sequence[Any], part: Sequence[Any], sent: Mapping[str, Callable]
) -> Step | None:
    is_float = lambda i: jnp.issubdtype(whole[i].dtype, jnp.floating)
    every = range(len(whole))
    late = [*every, *[i for i in every if i >= len(whole) - 3]]  # the last ones more often
    floats = [i for i in late if is_float(i)]
    integers = [i for i in late if not is_float(i)]
    a = rng.choice(floats)
    table = rng.choice([OF_EACH, ALONG, ALONG, OF_PAIRS, WITH_INTEGERS, *[sent] * (2 * bool(sent))])
    name, function = rng.choice([*table.items()])
    if table is ALONG:
        if whole[a].ndim == 0:
            return None
        dim = rng.randrange(whole[a].ndim)
        if sent and dim < 2 and rng.random() < 0.9:
            return None
        return Step(f"{name} of dim {dim}", (a,), lambda x: function(x, dim))
    if table is OF_PAIRS:
        return Step(name, (a, rng.choice(floats)), function)
    if table is WITH_INTEGERS:
        return Step(name, (a, rng.choice(integers)), function)
    if table is sent and (whole[a].ndim < 2 or whole[a].shape[1] == part[a].shape[1]):
        return None
    return Step(name, (a,), function)


def run(steps: Sequence[Step], arrays: Sequence[Any]) -> Any:
    """Returns the last array of floats that a program makes."""
    made = list(arrays)
    for step in steps:
        made.append(step.apply(*(made[i] for i in step.reads)))
    return next(a for a in reversed(made) if jnp.issubdtype(a.dtype, jnp.floating))
