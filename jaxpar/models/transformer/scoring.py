"""How likely each token of a row is after those before it, from one pass over the row; nothing is generated.

The scores of a whole row over the vocabulary could take gigabytes, so they are computed for a few positions at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.dtypes import on_host, widen
from jaxpar.fields import check_at_least
from jaxpar.layered_model import OUTER
from jaxpar.models.transformer.advance import advance
from jaxpar.models.transformer.attention import unconstrained
from jaxpar.models.transformer.cache import empty_cache
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.generate import check_tokens, jit_for_gpus, round_up, with_all_layers
from jaxpar.models.transformer.layers import logits
from jaxpar.models.transformer.span import Span

POSITIONS = 64  # of each row, whose scores are in memory at once
# XLA for GPUs, as of JAX 0.12, fails where it would read a slice of the hidden states in place.
WITH_COPIED_SLICES = {"xla_gpu_enable_dynamic_slice_fusion": False}
MAX_SHOWN = 4  # shapes in a message


class TokenScores(NamedTuple):
    """The log probabilities of the tokens of a row, in nats, on the host.

    Nothing comes before the first token: its log probabilities are NaN, and its likeliest tokens are 0.

    Attributes:
        log_probs: ``[length]``, of each token after those before it; float32, or float64 of a model that computes in it.
        top: int32 ``[length, num_top]``, the likeliest tokens at each position, the likeliest first.
        top_log_probs: ``[length, num_top]``, of these, in the dtype of ``log_probs``.
    """

    log_probs: np.ndarray
    top: np.ndarray
    top_log_probs: np.ndarray


def score_tokens(
    config: TransformerConfig, params: PyTree, rows: Sequence[np.ndarray], *, num_top: int = 1
) -> list[TokenScores]:
    """Returns how likely the tokens of each row are.

    Args:
        config: The model.
        params: Its params, as for ``generate``.
        rows: Tokens of each row, integers ``[length]``; at least one row, and at least one token in each.
        num_top: The likeliest tokens to return for each place, at least 1; with more than the vocabulary has, all of them.

    Returns:
        The scores of each row, in order.

    Raises:
        TypeError: Tokens that are no integers.
        ValueError: No rows or no tokens, a row that is not one-dimensional, a token outside the vocabulary, more positions
            than a learned table has, or a ``num_top`` below 1.
        FloatingPointError: The model's scores are not finite.
    """
    check_at_least(1, num_top=num_top)
    arrays = [np.asarray(row) for row in rows]
    _check_rows(config, arrays)
    num_tokens = np.array([len(row) for row in arrays], np.int32)
    most = config.max_positions if config.positions == "learned" else None
    length = round_up(int(num_tokens.max()), most)
    padded = [np.pad(row, (0, length - len(row))) for row in arrays]
    tokens = np.stack(padded).astype(np.int32)
    num_top = min(num_top, config.vocab_size)
    found = _score(config, num_top, with_all_layers(params), tokens, num_tokens)
    on_rows = [on_host(each) for each in found]
    scores = []
    for i, count in enumerate(num_tokens.tolist()):
        of_row = [_shifted(each[i, :count]) for each in on_rows]
        scores.append(TokenScores(*of_row))
    if not all(np.isfinite(each.log_probs[1:]).all() for each in scores):
        raise FloatingPointError(
            "a model's scores must be finite; got some that are not. Look for NaN or infinity in the params, or compute in a "
            'wider dtype, such as compute_dtype="float32".'
        )
    return scores


def _check_rows(config: TransformerConfig, rows: Sequence[np.ndarray]) -> None:
    """Raises unless each row has tokens of the model, and no more than it has positions."""
    if not rows or any(row.ndim != 1 or not row.size for row in rows):
        shapes = ", ".join(str(row.shape) for row in rows[:MAX_SHOWN]) or "no rows"
        raise ValueError(
            f"rows must be a sequence of arrays [length], each of at least one token; got {shapes}. Give [tokens] for one row."
        )
    for row in rows:
        check_tokens(config, row)
    longest = max(map(len, rows))
    if config.positions == "learned" and longest > config.max_positions:
        raise ValueError(
            f"a row must have at most max_positions tokens; got {longest}, max_positions={config.max_positions}. Cut it."
        )


def _shifted(values: np.ndarray) -> np.ndarray:
    """Returns what each position says of the next one, at the next one; nothing is said of the first."""
    nothing = np.nan if values.dtype.kind == "f" else 0
    return np.concatenate([np.full_like(values[:1], nothing), values[:-1]])


@jit_for_gpus(WITH_COPIED_SLICES, static_argnums=(0, 1))
def _score(
    config: TransformerConfig,
    num_top: int,
    params: PyTree,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"],
) -> tuple[Float[Array, "batch seq"], Int[Array, "batch seq top"], Float[Array, "batch seq top"]]:
    """Returns at each position what it says of the next token."""
    batch, seq = tokens.shape
    span = Span(jnp.arange(seq)[None], lengths[:, None])
    h, _ = advance(config, params, tokens, span, empty_cache(config, batch, seq))
    following = jnp.roll(tokens, -1, axis=1)

    def of_part(part: tuple[Array, Array]) -> Any:
        h, following = part
        scores = widen(logits(config, params[OUTER], h, unconstrained))
        log_probs = jax.nn.log_softmax(scores, axis=-1)
        top_log_probs, top = jax.lax.top_k(log_probs, num_top)
        own = jnp.take_along_axis(log_probs, following[..., None], axis=-1)[..., 0]
        return own, top, top_log_probs

    size = min(POSITIONS, seq)
    parts = jax.lax.map(of_part, (_in_parts(h, size), _in_parts(following, size)))
    return jax.tree.map(lambda each: _joined(each, seq), parts)


def _in_parts(x: Array, size: int) -> Array:
    """Returns ``[batch, seq, ...]`` as ``[parts, batch, size, ...]``, the last part padded with zeros."""
    batch, seq = x.shape[:2]
    widths = [(0, 0)] * x.ndim
    widths[1] = 0, -seq % size
    parts = jnp.pad(x, widths).reshape(batch, -1, size, *x.shape[2:])
    return jnp.moveaxis(parts, 1, 0)


def _joined(parts: Array, seq: int) -> Array:
    """Returns ``[parts, batch, size, ...]`` as ``[batch, seq, ...]``, without the padding."""
    _, batch, _, *others = parts.shape
    rows = jnp.moveaxis(parts, 0, 1).reshape(batch, -1, *others)
    return rows[:, :seq]
