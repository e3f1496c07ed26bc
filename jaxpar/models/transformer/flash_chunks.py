"""Causal attention of two chunks of a sequence to all of it, by a flash kernel: what each device of a context axis computes.

The sequence is cut into 2C chunks for C devices. Device c has the queries of chunks c and 2C - 1 - c (zig-zag), so that all
devices have the same work. With C = 2, those of device 0 are, by the chunk of the keys:

    keys           0  1  2  3
    queries of 0   o              o  the chunk's own keys, causal: one call, with both chunks as rows
    queries of 3   #  #  #  o     #  all keys before the chunk, without a mask: a call for each chunk

How many keys are earlier depends on c, which only the running program knows: the kernel reads the number on the device. The
parts are merged by the logarithms of the sums of their exponentials (lse):

    lse = log(exp(lse_own) + exp(lse_earlier))     out = out_own exp(lse_own - lse) + out_earlier exp(lse_earlier - lse)

The gradients of the scores of a part are those of the whole softmax, so the backward pass calls the kernel's backward pass for
each part with the merged ``out`` and ``lse``. JAX's own derivative of cuDNN's kernel ignores the cotangent of ``lse``: merged
parts that it differentiates have wrong gradients.

    mixed = chunked_causal_attention(q, (k, v), (all_k, all_v), chunk_of_context=(jax.lax.axis_index("context"), C))

The kernel can leave out the last keys of a row and not the first, so keys and values must be in the order of the sequence,
which is a copy of them after a gather. In a row of several documents only the first one in a chunk has earlier keys, which
another copy puts first; in the chunk itself the kernel is told where documents lie (``documents.py``), or else a bias
[chunk, chunk] parts them. There is no sliding window.

**Reference**: Dao 2023, arXiv 2307.08691, section 3.1 (the backward pass from out and lse); Grattafiori et al. 2024, arXiv
2407.21783, section 3.3.2 (keys and values gathered over zig-zag chunks).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar import documents
from jaxpar._compat import cudnn_attention, cudnn_attention_gradients
from jaxpar.documents import Documents


class Kernel(NamedTuple):
    """Attention of queries ``[rows, seq, heads, head_dim]`` to keys and values ``[rows, keys, kv_heads, head_dim]``.

    Attributes:
        forward: ``forward(q, k, v, scale, lengths, bias)`` returns the output, like q, and lse ``[rows, heads, seq]``, in
            float32 at least. ``lengths`` None: causal. Else two arrays [rows]: how many queries, the first of a row, see how
            many of its keys, at least one; the output of other queries may be anything. ``bias`` ``[rows, 1, seq, keys]`` is
            added to the scores.
        backward: ``backward(q, k, v, out, lse, ct, scale, lengths, bias)`` returns the gradients of q, k and v, where ``out``
            and ``lse`` may be those of a softmax over more keys. Gradients of what sees or is seen by nothing may be anything.
        of_documents: The kernel for rows of several documents; None: they are parted by a bias.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    of_documents: documents.Kernel | None = None


CUDNN = Kernel(cudnn_attention, cudnn_attention_gradients, documents.CUDNN)


