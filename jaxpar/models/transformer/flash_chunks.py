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
from jaxpar.row_dependence import row_wise

Pair = tuple[Array, Array]  # keys and values, output and lse, or the two chunks of a device
Gradients = tuple[Array, Array, Array]  # of queries, keys and values
Queries = Float[Array, "rows two_chunks heads head_dim"]
KeysOfChunks = Float[Array, "rows two_chunks kv_heads head_dim"]
Keys = Float[Array, "rows seq kv_heads head_dim"]
Lse = Float[Array, "rows heads seq"]


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

    forward: Callable[..., Pair]
    backward: Callable[..., Gradients]
    of_documents: documents.Kernel | None = None


CUDNN = Kernel(cudnn_attention, cudnn_attention_gradients, documents.CUDNN)


def chunked_causal_attention(
    q: Queries,
    own: tuple[KeysOfChunks, KeysOfChunks],
    whole: tuple[Keys, Keys],
    *,
    chunk_of_context: tuple[Int[Array, ""] | int, int],
    segments: tuple[Int[Array, "rows two_chunks"], Int[Array, "rows seq"]] | None = None,
    documents: Documents | None = None,
    scale: float | None = None,
    kernel: Kernel = CUDNN,
) -> Queries:
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
        scale: Factor of the scores; None: ``scale_of(q)``.
        kernel: By default ``CUDNN``, for 16-bit floats on NVIDIA GPUs.

    **Collectives**: none.

    Raises:
        ValueError: There are not C times as many keys as queries, or cuDNN takes no such arrays.
    """
    index, size = chunk_of_context
    _check_shapes(q, whole[0], size, kernel)
    chunk = q.shape[1] // 2
    places = index, 2 * size - 1 - index
    begins = [jnp.asarray(place * chunk, jnp.int32) for place in places]
    within = None
    if segments is None:
        earlier = [_all_before(begin, q) for begin in begins]
    else:
        within, of_keys = as_rows(segments[0]), segments[1]
        earlier = []
        for begin, of_chunk in zip(begins, _chunks(within), strict=True):
            earlier.append(_same_document_before(begin, of_chunk, of_keys))
    if documents is not None:
        within = documents
    if scale is None:
        scale = scale_of(q)
    given = _Given(own, whole, within, tuple(earlier))
    # What each query sees of its own chunk and of earlier ones is the whole row, which no operation alone shows.
    attend = row_wise(partial(_attend, kernel, scale))
    return attend(q, given)


def scale_of(q: Array) -> float:
    """Returns the factor of the scores of queries, one by the square root of head_dim.

    A caller's kernel has it too, so a model with another one multiplies its queries.
    """
    return q.shape[-1] ** -0.5


def _check_shapes(q: Array, k: Array, size: int, kernel: Kernel) -> None:
    num_queries, num_keys = q.shape[1], k.shape[1]
    head_dim = q.shape[3]
    if num_queries % 2 or num_keys != size * num_queries:
        raise ValueError(
            "each device must have two of the 2C chunks of a sequence; got "
            f"{num_queries} queries of {num_keys} positions, C={size}. Gather the keys of all devices, and choose a "
            f"sequence that {2 * size} divides."
        )
    is_taken = q.dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256
    if kernel == CUDNN and not is_taken:
        raise ValueError(
            "cuDNN's attention takes 16-bit floats and a head_dim that 8 divides, up to 256; got "
            f'{q.dtype}, head_dim={head_dim}. Use attention="xla", which stores all scores.'
        )


class _Earlier(NamedTuple):
    """The keys before a chunk that its queries see, [rows] each: the first queries see the keys from ``first`` on."""

    first: Array | None  # None: 0
    num_keys: Array
    num_queries: Array

    def keys_of(self, whole: Pair) -> Pair:
        if self.first is None:
            return whole
        k, v = whole
        return _from(k, self.first), _from(v, self.first)

    def lengths(self) -> Pair:
        return self.num_queries, jnp.maximum(self.num_keys, 1)  # cuDNN 9.4 fails without keys

    def sees(self, q: Array) -> Array:
        """Returns whether each query sees any of them."""
        place = jnp.arange(q.shape[1])[None]
        is_first = place < self.num_queries[:, None]
        has_keys = self.num_keys > 0
        return is_first & has_keys[:, None]


def _all_before(begin: Array, q: Array) -> _Earlier:
    """Returns all keys before a chunk, which all of its queries see."""
    of_rows = lambda number: jnp.full(len(q), number, jnp.int32)
    return _Earlier(None, of_rows(begin), of_rows(q.shape[1] // 2))


def _same_document_before(begin: Array, of_chunk: Array, of_keys: Array) -> _Earlier:
    """Returns those of the document that goes on at ``begin``, where the chunk does."""
    going_on = of_chunk[:, :1]
    first = jnp.argmax(of_keys == going_on, axis=1).astype(jnp.int32)
    num_queries = jnp.sum(of_chunk == going_on, axis=1, dtype=jnp.int32)
    return _Earlier(first, begin - first, num_queries)


class _Given(NamedTuple):
    """What queries attend to.

    Attributes:
        own: Keys and values of the chunks themselves.
        whole: Keys and values of the sequence.
        within: The documents of the chunks, or the segment of each of their positions, or None.
        earlier: For each chunk what its queries see of ``whole``.
    """

    own: Pair
    whole: Pair
    within: Array | Documents | None
    earlier: tuple[_Earlier, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel: Kernel, scale: float, q: Array, given: _Given) -> Array:
    return _forward(kernel, scale, q, given)[0]


def _forward(kernel: Kernel, scale: float, q: Array, given: _Given) -> tuple[Array, tuple]:
    own_k, own_v = map(as_rows, given.own)
    rows = as_rows(q)
    to_own, mask = _within(kernel, given, q.dtype)
    own_out, own_lse = to_own.forward(rows, own_k, own_v, scale, *mask)

    to_earlier = partial(_to_earlier, kernel, scale, given.whole)
    parts = map(to_earlier, given.earlier, _chunks(rows))
    out, lse = map(_from_chunks, zip(*parts, strict=True))

    total = jnp.logaddexp(own_lse, lse)
    of_own = own_out * _weight(own_lse, total)
    merged = of_own + out * _weight(lse, total)
    merged = merged.astype(q.dtype).reshape(q.shape)
    return merged, (q, given, merged, total)


def _within(kernel: Kernel, given: _Given, dtype: Any) -> tuple[Kernel | documents.Kernel, tuple]:
    """Returns the kernel of chunks' attention to themselves, and its arguments after ``scale``."""
    if isinstance(given.within, Documents):
        assert kernel.of_documents is not None, "documents are given to a kernel that takes them"
        return kernel.of_documents, (given.within, None)
    bias = _between(given.within, dtype)
    return kernel, (None, bias)


