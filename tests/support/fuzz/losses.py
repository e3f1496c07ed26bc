"""Losses of the fuzz test, as others write them: of each row a number, from outputs and targets ``[rows, T, ...]``."""

import jax
import jax.numpy as jnp


def huber(out, y, target):
    error = jnp.abs(out - y)
    return jnp.where(error < 1, error**2 / 2, error - 0.5).mean((1, 2))


def smoothed(out, y, target):
    """Cross-entropy with label smoothing, and the square of the logarithm of its normalizer."""
    log_p = jax.nn.log_softmax(out)
    right = jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
    z = jax.nn.logsumexp(out, axis=-1)
    return jnp.sum(-0.9 * right - 0.1 * log_p.mean(-1) + 1e-2 * z**2, axis=1)


def focal(out, y, target):
    p = jnp.sum(jax.nn.softmax(out) * jax.nn.one_hot(target, out.shape[-1]), axis=-1)
    return -jnp.sum((1 - p) ** 2 * jnp.log(p + 1e-9), axis=1)


def hinge(out, y, target):
    right = jnp.take_along_axis(out, target[..., None], axis=-1)
    margins = jnp.maximum(0, 1 + out - right) - jax.nn.one_hot(target, out.shape[-1])
    return margins.max(-1).sum(1)


def preference(out, y, target):
    """The first half of a row is preferred to the second."""
    scores = (out * y).sum(-1)
    first, second = scores.reshape(len(out), 2, -1).sum(-1).T
    return -jax.nn.log_sigmoid(0.3 * (first - second))


def contrastive(out, y, target):
    """Each position is told from the others of its row."""
    scores = jnp.einsum("btd,bsd->bts", out, y)
    return -jnp.trace(jax.nn.log_softmax(scores), axis1=1, axis2=2)


def poisson(out, y, target):
    return jnp.sum(jnp.exp(jnp.minimum(out, 3)) - y**2 * out, axis=(1, 2))


LOSSES = {f.__name__: f for f in (huber, smoothed, focal, hinge, preference, contrastive, poisson)}
