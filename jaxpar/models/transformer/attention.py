"""Causal self-attention: a projection to queries, keys and values, positions, the softmax, and an output projection.

    x [b, t, d] --w_qkv--> q [b, t, heads, head_dim], k and v [b, s, kv_heads, head_dim] --softmax--> --w_out--> [b, t, d]

With a cache, the keys and values of earlier positions are read from it, and those of x are added to it. A row may hold several
documents, its segments: no position attends to another segment, and positions begin anew in each. Where a mesh splits sequences
over ``context``, keys and values are gathered, or heads exchanged for positions (``context_parallel.py``).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar import context_parallel
from jaxpar.context_parallel import gather_sequence, heads_to_sequence, sequence_to_heads
from jaxpar.documents import Documents, attend_in_documents, find_documents
from jaxpar.documents import Kernel as KernelOfDocuments
from jaxpar.fields import arg
from jaxpar.models.lora import Adapted
from jaxpar.models.transformer import rope
from jaxpar.models.transformer.alibi import alibi_bias, own_slopes
from jaxpar.models.transformer.cache import Cache
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.flash_chunks import (
    CUDNN,
    Kernel,
    as_rows,
    chunked_causal_attention,
    scale_of,
)
from jaxpar.models.transformer.norms import rms_norm, scaled
from jaxpar.models.transformer.products import product
from jaxpar.models.transformer.span import Span

Constrain = Callable[[jax.Array, str], jax.Array]
# The positions of a cache whose keys a sum reads once for each query head of a group, a product once.
MOST_SUMMED = 4096


def unconstrained(x: jax.Array, where: str) -> jax.Array:
    """Returns ``x``: no constraint on its sharding."""
    del where
    return x


def documents_of(
    config: TransformerConfig, segments: Int[Array, "batch seq"] | None
) -> Documents | None:
    """Returns where the documents of rows lie, if the model's kernel takes them so; over ``context`` of each chunk as a row."""
    if segments is None or config.max_documents is None or _kernel_of_documents(config) is None:
        return None
    in_rows = segments if context_parallel.num_parts() == 1 else as_rows(segments)
    return find_documents(in_rows, config.max_documents)


def _kernel_of_documents(config: TransformerConfig) -> KernelOfDocuments | None:
    """The kernel for rows of several documents that belongs to a model's attention, if the devices here have one.

    It takes no penalties, and is not partitioned, so all axes must be manual where it is called.
    """
    if config.max_documents is None or config.positions == "alibi" or config.attention == "xla":
        return None
    own = (
        CUDNN.of_documents
        if config.attention == "cudnn"
        else getattr(config.attention, "kernel_of_documents", None)
    )
    mesh = jax.sharding.get_abstract_mesh()
    return own if own and mesh.manual_axes and own.runs(config.compute_dtype) else None


def attention(
    config: TransformerConfig,
    params: PyTree,
    x: Float[Array, "batch seq embed"],
    span: Span,
    cache: Cache | None = None,
    constrain: Constrain = unconstrained,
) -> tuple[Float[Array, "batch seq embed"], Cache | None]:
    """Returns the attention of each position to itself and earlier ones, and the cache with the keys and values of ``x``.

    Args:
        config: The model.
        params: The params under ``attention`` of a layer.
        x: The normalized input.
        span: The positions of its tokens.
        cache: Keys and values of earlier positions.
        constrain: Constrains the sharding of copied heads.
    """
    q, k, v = project(config, params, x, constrain)
    if config.positions == "rope":
        turns = rope.frequencies(config.head_dim, config.rope, span.lengths)
        scale = 1.0 if config.rope.scaling is None else config.rope.scaling.attention_factor
        q, k = (rope.rotate(each, span.positions, turns, scale) for each in (q, k))
    if config.attention_multiplier is not None:
        q = scaled(q, config.attention_multiplier / scale_of(q))
    if cache is not None:
        cache = cache.write(k, v, span)
        config = replace(config, attention="xla")
    if context_parallel.num_parts() > 1:
        mixed = _attend_over_context(config, q, k, v, span.segments, span.documents)
    elif not span.is_in_order:
        mixed = attend(config, q, k, v, span.positions, span.segments, places=span.positions)
    elif cache is not None and not span.is_start:
        mixed = _attend_to_cache(config, q, cache, span.positions)
    else:
        in_rows = span.positions if span.segments is None else jnp.arange(x.shape[1])[None]
        mixed = attend(config, q, k, v, in_rows, span.segments, documents=span.documents)
    out = product(config, "bthk,hkd->btd", mixed, params["w_out"].astype(x.dtype))
    return _plus(out, params.get("b_out")), cache