def _weight(lse: Lse, total: Lse) -> Array:
    """Returns exp(lse - total), a part's share of the whole softmax, for each query."""
    shares = jnp.exp(lse - total)
    return shares.swapaxes(1, 2)[..., None]


def _backward(kernel: Kernel, scale: float, kept: tuple, ct: Array) -> tuple[Array, _Given]:
    q, given, out, lse = kept
    rows, out_rows, ct_rows = map(as_rows, (q, out, ct))
    own_k, own_v = map(as_rows, given.own)
    to_own, mask = _within(kernel, given, q.dtype)
    own_dq, *of_own = to_own.backward(rows, own_k, own_v, out_rows, lse, ct_rows, scale, *mask)

    of_earlier = partial(_earlier_gradients, kernel, scale, given.whole)
    by_chunk = map(_chunks, (rows, out_rows, lse, ct_rows))
    grads = map(of_earlier, given.earlier, *by_chunk)
    dq, dk, dv = zip(*grads, strict=True)

    dq = own_dq + _from_chunks(dq)
    shape = given.own[0].shape
    own_dk, own_dv = (each.reshape(shape) for each in of_own)
    of_whole = sum(dk), sum(dv)
    grads = _Given((own_dk, own_dv), of_whole, None, None)  # type: ignore[arg-type]
    return dq.reshape(q.shape), grads


_attend.defvjp(_forward, _backward)


def _to_earlier(kernel: Kernel, scale: float, whole: Pair, earlier: _Earlier, q: Array) -> Pair:
    """Returns the output and lse of one chunk's attention to earlier keys: 0 and -inf for queries that see none."""
    k, v = earlier.keys_of(whole)
    out, lse = kernel.forward(q, k, v, scale, earlier.lengths(), None)
    sees = earlier.sees(q)
    out = _only(sees, out)
    lse = jnp.where(sees[:, None], lse, -jnp.inf)
    return out, lse


def _only(is_there: Array, array: Array) -> Array:
    """Returns an array ``[rows, seq, heads, head_dim]`` with zeros at all other places."""
    return jnp.where(is_there[:, :, None, None], array, 0)


def _earlier_gradients(
    kernel: Kernel,
    scale: float,
    whole: Pair,
    earlier: _Earlier,
    q: Array,
    *others: Array,
) -> Gradients:
    """Returns the gradients of a chunk's queries and of all keys and values."""
    k, v = earlier.keys_of(whole)
    lengths = earlier.lengths()
    dq, dk, dv = kernel.backward(q, k, v, *others, scale, lengths, None)
    place = jnp.arange(whole[0].shape[1])[None]
    if earlier.first is not None:
        place = place - earlier.first[:, None]
        dk, dv = _from(dk, -earlier.first), _from(dv, -earlier.first)
    is_from_first = place >= 0
    is_seen = is_from_first & (place < earlier.num_keys[:, None])
    dq = _only(earlier.sees(q), dq)
    return dq, _only(is_seen, dk), _only(is_seen, dv)


def _from(array: Array, first: Array) -> Array:
    """Returns an array whose place 0 along dim 1 is ``first`` of each row; what comes from outside of it is arbitrary."""
    length = array.shape[1]
    places = jnp.arange(length)[None] + first[:, None]
    places = jnp.clip(places, 0, length - 1)
    return jnp.take_along_axis(array, places[:, :, None, None], axis=1)


def as_rows(array: Array) -> Array:
    """Returns ``[rows, two_chunks, ...]`` as ``[rows * 2, chunk, ...]``, which is the same in memory."""
    rows, two_chunks, *others = array.shape
    return array.reshape(rows * 2, two_chunks // 2, *others)


def _chunks(array: Array) -> Pair:
    """Returns the rows of each of the two chunks, of an array ``[rows * 2, ...]``."""
    pairs = array.reshape(-1, 2, *array.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def _from_chunks(chunks: tuple[Array, ...]) -> Array:
    pairs = jnp.stack(chunks, axis=1)
    return pairs.reshape(-1, *pairs.shape[2:])


def _between(segments: Array | None, dtype: Any) -> Array | None:
    """Returns a bias ``[rows, 1, seq, seq]`` that is so low between segments that weights are 0, and no sum overflows."""
    if segments is None:
        return None
    is_same = segments[:, None, :, None] == segments[:, None, None, :]
    lowest = jnp.finfo(dtype).min / 2
    return jnp.where(is_same, 0, lowest).astype(dtype)
