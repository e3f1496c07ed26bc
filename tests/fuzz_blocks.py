"""What the layers of the fuzz test are made of: blocks, each a small function of params and of what travels.

A layer is a tuple of nodes, and a node is a block's name with its arguments: names of params, small integers, and tuples of
nodes again. So a layer is a value that can be printed, read back, and made smaller:

    (("norm", "v0"), ("scan", 2, (("matmul", "w0"), ("tanh",))))

A block works on each row by itself, so that no number depends on how rows are cut. ``h`` is ``[rows, T, D]``.
"""

import operator
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

T, D, TABLE, EXPERTS = 4, 8, 6, 2
SHAPES = {"w": (D, D), "v": (D,), "s": (), "t": (TABLE, D), "k": (3, D, D), "e": (EXPERTS, D, D)}
LOW_DTYPES = ("float32", "bfloat16", "float16")
POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "weights": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("kept"),
}


@dataclass(frozen=True)
class Block:
    """A block.

    Attributes:
        run: ``(p, x, *args) -> x``.
        args: What its arguments are, a letter each: a key of SHAPES for a param, n an integer, P a policy, L a smaller dtype,
            B a body.
        is_exact: Whether small integers stay small integers, forward and back, so that every dtype gives the same numbers.
        needs: Which leaves of x it reads beside ``h``.
    """

    run: Callable
    args: str
    is_exact: bool
    needs: tuple[str, ...]


BLOCKS: dict[str, Block] = {}


def block(args="", *, exact=False, needs=()):
    """Adds a block, which goes by the name of its function."""

    def add(function):
        BLOCKS[function.__name__.strip("_")] = Block(function, args, exact, tuple(needs))
        return function

    return add


def block_of_h(args="", *, exact=False):
    """Adds a block that changes ``h`` alone, and keeps its dtype."""

    def add(function):
        run = lambda p, x, *rest: x | {"h": function(p, x["h"], *rest).astype(x["h"].dtype)}
        BLOCKS[function.__name__.strip("_")] = Block(run, args, exact, ())
        return function

    return add


def run(nodes, p, x):
    """What a layer of these nodes makes of x, a dict."""
    for name, *args in nodes:
        x = BLOCKS[name].run(p, x, *args)
    return x


def walk(nodes):
    """Every node, those inside bodies too."""
    for node in nodes:
        yield node
        for arg in node[1:]:
            if isinstance(arg, tuple):
                yield from walk(arg)


def params_of(nodes):
    """The names of all params that nodes read."""
    names = set()
    for name, *args in walk(nodes):
        names |= {arg for letter, arg in zip(BLOCKS[name].args, args, strict=True) if letter in SHAPES}
    return names


def needs_of(nodes):
    return {leaf for name, *_ in walk(nodes) for leaf in BLOCKS[name].needs}


def seed_of(*parts):
    return zlib.crc32(repr(parts).encode())


def draw_param(seed, path, shape, *, exact):
    """A param on the host in float64; in exact cases of -1, 0 and 1, a matrix with one of them a column."""
    rng = np.random.default_rng(seed_of(seed, path))
    if not exact:
        return 0.5 * rng.normal(size=shape) + (0.5 if len(shape) < 2 else 0)
    signs = rng.choice([-1.0, 1.0], size=shape)
    if len(shape) < 2:
        return signs
    rows = rng.integers(0, shape[-2], size=(*shape[:-2], 1, shape[-1]))
    is_on = np.arange(shape[-2]).reshape(-1, 1) == rows
    if len(shape) == 3:  # a kernel has one tap
        is_on &= (np.arange(shape[0]) == rng.integers(shape[0])).reshape(-1, 1, 1) | (shape[0] == EXPERTS)
    return signs * is_on


# --- blocks of h ----------------------------------------------------------------------------------------------------


@block_of_h("w", exact=True)
def matmul(p, h, w):
    return h @ p[w]


@block_of_h("v", exact=True)
def bias(p, h, v):
    return h + p[v][None, None]


@block_of_h("v", exact=True)
def scale(p, h, v):
    return h * p[v][None, None]


@block_of_h("s", exact=True)
def one_number(p, h, s):
    return h * p[s]


@block_of_h()
def tanh(p, h):
    return jnp.tanh(h)


@block_of_h()
def sin(p, h):
    return jnp.sin(h)


@block_of_h(exact=True)
def relu(p, h):
    return jnp.where(h > 0, h, 0)


@block_of_h()
def gelu(p, h):
    return jax.nn.gelu(h)


@block_of_h("w", exact=True)
def transposed(p, h, w):
    return jnp.einsum("btd,ed->bte", h, p[w])


@block_of_h("ww")
def gate(p, h, w, g):
    return jax.nn.silu(h @ p[g]) * jnp.tanh(h @ p[w])


