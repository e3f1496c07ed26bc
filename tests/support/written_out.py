"""The kernel of ``flash_chunks.py`` written out as matrix products, for devices without cuDNN: it stores all scores."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.models.transformer.flash_chunks import Kernel


def _written_out(q: Array, k: Array, v: Array, scale: float, lengths: tuple | None, bias: Array | None) -> tuple:
    scores, seen = _scores(q, k, scale, lengths, bias)
    lse = jax.nn.logsumexp(scores, axis=-1, where=seen)
    out = jnp.einsum("bhgts,bshk->bthgk", _weights(scores, seen, lse), v)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(len(q), -1, q.shape[1])


def _written_out_gradients(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    ct: Array,
    scale: float,
    lengths: tuple | None,
    bias: Array | None,
) -> tuple:
    scores, seen = _scores(q, k, scale, lengths, bias)
    weights = _weights(scores, seen, lse.reshape(scores.shape[:4]))
    grouped_q, grouped_ct = (_grouped(each, k) for each in (q, ct))
    of_out = jnp.sum(grouped_ct * _grouped(out, k), axis=-1).transpose(0, 2, 3, 1)
    of_scores = weights * (jnp.einsum("bthgk,bshk->bhgts", grouped_ct, v) - of_out[..., None]) * scale
    dq = jnp.einsum("bhgts,bshk->bthgk", of_scores, k).reshape(q.shape)
    dk = jnp.einsum("bhgts,bthgk->bshk", of_scores, grouped_q)
    dv = jnp.einsum("bhgts,bthgk->bshk", weights, grouped_ct)
    return dq.astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


def _scores(q: Array, k: Array, scale: float, lengths: tuple | None, bias: Array | None) -> tuple[Array, Array]:
    """Returns the scores ``[rows, kv_heads, heads of each, seq, keys]``, and which of the keys a query sees."""
    scores = jnp.einsum("bthgk,bshk->bhgts", _grouped(q, k), k) * scale
    scores = scores if bias is None else scores + bias[:, :, None]
    queries, keys = jnp.arange(q.shape[1])[None, :, None], jnp.arange(k.shape[1])[None, None]
    if lengths is None:
        return scores, (keys <= queries)[:, None, None]
    num_queries, num_keys = (each[:, None, None] for each in lengths)
    return scores, ((queries < num_queries) & (keys < num_keys))[:, None, None]


def _weights(scores: Array, seen: Array, lse: Array) -> Array:
    return jnp.exp(jnp.where(seen, scores - lse[..., None], -jnp.inf))


def _grouped(array: Array, k: Array) -> Array:
    """Returns an array by query head with a dim for the head of keys, and in float32 at least."""
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return wide.reshape(*array.shape[:2], k.shape[2], -1, array.shape[3])


WRITTEN_OUT = Kernel(_written_out, _written_out_gradients)