def chunked_causal_attention(
    q: Float[Array, "rows two_chunks heads head_dim"],
    own: tuple[Float[Array, "rows two_chunks kv_heads head_dim"], Float[Array, "rows two_chunks kv_heads head_dim"]],
    whole: tuple[Float[Array, "rows seq kv_heads head_dim"], Float[Array, "rows seq kv_heads head_dim"]],
    *,
    chunk_of_context: tuple[Int[Array, ""] | int, int],
    segments: tuple[Int[Array, "rows two_chunks"], Int[Array, "rows seq"]] | None = None,
    documents: Documents | None = None,
    scale: float | None = None,
    kernel: Kernel = CUDNN,
) -> Float[Array, "rows two_chunks heads head_dim"]:
    """Returns for each query the mean of the values up to its position in the sequence, weighted by the softmax of its scores.

    XLA cannot partition cuDNN's kernel: call this where all axes are manual, with the heads of one shard over ``tensor``.

    Args:
        q: Queries of chunk c, then of chunk 2C - 1 - c.
        own: Keys and values of the same positions, before they were gathered.
        whole: Keys and values of the whole sequence in its order. Those of the two chunks are not read, and get no gradient
            here: it is in that of ``own``.
        chunk_of_context: The device's index c, which may be traced (by the same ``shard_map``), and the number C of devices.
        segments: The document of each query, and of each key of the whole sequence, a run of a number of its own; keys of other
            documents are masked. None: each row is one.
        documents: Those of ``segments`` in the two chunks, which are rows of their own (``as_rows``), for a kernel that has
            ``of_documents``. None: a bias parts them.
        scale: Factor of the scores; None: one by the square root of head_dim.
        kernel: By default ``CUDNN``, for 16-bit floats on NVIDIA GPUs.

    **Collectives**: none.

    Raises:
        ValueError: There are not C times as many keys as queries, or cuDNN takes no such arrays.
    """
    index, size = chunk_of_context
    if q.shape[1] % 2 or whole[0].shape[1] != size * q.shape[1]:
        raise ValueError(
            "each device must have two of the 2C chunks of a sequence; got "
            f"{q.shape[1]} queries of {whole[0].shape[1]} positions, C={size}. Gather the keys of all devices, and choose a "
            f"sequence that {2 * size} divides."
        )
    if kernel == CUDNN and (q.dtype.itemsize != 2 or q.shape[3] % 8 or q.shape[3] > 256):
        raise ValueError(
            "cuDNN's attention takes 16-bit floats and a head_dim that 8 divides, up to 256; got "
            f'{q.dtype}, head_dim={q.shape[3]}. Use attention="xla", which stores all scores.'
        )
    begins = [jnp.asarray(place * (q.shape[1] // 2), jnp.int32) for place in (index, 2 * size - 1 - index)]
    of_chunks, of_keys = (None, None) if segments is None else (as_rows(segments[0]), segments[1])
    numbers = (None, None) if of_chunks is None else _chunks(of_chunks)
    earlier = [_earlier_keys(q, *each, of_keys) for each in zip(begins, numbers, strict=True)]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return _attend(kernel, scale, q, own, whole, of_chunks if documents is None else documents, tuple(earlier))


class _Earlier(NamedTuple):
    """The keys before a chunk that its queries see, [rows] each: the first queries see the keys from ``first`` on."""

    first: Array | None  # None: 0
    num_keys: Array
    num_queries: Array

    def keys_of(self, whole: tuple) -> tuple:
        return whole if self.first is None else tuple(_from(each, self.first) for each in whole)

    def lengths(self) -> tuple[Array, Array]:
        return self.num_queries, jnp.maximum(self.num_keys, 1)  # cuDNN 9.4 fails without keys

    def sees(self, q: Array) -> Array:
        """Returns whether each query sees any of them."""
        return (jnp.arange(q.shape[1])[None] < self.num_queries[:, None]) & (self.num_keys > 0)[:, None]


def _earlier_keys(q: Array, begin: Array, of_chunk: Array | None, of_keys: Array | None) -> _Earlier:
    """Returns those of the document that goes on at ``begin``, where the chunk does."""
    if of_chunk is None or of_keys is None:
        return _Earlier(None, *(jnp.full(len(q), number, jnp.int32) for number in (begin, q.shape[1] // 2)))
    first = jnp.argmax(of_keys == of_chunk[:, :1], axis=1).astype(jnp.int32)
    return _Earlier(first, begin - first, jnp.sum(of_chunk == of_chunk[:, :1], axis=1, dtype=jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernel: Kernel, scale: float, q: Array, own: tuple, whole: tuple, within: Array | Documents | None, earlier: tuple
) -> Array:
    return _forward(kernel, scale, q, own, whole, within, earlier)[0]


def _forward(
    kernel: Kernel, scale: float, q: Array, own: tuple, whole: tuple, within: Array | Documents | None, earlier: tuple
) -> tuple:
    own_out, own_lse = _to_own(kernel, scale, within, *map(as_rows, (q, *own)))
    parts = [_to_earlier(kernel, scale, whole, *each) for each in zip(earlier, _chunks(as_rows(q)), strict=True)]
    out, lse = (_from_chunks(each) for each in zip(*parts, strict=True))
    total = jnp.logaddexp(own_lse, lse)
    own_weight, weight = (jnp.exp(each - total).swapaxes(1, 2)[..., None] for each in (own_lse, lse))
    merged = (own_out * own_weight + out * weight).astype(q.dtype).reshape(q.shape)
    return merged, (q, own, whole, within, earlier, merged, total)


def _backward(kernel: Kernel, scale: float, kept: tuple, ct: Array) -> tuple:
    q, own, whole, within, earlier, out, lse = kept
    in_rows = [*map(as_rows, (q, out)), lse, as_rows(ct)]
    of_own = _own_gradients(kernel, scale, within, in_rows[0], *map(as_rows, own), *in_rows[1:])
    by_chunk = zip(earlier, *map(_chunks, in_rows), strict=True)
    dq, dk, dv = zip(*(_earlier_gradients(kernel, scale, whole, *each) for each in by_chunk), strict=True)
    dq = (of_own[0] + _from_chunks(dq)).reshape(q.shape)
    return dq, tuple(each.reshape(own[0].shape) for each in of_own[1:]), (sum(dk), sum(dv)), None, None


_attend.defvjp(_forward, _backward)


def _to_own(kernel: Kernel, scale: float, within: Array | Documents | None, *arrays: Array) -> tuple[Array, Array]:
    """Returns the output and lse of chunks' attention to themselves."""
    if isinstance(within, Documents):
        return _of_documents(kernel).forward(*arrays, scale, within, None)
    return kernel.forward(*arrays, scale, None, _between(within, arrays[0].dtype))


def _own_gradients(
    kernel: Kernel, scale: float, within: Array | Documents | None, *arrays: Array
) -> tuple[Array, Array, Array]:
    if isinstance(within, Documents):
        return _of_documents(kernel).backward(*arrays, scale, within, None)
    return kernel.backward(*arrays, scale, None, _between(within, arrays[0].dtype))


def _of_documents(kernel: Kernel) -> documents.Kernel:
    assert kernel.of_documents is not None, "documents are given to a kernel that takes them"
    return kernel.of_documents


def _to_earlier(kernel: Kernel, scale: float, whole: tuple, earlier: _Earlier, q: Array) -> tuple[Array, Array]:
    """Returns the output and lse of one chunk's attention to earlier keys: 0 and -inf for queries that see none."""
    out, lse = kernel.forward(q, *earlier.keys_of(whole), scale, earlier.lengths(), None)
    sees = earlier.sees(q)
    return jnp.where(sees[:, :, None, None], out, 0), jnp.where(sees[:, None], lse, -jnp.inf)


def _earlier_gradients(
    kernel: Kernel, scale: float, whole: tuple, earlier: _Earlier, q: Array, *others: Array
) -> tuple[Array, Array, Array]:
    """Returns the gradients of a chunk's queries and of all keys and values."""
    dq, *of_keys = kernel.backward(q, *earlier.keys_of(whole), *others, scale, earlier.lengths(), None)
    place = jnp.arange(whole[0].shape[1])[None]
    if earlier.first is not None:
        place = place - earlier.first[:, None]
        of_keys = [_from(each, -earlier.first) for each in of_keys]
    is_seen = ((place >= 0) & (place < earlier.num_keys[:, None]))[:, :, None, None]
    dk, dv = (jnp.where(is_seen, each, 0) for each in of_keys)
    return jnp.where(earlier.sees(q)[:, :, None, None], dq, 0), dk, dv


def _from(array: Array, first: Array) -> Array:
    """Returns an array whose place 0 along dim 1 is ``first`` of each row; what comes from outside of it is arbitrary."""
    places = jnp.clip(jnp.arange(array.shape[1])[None] + first[:, None], 0, array.shape[1] - 1)
    return jnp.take_along_axis(array, places[:, :, None, None], axis=1)


def as_rows(array: Array) -> Array:
    """Returns ``[rows, two_chunks, ...]`` as ``[rows * 2, chunk, ...]``, which is the same in memory."""
    return array.reshape(array.shape[0] * 2, array.shape[1] // 2, *array.shape[2:])


def _chunks(array: Array) -> tuple[Array, Array]:
    """Returns the rows of each of the two chunks, of an array ``[rows * 2, ...]``."""
    pairs = array.reshape(-1, 2, *array.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def _from_chunks(chunks: tuple[Array, Array]) -> Array:
    return jnp.stack(chunks, axis=1).reshape(-1, *chunks[0].shape[1:])


def _between(segments: Array | None, dtype: Any) -> Array | None:
    """Returns a bias ``[rows, 1, seq, seq]`` that is so low between segments that weights are 0, and no sum overflows."""
    if segments is None:
        return None
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return jnp.where(same, 0, jnp.finfo(dtype).min / 2).astype(dtype)
