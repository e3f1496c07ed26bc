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
    return a + jax.vmap(each, dim, dim)(lax.stop_gradient(a))


def _halved_together(a: jax.Array) -> jax.Array:
    is_large = lambda x: jnp.max(jnp.abs(x)) > 1
    return a + lax.while_loop(is_large, lambda x: x / 2, lax.stop_gradient(a))


def _added_up(a: jax.Array, dim: int) -> jax.Array:
    x = jnp.moveaxis(a, dim, 0)
    return lax.scan(lambda carry, row: (carry + jnp.sin(row), None), jnp.zeros_like(x[0]), x)[0]


def _last_of_scan(a: jax.Array, dim: int) -> jax.Array:
    x = jnp.moveaxis(a, dim, 0)
    return lax.scan(lambda carry, row: (carry / 2 + row, None), jnp.zeros_like(x[0]), x)[0]


def _counted(a: jax.Array, dim: int) -> jax.Array:
    return lax.fori_loop(0, a.shape[dim], lambda at, x: x / (1 + at), a)


def _nested(a: jax.Array, dim: int) -> jax.Array:
    """A scan along a dim of scans along the next one."""
    x = jnp.moveaxis(a, dim, 0)
    inner = lambda row: lax.scan(lambda c, each: (c + each, each * c), jnp.zeros_like(row[0]), row)
    _, out = lax.scan(lambda c, row: (c, inner(row)[1]), 0, x)
    return jnp.moveaxis(out, 0, dim)


def _with_cotangent(of_cotangent: Callable) -> Callable:
    """A function that returns its array, and whose derivative is that of the cotangent along a dim."""

    def applied(a: jax.Array, dim: int) -> jax.Array:
        same = jax.custom_vjp(lambda x: x)
        same.defvjp(lambda x: (x, None), lambda _, ct: (of_cotangent(ct, dim),))
        return same(a)

    return applied


@jax.custom_jvp
def _bent(a: jax.Array) -> jax.Array:
    return jnp.abs(a)


@_bent.defjvp
def _bent_jvp(primals: Any, tangents: Any) -> Any:
    return _bent(*primals), jnp.tanh(primals[0]) * tangents[0]


def _windows(a: jax.Array, dim: int) -> jax.Array:
    sizes = [2 if d == dim else 1 for d in range(a.ndim)]
    return lax.reduce_window(a, 0.0, lax.add, sizes, [1] * a.ndim, "SAME")


def _convolved(a: jax.Array, dim: int) -> jax.Array:
    x = jnp.moveaxis(a, dim, -1)
    flat = x.reshape(-1, 1, x.shape[-1])
    found = lax.conv_general_dilated(flat, jnp.ones((1, 1, 3), a.dtype), [1], "SAME")
    return jnp.moveaxis(found.reshape(x.shape), -1, dim)


def _largest_two(a: jax.Array, dim: int) -> jax.Array:
    return jnp.moveaxis(lax.top_k(jnp.moveaxis(a, dim, -1), 2)[0], -1, dim)


def _in_order_and_back(a: jax.Array, dim: int) -> jax.Array:
    order = jnp.argsort(a, dim)
    return jnp.take_along_axis(
        jnp.sin(jnp.take_along_axis(a, order, dim)), jnp.argsort(order, dim), dim
    )


def _front(function: Callable, a: jax.Array, dim: int) -> jax.Array:
    """Applies a function along the first dim to another one."""
    return jnp.moveaxis(function(jnp.moveaxis(a, dim, 0)), 0, dim)


def _in_pairs(a: jax.Array, dim: int) -> jax.Array:
    """The neighbours along a dim as two dims, [..., pairs, 2, ...]."""
    return a.reshape(*a.shape[:dim], -1, 2, *a.shape[dim + 1 :])


def _added_up_by_chunks(a: jax.Array, dim: int) -> jax.Array:
    chunks = jnp.moveaxis(_in_pairs(a, dim), dim, 0)
    return lax.fori_loop(0, len(chunks), lambda at, total: total + chunks[at].sum(), 0.0)


def _often(count: int, a: jax.Array) -> jax.Array:
    return lax.fori_loop(0, count, lambda _, x: jnp.tanh(x), a)


def _log_of_shifted(a: jax.Array, dim: int) -> jax.Array:
    """The logarithm of a sum of exponentials, which are shifted by the largest of all."""
    shift = lax.stop_gradient(a.max())
    return jnp.log(jnp.exp(a - shift).sum(dim)) + shift


def _while_sum_is_large(a: jax.Array) -> jax.Array:
    is_large = lambda x: jnp.sum(jnp.abs(x)) > 1
    return a + lax.while_loop(is_large, lambda x: x / 2, lax.stop_gradient(a))