@block_of_h("v", exact=True)
def only_params(p, h, v):
    return jnp.broadcast_to(p[v][None, None], h.shape)


@block_of_h("w", exact=True)
def read_thrice(p, h, w):
    return (h @ p[w]) @ p[w].T + p[w][:1][None]


@block_of_h("v")
def norm(p, h, v):
    centred = h - h.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 0.1) * p[v][None, None]


@block_of_h("v")
def rms(p, h, v):
    return h / jnp.sqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 0.1) * p[v][None, None]


@block_of_h()
def softmax(p, h):
    return h + jax.nn.softmax(h, axis=1)


@block_of_h()
def logsumexp(p, h):
    return h - jax.nn.logsumexp(h, axis=-1, keepdims=True)


@block_of_h("www")
def heads(p, h, q, k, v):
    split = lambda w: (h @ p[w]).reshape(*h.shape[:2], 2, D // 2)
    scores = jnp.einsum("bthc,bshc->bhts", split(q), split(k))
    before = jnp.tril(jnp.ones((T, T), bool))[None, None]
    scores = jax.nn.softmax(scores, axis=-1, where=before)
    return h + jnp.einsum("bhts,bshc->bthc", scores, split(v)).reshape(h.shape)


@block_of_h("k", exact=True)
def conv(p, h, k):
    return jax.lax.conv_general_dilated(h, p[k].astype(h.dtype), (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC"))


@block_of_h("k", exact=True)
def depthwise_conv(p, h, k):
    kernel = p[k][:, :1].astype(h.dtype)
    dims = ("NTC", "TIO", "NTC")
    return jax.lax.conv_general_dilated(h, kernel, (1,), ((2, 0),), dimension_numbers=dims, feature_group_count=D)


@block_of_h("v")
def fft(p, h, v):
    return jnp.fft.ifft(jnp.fft.fft(h, axis=1) * jnp.exp(1j * p[v])[None, None], axis=1).real


@block_of_h("v")
def rfft(p, h, v):
    return jnp.fft.irfft(jnp.fft.rfft(h, axis=2) * p[v][None, None, : D // 2 + 1], n=D, axis=2)


@block_of_h("v", exact=True)
def sort(p, h, v):
    return jnp.sort(h * p[v][None, None], axis=1)


@block_of_h("v", exact=True)
def argsort(p, h, v):
    return h + jnp.take_along_axis(h * p[v][None, None], jnp.argsort(h, axis=2), axis=2)


@block_of_h("v")
def sort_pairs(p, h, v):
    """Sorts one array by another."""
    return sum(jax.lax.sort((h, h * p[v][None, None]), dimension=1, num_keys=1))


@block_of_h(exact=True)
def cumsum(p, h):
    return jnp.cumsum(h, axis=1) - h.sum(axis=1, keepdims=True)


@block_of_h("v")
def cummax(p, h, v):
    return jax.lax.cummax(h * p[v][None, None], axis=2) + jax.lax.cumlogsumexp(h, axis=1)


@block_of_h(exact=True)
def flip(p, h):
    return jnp.concatenate([h[:, ::-1, 1:], h[..., :1]], axis=-1)


@block_of_h("v", exact=True)
def pad(p, h, v):
    return jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1] + p[v][None, None]


@block_of_h("we")
def experts(p, h, w, e):
    weight, chosen = jax.lax.top_k(jax.nn.softmax(h @ p[w][:, :EXPERTS]), 1)
    return jnp.einsum("btc,btcde,btd->bte", weight, p[e][chosen], h)


@block_of_h("v", exact=True)
def pool(p, h, v):
    return h + jax.lax.reduce_window(h * p[v][None, None], -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "SAME")


@block_of_h("v", exact=True)
def update_slice(p, h, v):
    return jax.lax.dynamic_update_slice(h, (h[:, 1:2] * p[v][None, None]).astype(h.dtype), (0, 2, 0))


@block_of_h("ww")
def factored(p, h, a, b):
    """A weight that is made from others at some cost."""
    return h @ jnp.sin(p[a] @ p[b])


@block_of_h("w")
def normed_weight(p, h, w):
    return h @ (p[w] / jnp.linalg.norm(p[w]))


@block_of_h("w")
def solve(p, h, w):
    return jnp.linalg.solve(p[w] + 4 * jnp.eye(D), h.reshape(-1, D).T).T.reshape(h.shape)


@block_of_h("w")
def cholesky(p, h, w):
    return jnp.einsum(
        "btd,de->bte", h, jnp.linalg.cholesky(p[w] @ p[w].T + jnp.eye(D)), precision=("highest", "default")
    )


@block_of_h("w")
def gradient_step(p, h, w):
    """A layer that differentiates."""
    return h - 0.3 * jax.grad(lambda h: jnp.sum(jnp.sin(h @ p[w])))(h)


@block_of_h("w", exact=True)
def forward_mode(p, h, w):
    return sum(jax.jvp(lambda h: jnp.where(h > 0, h, 0) @ p[w], (h,), (h[:, ::-1],)))


@block_of_h("w")
def stopped(p, h, w):
    return h * jax.lax.stop_gradient(jax.nn.sigmoid(h @ p[w]))


@block_of_h(exact=True)
def integers(p, h):
    return h + (h > 0).astype(jnp.int32) * h.astype(jnp.int8)


@block_of_h("wL")
def quantised(p, h, w, dtype):
    """Small integers in a small dtype, where every order of operations gives the same; no gradient passes."""
    whole = lambda a: jnp.round(2 * jnp.tanh(a)).astype(dtype)
    return h * (1 + 0.1 * (whole(h) @ whole(p[w])).astype(h.dtype))


@block_of_h(exact=True)
def constants(p, h):
    return h[:, ::-1] * np.array([1.0, -1.0, 1.0, 2.0] * 2)[None, None] + jnp.arange(T)[None, :, None]


@block_of_h("w", exact=True)
def recurrence(p, h, w):
    step = lambda carry, row: ((jnp.clip(carry @ p[w], -1, 1) + row).astype(h.dtype),) * 2
    over_time = jax.lax.scan(step, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1), reverse=True)[1]
    return over_time.swapaxes(0, 1)


@block_of_h("vw")
def associative(p, h, v, w):
    decay = jax.nn.sigmoid(h @ p[w]) * p[v][None, None]
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
    return jax.lax.associative_scan(combine, (decay, h), axis=1)[1]


@block_of_h("wwn", exact=True)
def scan_over_params(p, h, a, b, unroll):
    step = lambda h, w: ((jnp.where(h > 0, h, 0) @ w).astype(h.dtype), None)
    return jax.lax.scan(step, h, jnp.stack([p[a], p[b], p[a]]), unroll=unroll)[0]


@block_of_h()
def halvings(p, h):
    """A while loop, each element its own number of trips; its result carries no gradient."""
    steps = lambda a: jax.lax.while_loop(lambda s: s[0] > 0.1, lambda s: (s[0] / 2, s[1] + 1), (jnp.abs(a), 0))[1]
    return h * (1 + 0.1 * jax.vmap(steps)(jax.lax.stop_gradient(h).reshape(-1)).reshape(h.shape))


@jax.custom_jvp
def _softplus(x):
    return jnp.log1p(jnp.exp(x))


@_softplus.defjvp
def _(primals, tangents):
    return _softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]


@block_of_h("v")
def custom_jvp(p, h, v):
    return _softplus(h * p[v][None, None])


@jax.custom_vjp
def _doubled_matmul(x, w):
    return x @ w * 2


_doubled_matmul.defvjp(
    lambda x, w: (_doubled_matmul(x, w), (x, w)),
    lambda kept, g: (
        (g @ kept[1].T * 2).astype(kept[0].dtype),
        jnp.einsum("btd,bte->de", kept[0], g * 2).astype(kept[1].dtype),
    ),
)


@block_of_h("w", exact=True)
def custom_vjp(p, h, w):
    return _doubled_matmul(h, p[w])


def changing_cotangent(change):
    """The identity, whose cotangent is changed on its way back."""
    identity = jax.custom_vjp(lambda h: h)
    identity.defvjp(lambda h: (h, None), lambda _, g: (change(g),))
    return identity


reversal_of = changing_cotangent(operator.neg)


@block_of_h(exact=True)
def reversal(p, h):
    return reversal_of(h)


@block_of_h(exact=True)
def clipped_cotangent(p, h):
    return changing_cotangent(lambda g: jax.lax.clamp(jnp.asarray(-(2**-7), g.dtype), g, jnp.asarray(2**-7, g.dtype)))(
        h
    )


@block_of_h()
def rounded_cotangent(p, h):
    return changing_cotangent(lambda g: jnp.round(g * 1e5) / 1e5)(h)


@block_of_h("v")
def stopped_customs(p, h, v):
    """Functions with derivatives of their own, none of which is asked for."""
    customs = jax.nn.silu(jax.nn.relu(h)) + _softplus(h * p[v][None, None]) + reversal_of(h)
    return h * jnp.tanh(jax.lax.stop_gradient(customs))


@block_of_h(exact=True)
def named(p, h):
    return checkpoint_name(jnp.where(h > 0, h, -h), "kept")


@block_of_h(exact=True)
def barrier(p, h):
    return jax.lax.optimization_barrier(h)
