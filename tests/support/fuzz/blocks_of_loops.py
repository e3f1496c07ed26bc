"""Blocks of the fuzz test that run loops over ``h``, or have derivatives of their own."""

import operator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tests.support.fuzz.block import block_of_h


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
    steps = lambda a: jax.lax.while_loop(
        lambda s: s[0] > 0.1, lambda s: (s[0] / 2, s[1] + 1), (jnp.abs(a), 0)
    )[1]
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
    return changing_cotangent(
        lambda g: jax.lax.clamp(jnp.asarray(-(2**-7), g.dtype), g, jnp.asarray(2**-7, g.dtype))
    )(h)


@block_of_h()
def rounded_cotangent(p, h):
    return changing_cotangent(lambda g: jnp.round(g * 1e5) / 1e5)(h)


@block_of_h("v")
def stopped_customs(p, h, v):
    """Functions with derivatives of their own, none of which is needed."""
    customs = jax.nn.silu(jax.nn.relu(h)) + _softplus(h * p[v][None, None]) + reversal_of(h)
    return h * jnp.tanh(jax.lax.stop_gradient(customs))


@block_of_h(exact=True)
def named(p, h):
    return checkpoint_name(jnp.where(h > 0, h, -h), "kept")


@block_of_h(exact=True)
def barrier(p, h):
    return jax.lax.optimization_barrier(h)