def project(
    config: TransformerConfig,
    params: PyTree,
    x: Float[Array, "batch seq embed"],
    constrain: Constrain = unconstrained,
) -> tuple[Array, Array, Array]:
    """Returns queries ``[batch, seq, heads, head_dim]``, and keys and values ``[batch, seq, kv_heads, head_dim]``.

    With ``kv_copies`` there are that many of each key and value head, each for a part of its group of query heads.
    """
    w_qkv, b_qkv = (
        _copied(config, params.get(name), x.dtype, constrain) for name in ("w_qkv", "b_qkv")
    )
    qkv = _plus(product(config, "btd,dhgk->bthgk", x, w_qkv), b_qkv)
    q, k, v = jnp.split(qkv, (qkv.shape[3] - 2, qkv.shape[3] - 1), axis=3)
    q, k, v = (
        q.reshape(*x.shape[:2], config.num_heads, config.head_dim),
        k[:, :, :, 0],
        v[:, :, :, 0],
    )
    if config.qk_norm is not None:
        of_k = params["norm_k"]["scale"]
        of_k = (
            jnp.repeat(of_k, config.kv_copies, 0)
            if config.qk_norm == "width" and config.kv_copies > 1
            else of_k
        )
        q, k = (
            rms_norm(q, params["norm_q"]["scale"], config.norm_epsilon),
            rms_norm(k, of_k, config.norm_epsilon),
        )
    return q, k, v


