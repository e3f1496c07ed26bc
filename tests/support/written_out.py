"""The kernels of ``flash_chunks.py`` and of documents in rows written out as matrix products: they store all scores."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar import documents
from jaxpar.documents import Documents
from jaxpar.models.transformer.flash_chunks import Kernel


def _written_out(
    q: Array, k: Array, v: Array, scale: float, lengths: tuple | None, bias: Array | None
) -> tuple:
    return _output(v, *_scores(q, k, scale, lengths, bias))


def _output(v: Array, scores: Array, seen: Array) -> tuple[Array, Array]:
    lse = jax.nn.logsumexp(scores, axis=-1, where=seen)
    out = jnp.einsum("bhgts,bshk->bthgk", _weights(scores, seen, lse), v)
    rows, seq, *_, head_dim = out.shape
    return out.reshape(rows, seq, -1, head_dim).astype(v.dtype), lse.reshape(rows, -1, seq)


def _written_out_gradients(*arrays_and_how: Any) -> tuple:
    *arrays, scale, lengths, bias = arrays_and_how
    return _gradients(*arrays, scale, *_scores(*arrays[:2], scale, lengths, bias))


def _gradients(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    ct: Array,
    scale: float,
    scores: Array,
    seen: Array,
) -> tuple[Array, Array, Array]:
    weights = _weights(scores, seen, lse.reshape(scores.shape[:4]))
    grouped_q, grouped_ct = (_grouped(each, k) for each in (q, ct))
    of_out = jnp.sum(grouped_ct * _grouped(out, k), axis=-1).transpose(0, 2, 3, 1)
    of_scores = (
        weights * (jnp.einsum("bthgk,bshk->bhgts", grouped_ct, v) - of_out[..., None]) * scale
    )
    dq = jnp.einsum("bhgts,bshk->bthgk", of_scores, k).reshape(q.shape)
    dk = jnp.einsum("bhgts,bthgk->bshk", of_scores, grouped_q)
    dv = jnp.einsum("bhgts,bthgk->bshk", weights, grouped_ct)
    return dq.astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


def _scores(
    q: Array, k: Array, scale: float, lengths: tuple | None, bias: Array | None
) -> tuple[Array, Array]:
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


def _in_documents(
    q: Array, k: Array, v: Array, scale: float, documents: Documents, window: int | None
) -> tuple:
    return _output(v, _scores(q, k, scale, None, None)[0], _seen(documents, window))


def _in_documents_gradients(*arrays_and_how: Any) -> tuple:
    *arrays, scale, documents, window = arrays_and_how
    scores, _ = _scores(*arrays[:2], scale, None, None)
    return _gradients(*arrays, scale, scores, _seen(documents, window))


def _seen(documents: Documents, window: int | None) -> Array:
    """Returns which keys each query sees, by where documents begin and how long they are."""
    rows, seq = documents.of_tokens.shape
    of_tokens = documents.of_tokens.reshape(-1)
    begins, lengths = (each.reshape(-1)[of_tokens].reshape(rows, seq, 1) for each in documents[:2])
    places = jnp.arange(rows * seq).reshape(rows, 1, seq)
    queries = places.reshape(rows, seq, 1)
    first = begins if window is None else jnp.maximum(begins, queries - window + 1)
    return ((places >= first) & (places <= queries) & (places < begins + lengths))[:, None, None]


IN_DOCUMENTS = documents.Kernel(_in_documents, _in_documents_gradients)
WRITTEN_OUT = Kernel(_written_out, _written_out_gradients, IN_DOCUMENTS)
