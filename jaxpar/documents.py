"""Several documents in a row, for attention that is told where they lie: no bias [seq, seq], and no work between them.

    segments   0 0 0 1 1 | 0 0 1 2 2     two rows of 5 tokens, of which at most 3 are documents
    begins     0 3 5 7 8 10 10 10        in all rows one after another; behind the last one their end
    lengths    3 2 2 1 2 0

That is cuDNN's packed layout, which Hopper and later GPUs have. How many documents a row has at most is part of the program:
with more, the last ones of all rows would be left out, so whoever calls this must refuse such a row or make it NaN.

cuDNN gives the logarithms of sums of exponentials (lse) as [documents, heads, seq], from the first token of each document, of
which only as many as there are tokens are used. Between the passes they are kept as [rows, heads, seq].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar import _compat
from jaxpar.devices import on_hopper


class Documents(NamedTuple):
    """Where the documents of rows lie.

    Attributes:
        begins: The place of the first token of each document, in all rows one after another; their end where there is none.
        lengths: Its tokens; 0 where there is none.
        of_tokens: The number of the document of each token.
    """

    begins: Int[Array, "rows most_and_1"]
    lengths: Int[Array, "rows most"]
    of_tokens: Int[Array, "rows seq"]


def find_documents(segments: Int[Array, "rows seq"], most: int) -> Documents:
    """Returns where documents lie, runs of equal numbers in ``segments``, of which a row has at most ``most``, 2 or more."""
    rows, seq = segments.shape
    changes = segments[:, 1:] != segments[:, :-1]
    is_first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True).reshape(-1)
    of_tokens = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    places = jnp.arange(rows * seq, dtype=jnp.int32)
    at = jnp.where(is_first, of_tokens, rows * (most + 1))
    begins = jnp.full(rows * (most + 1), rows * seq, jnp.int32).at[at].set(places, mode="drop")
    lengths = jnp.diff(begins)[: rows * most]
    return Documents(
        begins.reshape(rows, -1), lengths.reshape(rows, most), of_tokens.reshape(rows, seq)
    )


class Kernel(NamedTuple):
    """Causal attention in each document, of queries ``[rows, seq, heads, head_dim]`` to keys and values of the same tokens.

    Attributes:
        forward: ``forward(q, k, v, scale, documents, window)`` returns the output and lse ``[rows, heads, seq]``, in float32.
            A window is as many positions as each sees, itself included; None: all up to itself.
        backward: ``backward(q, k, v, out, lse, ct, scale, documents, window)`` returns the gradients of q, k and v, where
            ``out`` and ``lse`` may be those of a softmax over more keys.
        runs: ``runs(dtype)`` returns whether the devices for which this is traced have it, for arrays of this dtype.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    runs: Callable[[Any], bool] = lambda dtype: True


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend_in_documents(
    kernel: Kernel,
    scale: float,
    window: int | None,
    q: Float[Array, "rows seq heads head_dim"],
    k: Float[Array, "rows seq kv_heads head_dim"],
    v: Float[Array, "rows seq kv_heads head_dim"],
    documents: Documents,
) -> Float[Array, "rows seq heads head_dim"]:
    """Returns causal attention in each document. XLA cannot partition cuDNN's: call it where all axes are manual."""
    return kernel.forward(q, k, v, scale, documents, window)[0]


def _forward(
    kernel: Kernel,
    scale: float,
    window: int | None,
    q: Array,
    k: Array,
    v: Array,
    documents: Documents,
):
    out, lse = kernel.forward(q, k, v, scale, documents, window)
    return out, (q, k, v, out, lse, documents)


def _backward(kernel: Kernel, scale: float, window: int | None, kept: tuple, ct: Array) -> tuple:
    *arrays, documents = kept
    return *kernel.backward(*arrays, ct, scale, documents, window), None


attend_in_documents.defvjp(_forward, _backward)


# cuDNN ----------------------------------------------------------------------------------------------------------------------


def _cudnn_forward(
    q: Array, k: Array, v: Array, scale: float, documents: Documents, window: int | None
) -> tuple[Array, Array]:
    _check(q)
    out, lse = _compat.cudnn_attention(
        q, k, v, scale, None, None, _in_elements(q, k, documents), window
    )
    return out, lse[documents.of_tokens, :, _places(documents)].swapaxes(1, 2)


def _cudnn_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    ct: Array,
    scale: float,
    documents: Documents,
    window: int | None,
) -> tuple[Array, Array, Array]:
    of_none = jnp.zeros((documents.lengths.size, *lse.shape[1:]), lse.dtype)
    at = of_none.at[documents.of_tokens, :, _places(documents)]
    by_document = at.set(lse.swapaxes(1, 2), mode="drop", unique_indices=True)
    places = _in_elements(q, k, documents)
    return _compat.cudnn_attention_gradients(
        q, k, v, out, by_document, ct, scale, None, None, places, window
    )


def _has_cudnn(dtype: Any) -> bool:
    return on_hopper(or_later=True) and jnp.dtype(dtype).itemsize == 2


CUDNN = Kernel(_cudnn_forward, _cudnn_backward, _has_cudnn)


def _places(documents: Documents) -> Int[Array, "rows seq"]:
    """Returns the place of each token in its document."""
    rows, seq = documents.of_tokens.shape
    places = jnp.arange(rows * seq, dtype=jnp.int32).reshape(rows, seq)
    return places - documents.begins.reshape(-1)[documents.of_tokens]


def _in_elements(q: Array, k: Array, documents: Documents) -> tuple[Array, ...]:
    """Returns lengths of queries and of keys, and where each document begins in them, in elements."""
    of_token = (each.shape[2] * each.shape[3] for each in (q, k))
    return documents.lengths, documents.lengths, *(documents.begins * size for size in of_token)


def _check(q: Array) -> None:
    if q.shape[3] % 8 or q.shape[3] > 256:
        raise ValueError(
            f"cuDNN's attention takes a head_dim that 8 divides, up to 256; got head_dim={q.shape[3]}. Use "
            'attention="xla", which stores all scores.'
        )
    if q.size >= 2**31:
        raise ValueError(
            "cuDNN counts the elements of queries of several documents a row in 32 bits, so a device must have fewer than 2^31 "
            f"at once; got {q.size}, of shape {q.shape}. Use more microbatches, or leave max_documents out."
        )
