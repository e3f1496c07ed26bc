"""cuDNN's attention, with the sums of exponentials by which parts of attention are merged."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as _cudnn

Gradients = tuple[jax.Array, jax.Array, jax.Array]


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    lengths: tuple | None,
    bias: jax.Array | None,
    documents: tuple | None = None,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns cuDNN's attention and, in float32, the logarithm of the sum of exponentials of each query's scores.

    ``jax.nn.dot_product_attention`` rounds the latter to 16 bits, and its derivative ignores the
    cotangent.

    Args:
        q: Queries ``[rows, seq, heads, head_dim]``, in 16-bit floats.
        k: Keys ``[rows, keys, kv_heads, head_dim]``.
        v: Values, likewise.
        scale: Factor of the scores.
        lengths: None: causal; else how many queries, the first of each row, see how many of its
            keys: two arrays [rows].
        bias: Added to the scores, ``[rows or 1, heads or 1, seq, keys]``; None: nothing.
        documents: The documents of all rows, at most ``most`` a row (2 or more), causal each:
            lengths of queries and keys [rows, most], and where both begin [rows, most + 1], in
            elements, those of all rows first. Then XLA cannot partition the call, and the sums are
            [rows * most, heads, seq], from the first query of each document. None: rows are whole.
        window: How many keys each query sees, its own included; None: all that it may.
    """
    call = _call(q, scale, lengths, bias, documents, window)
    if call.is_partitioned:
        primitive = _cudnn._dot_product_attention_fwd_p_wrapper
    else:
        primitive = _cudnn._dot_product_attention_fwd_p
    out, lse = primitive.bind(q, k, v, *call.operands, **call.params, is_training=True)
    return out, lse


def cudnn_attention_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    ct: jax.Array,
    *how: Any,
) -> Gradients:
    """Returns the gradients of q, k and v; ``how`` is what follows v in ``cudnn_attention``.

    ``out`` and ``lse`` may be those of a softmax over more keys than these.
    """
    call = _call(q, *how)
    if call.is_partitioned:
        primitive = _cudnn._dot_product_attention_bwd_p_wrapper
    else:
        primitive = _cudnn._dot_product_attention_bwd_p
    dq, dk, dv = primitive.bind(q, k, v, *call.operands, lse, out, ct, **call.params)
    return dq, dk, dv


class _Call(NamedTuple):
    """The arguments of both primitives.

    Attributes:
        operands: Those after q, k and v.
        params: The parameters.
        is_partitioned: Whether XLA may partition the call.
    """

    operands: list[jax.Array]
    params: dict[str, Any]
    is_partitioned: bool


def _call(
    q: jax.Array,
    scale: float,
    lengths: Any,
    bias: Any,
    documents: Any = None,
    window: int | None = None,
) -> _Call:
    is_whole = documents is None
    has_bias, bias_has_gradient = bias is not None, False
    params = {
        "scale": float(scale),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (has_bias, bias_has_gradient),
        "mask_type": _mask(lengths, documents),
        "layout": _cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **_without_score_function(is_whole),
    }
    none = jnp.zeros(0, q.dtype)
    bias = bias if has_bias else none
    lengths = lengths or (none, none)
    places = documents or (*lengths, none, none)
    pages = none, none
    return _Call([bias, *places, *pages], params, is_whole)


def _mask(lengths: Any, documents: Any) -> Any:
    masks = _cudnn.MaskType
    if documents is not None:
        return masks.PADDING_CAUSAL
    return masks.CAUSAL if lengths is None else masks.PADDING


def _without_score_function(is_whole: bool) -> dict[str, None]:
    """Returns the parameters for a function of the scores, which the primitives have since JAX 0.12."""
    if jax.__version_info__ < (0, 12):
        return {}
    if is_whole:
        return {"score_mod": None}
    return {"score_mod_name": None, "score_mod_jaxpr": None}
