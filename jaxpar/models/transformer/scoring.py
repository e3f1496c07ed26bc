"""How likely each token of given rows is after those before it, by one pass over the rows; nothing is generated.

The scores of a whole row over the vocabulary could take gigabytes, so those of a few positions at a time are computed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.dtypes import on_host, widen
from jaxpar.layered_model import OUTER
from jaxpar.models.transformer.attention import unconstrained
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.generate import advance, check_tokens, empty_caches, round_up, with_all_layers
from jaxpar.models.transformer.layers import logits
from jaxpar.models.transformer.span import Span

POSITIONS = 64  # of each row, whose scores are in memory at once


class TokenScores(NamedTuple):
    """Natural logarithms of probabilities of the tokens of a row, on the host; those of the first token are NaN.

    Attributes:
        log_probs: float32 [length], that of each token after those before it.
        top: int32 [length, num_top], the likeliest tokens in its place, the likeliest first.
        top_log_probs: float32 [length, num_top], theirs.
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
        rows: Tokens [length] of each row, at least one.
        num_top: The likeliest tokens to return for each place.

    Raises:
        ValueError: A token outside the vocabulary, or more positions than a learned table has.
        FloatingPointError: The model's scores are not finite.
    """
    check_tokens(config, np.concatenate(rows))
    most, longest = config.max_positions if config.positions == "learned" else None, max(map(len, rows))
    if most is not None and longest > most:
        raise ValueError(f"a row must have at most max_positions tokens; got {longest}, max_positions={most}. Cut it.")
    length = round_up(longest, most)
    tokens = np.stack([np.pad(row, (0, length - len(row))) for row in rows]).astype(np.int32)
    lengths = np.array([len(row) for row in rows], np.int32)
    found = _score(config, min(num_top, config.vocab_size), with_all_layers(params), tokens, lengths)
    log_probs, top, top_log_probs = (on_host(each) for each in found)
    scores = [
        TokenScores(*(_shifted(each[i, : len(row)]) for each in (log_probs, top, top_log_probs)))
        for i, row in enumerate(rows)
    ]
    if not all(np.isfinite(each.log_probs[1:]).all() for each in scores):
        raise FloatingPointError(
            "a model's scores must be finite; got some that are not. Look for NaN or infinity in the params, or compute in a "
            'wider dtype, such as compute_dtype="float32".'
        )
    return scores


def _shifted(values: np.ndarray) -> np.ndarray:
    """Returns what each position says of the next one, at the next one; nothing is said of the first."""
    nothing = np.nan if values.dtype.kind == "f" else 0
    return np.concatenate([np.full_like(values[:1], nothing), values[:-1]])


@partial(jax.jit, static_argnums=(0, 1))
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
    h, _ = advance(config, params, tokens, span, empty_caches(config, batch, seq))
    following = jnp.roll(tokens, -1, axis=1)

    def of_part(part: tuple[Array, Array]) -> Any:
        h, following = part
        scores = widen(logits(config, params[OUTER], h, unconstrained))
        log_probs = jax.nn.log_softmax(scores, axis=-1)
        top_log_probs, top = jax.lax.top_k(log_probs, num_top)
        own = jnp.take_along_axis(log_probs, following[..., None], axis=-1)[..., 0]
        return own, top, top_log_probs

    size = min(POSITIONS, seq)
    padding = -seq % size
    in_parts = lambda x: jnp.moveaxis(
        jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2))).reshape(batch, -1, size, *x.shape[2:]), 1, 0
    )
    whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :seq]
    return jax.tree.map(whole, jax.lax.map(of_part, (in_parts(h), in_parts(following))))
