"""Draws the next token of each row from its scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.fields import arg, check_at_least
from jaxpar.models.transformer.config import TransformerConfig

_FLOAT32 = np.finfo(np.float32)


NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and which of them end a row. A compiled program depends on ``top_k`` and on what is None.

    Attributes:
        temperature: Divides scores; None: the token with the highest score is taken.
        top_k: The number of scores to draw from; None: all.
        top_p: The probability of the tokens to draw from; None: all.
        eos: The tokens that end a row.
        pad: The token that fills a row after its end.
        key: A PRNG key.
    """

    temperature: PyTree
    top_k: int | None = field(metadata={"static": True})
    top_p: PyTree
    eos: PyTree
    pad: PyTree
    key: PyTree


def make_sampling(
    config: TransformerConfig,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    *,
    key: PyTree,
    eos: int | Sequence[int],
    pad: int | None = None,
) -> Sampling:
    """Returns the arguments of ``generate`` that say how tokens are drawn; raises ValueError if one is out of range."""
    if not temperature >= 0:
        raise ValueError(
            f"{arg('temperature')} must be 0 or more; got {temperature}. 0 takes the likeliest token."
        )
    check_at_least(1, "Leave it out to draw from all tokens.", top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(
            f"top_p must be from above 0 to 1; got {top_p}. Leave it out to draw from all tokens."
        )
    if temperature > 0 and key is None:
        raise ValueError(
            f"drawing tokens needs a key; got temperature={temperature}, key=None. Give jax.random.key(0)."
        )
    ends = [int(token) for token in (eos if isinstance(eos, Sequence) else [eos])]
    if not all(0 <= token < config.vocab_size for token in [*ends, pad or 0]):
        raise ValueError(
            f"eos and pad must be from 0 to vocab_size - 1; got eos={ends}, pad={pad}, vocab_size={config.vocab_size}. "
            "Give those of the model's tokenizer."
        )
    return Sampling(
        temperature=jnp.float32(np.clip(temperature, _FLOAT32.tiny, _FLOAT32.max))
        if temperature
        else None,
        top_k=top_k,
        top_p=None if top_p is None or math.isclose(top_p, 1.0) else jnp.float32(top_p),
        eos=jnp.asarray(ends, jnp.int32),
        pad=jnp.int32((ends or [0])[0] if pad is None else pad),
        key=jax.random.key(0) if key is None else key,
    )


def draw(
    sampling: Sampling, scores: Float[Array, "batch vocab"], position: Int[Array, ""]
) -> Int[Array, " batch"]:
    """Returns a token a row; -1 where a score is not finite. Draws depend on the key and the position of the longest row."""
    if sampling.temperature is None:
        tokens = jnp.argmax(scores, axis=-1)
    else:
        kept = keep_highest(_tempered(scores, sampling.temperature), sampling.top_k)
        kept = kept if sampling.top_p is None else keep_likeliest(kept, sampling.top_p)
        tokens = jax.random.categorical(jax.random.fold_in(sampling.key, position), kept)
    return jnp.where(jnp.isfinite(scores).all(-1), tokens, NO_TOKEN).astype(jnp.int32)


def _tempered(
    scores: Float[Array, "batch vocab"], temperature: Float[Array, ""]
) -> Float[Array, "batch vocab"]:
    """Returns scores divided by a temperature, shifted so that a row's highest is 0 and none overflows."""
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    return (wide - wide.max(-1, keepdims=True)).astype(jnp.float32) / temperature


def keep_highest(
    scores: Float[Array, "batch vocab"], top_k: int | None
) -> Float[Array, "batch vocab"]:
    """Returns scores with minus infinity for all but the ``top_k`` highest of a row and those equal to the lowest of these."""
    if top_k is None:
        return scores
    least = jax.lax.top_k(scores, min(top_k, scores.shape[1]))[0][:, -1:]
    return jnp.where(scores >= least, scores, -jnp.inf)


def keep_likeliest(
    scores: Float[Array, "batch vocab"], top_p: Float[Array, ""]
) -> Float[Array, "batch vocab"]:
    """Returns scores with minus infinity for all but the fewest highest of a row whose probabilities add up to ``top_p``.

    At least one is kept, and so are those equal to the lowest that is kept.
    """
    ordered = jnp.sort(scores, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    is_kept = (before < top_p) | (jnp.arange(scores.shape[1]) == 0)[
        None
    ]  # a tiny top_p is 0 in float32
    least = jnp.where(is_kept, ordered, jnp.inf).min(-1, keepdims=True)
    return jnp.where(scores >= least, scores, -jnp.inf)