def _copied(
    config: TransformerConfig, param: PyTree, dtype: jnp.dtype, constrain: Constrain
) -> PyTree:
    """Returns ``[..., kv_heads, qkv, head_dim]`` with copies of keys and values, each with its part of the query heads."""
    if param is None or config.kv_copies == 1:
        return None if param is None else param.astype(dtype)
    if isinstance(param, Adapted):
        return param.astype(dtype).map_out(lambda part: _copied(config, part, dtype, constrain))
    param, copies, group = param.astype(dtype), config.kv_copies, config.group_size
    *before, kv_heads, _, head_dim = param.shape
    queries = param[..., :group, :].reshape(*before, kv_heads * copies, group // copies, head_dim)
    keys_and_values = jnp.repeat(param[..., group:, :], copies, axis=-3)
    return constrain(jnp.concatenate([queries, keys_and_values], axis=-2), "kv_heads")


def _plus(x: Array, bias: PyTree) -> Array:
    return x if bias is None else x + bias.astype(x.dtype)[None, None]


def _attend_over_context(
    config: TransformerConfig,
    q: Array,
    k: Array,
    v: Array,
    segments: Int[Array, "batch seq"] | None,
    documents: Documents | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns what ``attend`` does, where a device has the queries, keys and values of its part of each sequence."""
    parts = context_parallel.num_parts()
    segments_of_all = None if segments is None else gather_sequence(segments)
    if over_context(config, parts, segments) == "ulysses":
        copies = parts // math.gcd(
            parts, k.shape[2] // context_parallel.num_shards_of_heads(k.shape[2])
        )
        k, v = (each if copies == 1 else jnp.repeat(each, copies, 2) for each in (k, v))
        q, k, v = (sequence_to_heads(each) for each in (q, k, v))
        slopes = own_slopes(config, parts) if config.positions == "alibi" else None
        places = jnp.arange(q.shape[1])[None]
        most = None if documents is None else config.max_documents
        in_rows = (
            None
            if segments_of_all is None or most is None
            else find_documents(segments_of_all, most)
        )
        return heads_to_sequence(
            attend(config, q, k, v, places, segments_of_all, slopes=slopes, documents=in_rows)
        )
    own = jnp.concatenate([k, v], axis=3)  # one collective, and one array to store
    half = lambda both, at: jax.lax.slice_in_dim(
        both, at * k.shape[3], (at + 1) * k.shape[3], axis=3
    )
    own, whole = ((half(both, 0), half(both, 1)) for both in (own, gather_sequence(own)))
    kernel = _kernel_of_chunks(config, q.dtype)
    if kernel is None:
        places = context_parallel.places(q.shape[1])[None]
        return attend(config, q, whole[0], whole[1], places, segments, of_keys=segments_of_all)

    def on_shard(
        q: Array, k: Array, v: Array, all_k: Array, all_v: Array, *numbers: Array
    ) -> Array:
        at = jax.lax.axis_index(context_parallel.CONTEXT), parts
        how = {"chunk_of_context": at, "kernel": kernel}
        if numbers:
            how |= {
                "segments": numbers[:2],
                "documents": Documents(*numbers[2:]) if numbers[2:] else None,
            }
        return chunked_causal_attention(q, (k, v), (all_k, all_v), **how)

    numbers = (
        ()
        if segments is None or segments_of_all is None
        else (segments, segments_of_all, *(documents or ()))
    )
    return context_parallel.on_shards_of_heads(on_shard, q, *own, *whole, *numbers)


def _kernel_of_chunks(config: TransformerConfig, dtype: jnp.dtype) -> Kernel | None:
    """The kernel for gathered keys and values that belongs to a model's attention, if there is one.

    It takes all keys of a document up to a query alike, without a window or penalties.
    """
    if (
        dtype == jnp.float64
        or config.attention == "xla"
        or config.window is not None
        or config.positions == "alibi"
    ):
        return None
    if config.attention == "cudnn":
        return CUDNN
    own = getattr(config.attention, "kernel_of_chunks", None)
    return (
        None
        if own is None
        else Kernel(own[0], own[1], getattr(config.attention, "kernel_of_documents", None))
    )


def over_context(
    config: TransformerConfig, parts: int, segments: Any = None
) -> Literal["gather", "ulysses"]:
    """Returns how attention exchanges keys and values where ``parts`` devices share a sequence: as asked, or by bytes.

    Args:
        config: The model.
        parts: The size of the ``context`` axis.
        segments: Those of the rows, if they have any.

    Raises:
        ValueError: The axis does not divide the heads that are to be exchanged.
    """
    shards = context_parallel.num_shards_of_heads(config.kv_heads * config.kv_copies)
    heads, kv_heads = config.num_heads // shards, config.kv_heads * config.kv_copies // shards
    copies = parts // math.gcd(parts, kv_heads)
    fits = heads % parts == 0 and heads // kv_heads % copies == 0
    fits = fits and shards == context_parallel.num_shards_of_heads(config.num_heads)
    if config.attention_over_context == "ulysses" and not fits:
        raise ValueError(
            "the context axis must divide the heads of a device, and the copies of each key and value head its query heads, to "
            f"exchange them; got {arg(context=parts)}, {heads} heads and {kv_heads} key and value heads on a device. Use "
            'attention_over_context="gather", or a context that divides them.'
        )
    if config.attention_over_context is not None:
        return config.attention_over_context
    # Per position a gather moves keys and values 3 times, and Ulysses queries, keys, values and outputs twice.
    moves_less = 3 * parts * kv_heads < 2 * (heads + kv_heads * copies)
    has_kernel = _kernel_of_chunks(config, jnp.dtype(config.compute_dtype)) is not None
    # A kernel of whole rows takes documents by a bias of all pairs.
    if not fits or (has_kernel and segments is not None):
        return "gather"
    return "gather" if moves_less and (has_kernel or config.attention == "xla") else "ulysses"


def attend(
    config: TransformerConfig,
    q: Array,
    k: Array,
    v: Array,
    positions: Int[Array, "rows seq"],
    segments: Int[Array, "batch seq"] | None = None,
    *,
    places: Int[Array, "rows length"] | None = None,
    of_keys: Int[Array, "batch length"] | None = None,
    slopes: Float[Array, " heads"] | None = None,
    documents: Documents | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns for each query the mean of the values up to its position, weighted by the softmax of its scores.

    Args:
        config: The model.
        q: Queries ``[batch, seq, heads, head_dim]``.
        k: Keys ``[batch, length, kv_heads, head_dim]``; those after the last query are masked.
        v: Values, likewise.
        positions: The positions of the queries in their rows.
        segments: The segment of each query; keys of other segments are masked.
        places: The positions of the keys in their rows; None: from 0.
        of_keys: The segment of each key; None: keys are of the same tokens as queries.
        slopes: The penalties of the heads; None: those of all heads (``alibi_slopes``).
        documents: Where the segments lie (``documents_of``).
    """
    in_order = jnp.arange(k.shape[1])[None] if places is None else places
    ahead = in_order[:, None, :] - positions[:, :, None]
    bias = alibi_bias(config, ahead, q.dtype, slopes) if config.positions == "alibi" else None
    # Without a cache: with is_causal a flash kernel skips later positions.
    is_whole = q.shape[1] == k.shape[1] and places is None
    window = None if config.window is None or config.window >= k.shape[1] else config.window
    if is_whole and documents is not None and (own := _kernel_of_documents(config)):
        return _attend_in_documents(own, window, documents, q, k, v)
    kernel = config.attention if is_whole and q.dtype != jnp.float64 else "xla"
    of_keys = segments if of_keys is None else of_keys
    together = (
        None
        if segments is None or of_keys is None
        else (segments[:, :, None] == of_keys[:, None, :])[:, None]
    )
    if callable(kernel):
        bias = bias if together is None else _masked(bias, together, q.dtype)
        return kernel(q, k, v, bias) if window is None else kernel(q, k, v, bias, window=window)
    if kernel == "cudnn":
        _check_can_be_split()
        sides = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, bias, together, is_causal=True, local_window_size=sides, implementation="cudnn"
        )
    seen = _seen(config, ahead)[:, None]
    return _written_out(q, k, v, bias, seen if together is None else seen & together)


def _attend_in_documents(
    kernel: KernelOfDocuments, window: int | None, documents: Documents, *arrays: Array
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns the attention of rows whose documents the kernel is told, from each shard of the heads."""

    def on_shard(q: Array, k: Array, v: Array, *places: Array) -> Array:
        return attend_in_documents(kernel, scale_of(q), window, q, k, v, Documents(*places))

    return context_parallel.on_shards_of_heads(on_shard, *arrays, *documents)


def _masked(bias: Array | None, seen: Bool[Array, "batch 1 seq seq"], dtype: jnp.dtype) -> Array:
    """Returns a bias that is so low where ``seen`` is false that the softmax gives 0, and no sum with a score overflows."""
    lowest = jnp.asarray(jnp.finfo(dtype).min / 2, dtype)
    return jnp.where(
        seen, jnp.zeros((1, 1, 1, 1), dtype) if bias is None else bias.astype(dtype), lowest
    )


def _check_can_be_split() -> None:
    """Raises if XLA would have to partition cuDNN's kernel, which it cannot: some axes manual, others not."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and mesh.manual_axes and mesh.auto_axes:
        raise ValueError(
            'attention="cudnn" runs on one device, or where no axis is manual; got a mesh of '
            f"{dict(mesh.shape)}. Use attention=jaxpar.flash_attention, which is the same kernel on any mesh."
        )


def _attend_to_cache(
    config: TransformerConfig,
    q: Float[Array, "rows 1 heads head_dim"],
    cache: Cache,
    positions: Int[Array, "rows 1"],
) -> Float[Array, "rows 1 heads head_dim"]:
    """Returns what ``attend`` does, of one position a row and the keys and values of a cache.

    Of a row of the cache there may be several copies, which attend as several queries.
    """
    k, v = cache.read()
    length = k.shape[2]
    of_rows = q.reshape(len(k), -1, *q.shape[2:])
    copies = of_rows.shape[1]
    # Copies are made for GPUs alone (``advance.py``), and so are the kernels of which sums are fewer.
    is_summed = len(k) == 1 and copies > 1 and length <= MOST_SUMMED
    if is_summed:
        of_rows, positions = of_rows[:, :1], positions[:1]
    places = jnp.arange(length)[None, None]
    ahead = places - positions.reshape(len(k), -1, 1)
    seen = _seen(config, ahead)[:, None]
    bias = None
    if config.positions == "alibi":
        bias = alibi_bias(config, ahead, q.dtype, None)
    if is_summed:
        mixed = _sums(of_rows, k[0], v[0], bias, seen)
        return jnp.repeat(mixed, copies, axis=0)
    return _products(of_rows, k, v, bias, seen).reshape(q.shape)


def _seen(
    config: TransformerConfig, ahead: Int[Array, "rows seq length"]
) -> Bool[Array, "rows seq length"]:
    """Returns which keys a query sees, of those that are so many positions ``ahead`` of it."""
    is_past, window = ahead <= 0, config.window
    return is_past if window is None or window >= ahead.shape[-1] else is_past & (ahead > -window)


def _written_out(
    q: Array, k: Array, v: Array, bias: Array | None, seen: Bool[Array, "rows 1 seq length"]
) -> Array:
    """Attention as matrix products, with scores and softmax in float32 at least."""
    k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
    return _products(q, k, v, bias, seen)


def _products(
    q: Array, k: Array, v: Array, bias: Array | None, seen: Bool[Array, "rows 1 seq length"]
) -> Array:
    """Attention to keys and values ``[batch, kv_heads, length, head_dim]``.

    Rows and heads are the leading dims of each array that a product reads, as matrix libraries require. Otherwise XLA would, in
    a pipeline on GPUs, transpose all stored microbatches in each tick instead of one layer of one of them.
    """
    batch, seq, num_heads, head_dim = q.shape
    grouped = q.reshape(batch, seq, k.shape[1], -1, head_dim).transpose(0, 2, 3, 1, 4)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale_of(q) * jnp.einsum("bhgtk,bhsk->bhgts", grouped, k, preferred_element_type=wide)
    if bias is not None:
        scores = scores + bias.reshape(len(bias), *scores.shape[1:3], *bias.shape[2:]).astype(wide)
    weights = jax.nn.softmax(
        jnp.where(seen[:, :, None], scores, jnp.finfo(wide).min), axis=-1
    ).astype(v.dtype)
    mixed = jnp.einsum("bhgts,bhsk->bhgtk", weights, v)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, seq, num_heads, head_dim)


def _sums(
    q: Float[Array, "1 1 heads head_dim"],
    k: Float[Array, "kv_heads length head_dim"],
    v: Float[Array, "kv_heads length head_dim"],
    bias: Array | None,
    seen: Bool[Array, "1 1 1 length"],
) -> Float[Array, "1 1 heads head_dim"]:
    """Returns what ``_products`` does, for one query.

    XLA makes two kernels of these sums, the second with the softmax, and of products five.
    """
    kv_heads, length, head_dim = k.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(kv_heads, -1, 1, head_dim).astype(wide)
    scores = scale_of(q) * jnp.sum(grouped * k[:, None].astype(wide), axis=-1)
    if bias is not None:
        scores = scores + bias.reshape(kv_heads, -1, length).astype(wide)
    scores = jnp.where(seen[0], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1)[..., None]
    mixed = jnp.sum(weights * v[:, None].astype(wide), axis=-2)
    return mixed.astype(v.dtype).reshape(q.shape)