def _at_places(a: jax.Array, b: jax.Array) -> jax.Array:
    return b[jnp.arange(len(a)) % len(b)]


def _in_turn(a: jax.Array, b: jax.Array) -> jax.Array:
    """The elements of another array, one in each trip of a loop."""
    return lax.fori_loop(0, len(b), lambda at, x: jnp.tanh(x + b[at]), a)


def _shifted(a: jax.Array, dim: int) -> jax.Array:
    widths = [(1, 0) if d == dim else (0, 0) for d in range(a.ndim)]
    return lax.slice_in_dim(jnp.pad(a, widths), 0, a.shape[dim], axis=dim)


OF_EACH: Mapping[str, Callable] = {
    "sin": jnp.sin,
    "square": jnp.square,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "stop_gradient": lax.stop_gradient,
    "custom jvp": _bent,
    "checkpoint": lambda a: jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))(a),
    "while of all": _halved_together,
    "by its size": lambda a: a / a.size,
    "by its norm": lambda a: a / (1 + jnp.linalg.norm(a)),
    "flat": lambda a: a.reshape(-1),
    "transposed": lambda a: a.T,
    "of float32": lambda a: a.astype(jnp.float32).astype(a.dtype),
    "rounded": lambda a: jnp.clip(3 * a, -5, 5).astype(jnp.int32),
    "while the sum": _while_sum_is_large,
    "mean of all": jnp.mean,
    "largest of all": jnp.max,
    "squeezed": jnp.squeeze,
    "gradient": lambda a: jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2))(a),
    "gradient of a mean": lambda a: jax.grad(lambda x: jnp.mean(jnp.sin(x)))(a),
    "exp shifted": lambda a: jnp.exp(a - lax.stop_gradient(a.max())),
    "mean of shifted": lambda a: jnp.log(jnp.mean(jnp.exp(a - a.max()))) + a.max(),
    "by the sum": lambda a: a / (1 + jnp.abs(jnp.sum(a))),
    "noise": lambda a: a + jax.random.normal(jax.random.key(1), a.shape),
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
    "added up by scan": _added_up,
    "last of scan": _last_of_scan,
    "counted loop": _counted,
    "nested scans": _nested,
    "associative scan": lambda a, dim: lax.associative_scan(jnp.maximum, a, axis=dim),
    "cotangent's mean": _with_cotangent(lambda ct, dim: ct - ct.mean(dim, keepdims=True)),
    "cotangent's norm": _with_cotangent(
        lambda ct, dim: ct / (1 + jnp.abs(ct).sum(dim, keepdims=True))
    ),
    "cotangent by number": _with_cotangent(lambda ct, dim: ct / ct.shape[dim]),
    "cotangent clipped": _with_cotangent(lambda ct, dim: jnp.clip(ct, -0.01, 0.01)),
    "windows": _windows,
    "convolved": _convolved,
    "largest two": _largest_two,
    "in order and back": _in_order_and_back,
    "roll": lambda a, dim: jnp.roll(a, 1, dim),
    "norm of": lambda a, dim: jnp.sqrt(1 + jnp.square(a).sum(dim, keepdims=True)),
    "prod": lambda a, dim: jnp.prod(a, dim),
    "any": lambda a, dim: jnp.any(a > 1, dim).astype(a.dtype),
    "count": lambda a, dim: jnp.sum(a > 0, dim).astype(a.dtype),
    "mean of the counted": lambda a, dim: a.sum(dim) / (1 + jnp.sum(a > 0, dim)),
    "tail": lambda a, dim: lax.slice_in_dim(a, 1, None, axis=dim),
    "half": lambda a, dim: lax.slice_in_dim(a, 0, a.shape[dim] // 2, axis=dim),
    "repeat": lambda a, dim: jnp.repeat(a, 2, dim),
    "fft": lambda a, dim: jnp.fft.fft(a, axis=dim).real,
    "variance": lambda a, dim: (
        (a - a.mean(dim, keepdims=True)) / jnp.sqrt(1 + a.var(dim, keepdims=True))
    ),
    "lower triangle": lambda a, dim: jnp.tril(jnp.moveaxis(a, dim, -1)),
    "the next": lambda a, dim: jnp.take(a, (jnp.arange(a.shape[dim]) + 1) % a.shape[dim], axis=dim),
    "itself": lambda a, dim: jnp.take(a, jnp.arange(a.shape[dim]), axis=dim),
    "twice each": lambda a, dim: jnp.take(a, jnp.arange(a.shape[dim]) // 2, axis=dim),
    "every other doubled": lambda a, dim: _front(lambda x: x.at[::2].multiply(2), a, dim),
    "a half doubled": lambda a, dim: _front(
        lambda x: x.at[jnp.arange(len(x) // 2)].multiply(2), a, dim
    ),
    "the next added": lambda a, dim: _front(
        lambda x: x.at[(jnp.arange(len(x)) + 1) % len(x)].add(x), a, dim
    ),
    "pairs added up": lambda a, dim: _front(
        lambda x: jax.ops.segment_sum(x, jnp.arange(len(x)) // 2, len(x)), a, dim
    ),
    "turned by a matrix": lambda a, dim: _front(
        lambda x: jnp.tensordot(jnp.roll(jnp.eye(len(x)), 1, 0), x, 1), a, dim
    ),
    "map": lambda a, dim: lax.map(jnp.sin, jnp.moveaxis(a, dim, 0)),
    "while of each": _halved_until_small,
    "of each by vmap": lambda a, dim: jax.vmap(lambda x: x / (1 + jnp.vdot(x, x)), dim, dim)(a),
    "to the front": lambda a, dim: jnp.moveaxis(a, dim, 0),
    "joined dims": lambda a, dim: a.reshape(-1, *a.shape[2:]),
    "parted dim": lambda a, dim: a.reshape(-1, 2, *a.shape[1:]),
    "in pairs": _in_pairs,
    "difference of pairs": lambda a, dim: jnp.diff(_in_pairs(a, dim), axis=dim + 1),
    "difference of halves": lambda a, dim: jnp.subtract(*jnp.split(a, 2, dim)),
    "by chunks": lambda a, dim: lax.map(
        lambda x: x - x.mean(dim), jnp.moveaxis(_in_pairs(a, dim), dim + 1, 0)
    ),
    "added up by chunks": _added_up_by_chunks,
    "log of shifted": _log_of_shifted,
    "places alone": lambda a, dim: jnp.arange(a.shape[dim]) / 3,
    "drawn alone": lambda a, dim: jax.random.normal(jax.random.key(2), (a.shape[dim], 1)),
    "triangle alone": lambda a, dim: jnp.tril(jnp.ones((a.shape[dim],) * 2)),
    "as often": lambda a, dim: _often(a.shape[dim], a),
    "half as often": lambda a, dim: _often(a.shape[dim] // 2, a),
    "cumprod": lambda a, dim: jnp.cumprod(jnp.tanh(a) + 0.5, dim),
    "histogram": lambda a, dim: jnp.histogram(a, 4)[0] * 1.0,
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
    "outer": lambda a, b: a[..., None] * b.reshape(-1)[:4],
    "solve": lambda a, b: jnp.linalg.solve(a @ a.T + jnp.eye(len(a)), b),
    "carried": lambda a, b: lax.scan(lambda c, x: (c + x, c * x), jnp.zeros_like(b[0]), a * b)[1],
    "chosen case": lambda a, b: lax.cond(jnp.sum(b) > 0, jnp.sin, jnp.cos, a),
    "dot": lambda a, b: jnp.vdot(a, b),
    "first of another": lambda a, b: a.at[0].set(b[0]),
    "at places": _at_places,
    "in turn": _in_turn,
    "case of each": lambda a, b: jax.vmap(
        lambda x, y: lax.cond(y > 0, jnp.sin, lambda x: x / 2, x)
    )(a, b),
    "of the same rows": lambda a, b: a * b.reshape(b.shape + (1,) * (a.ndim - b.ndim)),
    "mean of the masked": lambda a, b: (
        jnp.tensordot(b > 0, a, 1) / jnp.maximum(jnp.sum(b > 0), 1.0)
    ),
}
WITH_INTEGERS: Mapping[str, Callable] = {
    "taken": lambda a, i: a[i % a.shape[0]],
    "of the table": lambda a, i: a[i % 3],
    "along the last": lambda a, i: jnp.take_along_axis(a, i[..., None] % a.shape[-1], -1),
    "segment sum": lambda a, i: jax.ops.segment_sum(a, i % 4, 4),
    "masked": lambda a, i: jnp.where((i > 0)[..., None], a, 0),
    "added at": lambda a, i: jnp.zeros_like(a).at[i.reshape(-1)[: len(a)] % len(a)].add(a),
    "one hot": lambda a, i: a[..., None] * jax.nn.one_hot(i, 3)[..., None, :],
    "segment max": lambda a, i: jax.ops.segment_max(a, i % 4, 4)[i % 4],
    "sliced at": lambda a, i: lax.dynamic_slice_in_dim(a, i.reshape(-1)[0] % 2, 2),
    "by bins": lambda a, i: jnp.bincount(i.reshape(-1) % 4, length=4)[i % 4][..., None] * a,
    "times": lambda a, i: a * i,
    "changed at": lambda a, i: a.at[jnp.arange(len(a)), i.reshape(len(a), -1)[:, 0]].add(1),
    "as often as the largest": lambda a, i: lax.fori_loop(
        0, jnp.max(i) % 4, lambda _, x: jnp.sin(x), a
    ),
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
