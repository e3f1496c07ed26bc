"""Generates text one token at a time, with a cache of the keys and values of earlier positions.

prompt [b, t] --one pass--> cache [l, b, t + n, kv_heads, head_dim], scores of the next token
n times: drawn token --one position--> cache, scores of the next token
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxpar._compat import Tracer
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.models.transformer.attention import Cache
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.layers import block, embed_tokens, logits, unconstrained
from jaxpar.packed import check_unpacked

NO_TOKEN = -1


def generate(
    config: TransformerConfig,
    params: PyTree,
    prompt: Any,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: PyTree = None,
) -> Int[Array, "batch length"]:
    """Returns ``prompt`` followed by ``num_tokens`` tokens drawn from the model, as without a cache.

    Args:
        config: The model.
        params: Its params, on one device or sharded over a mesh.
        prompt: Tokens ``[batch, seq]``, at least one per row.
        num_tokens: The number of tokens to add.
        temperature: Scores are divided by it before a token is drawn; 0 selects the token with the highest score.
        top_k: Tokens are drawn from those with the ``top_k`` highest scores; None: from all.
        key: A PRNG key, needed if ``temperature`` is not 0.

    Under ``jax.jit`` the values of tokens and scores cannot be checked: a token drawn from scores that are not finite is -1.

    Raises:
        TypeError: Tokens that are not integers, or params that are packed for a pipeline.
        ValueError: An argument out of range, a token outside the vocabulary, or more positions than a learned table has.
        FloatingPointError: The model's scores are not finite, so there is no token to draw.

    **Collectives**: over ``tensor`` two all-reduces of the activation of one position per layer and token. Layers that are
    sharded over ``stage`` are gathered once per call, so each device must have room for its tensor shard of all layers.
    """
    check_unpacked(params)
    prompt = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
    _check(config, prompt.shape, num_tokens, temperature, top_k, key)
    _check_tokens(config, prompt)
    key = jax.random.key(0) if key is None else key
    prompt = jnp.asarray(prompt, jnp.int32)
    tokens = _generate(config, num_tokens, temperature == 0, top_k, params, prompt, key, jnp.float32(temperature))
    _check_drawn(tokens)
    return tokens


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    config: TransformerConfig,
    num_tokens: int,
    is_greedy: bool,
    top_k: int | None,
    params: PyTree,
    prompt: Int[Array, "batch seq"],
    key: PyTree,
    temperature: Float[Array, ""],
) -> Int[Array, "batch length"]:
    batch, seq = prompt.shape

    def draw(scores: Float[Array, "batch vocab"], position: Int[Array, ""] | int) -> Int[Array, " batch"]:
        if is_greedy:
            tokens = jnp.argmax(scores, axis=-1)
        else:
            kept = keep_highest(scores.astype(jnp.float32) / temperature, top_k)
            tokens = jax.random.categorical(jax.random.fold_in(key, position), kept)
        return jnp.where(jnp.isfinite(scores).all(-1), tokens, NO_TOKEN).astype(jnp.int32)

    def one(carry: tuple, position: Int[Array, ""]) -> tuple[tuple, Int[Array, " batch"]]:
        caches, token = carry
        scores, caches = advance(config, params, token[:, None], caches, position)
        token = draw(scores, position + 1)
        return (caches, token), token

    scores, caches = advance(config, params, prompt, empty_caches(config, batch, seq + num_tokens), 0)
    first = draw(scores, seq)
    _, others = jax.lax.scan(one, (caches, first), seq + jnp.arange(num_tokens - 1))
    return jnp.concatenate([prompt, first[:, None], others.T], axis=1)


def empty_caches(config: TransformerConfig, batch: int, length: int) -> Cache:
    """Returns zeros for the keys and values of ``length`` positions in all layers."""
    shape = (config.num_layers, batch, length, config.kv_heads, config.head_dim)
    return jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)


def advance(
    config: TransformerConfig,
    params: PyTree,
    tokens: Int[Array, "batch seq"],
    caches: Cache,
    start: Int[Array, ""] | int,
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Returns the scores of the token after ``tokens``, which begin at position ``start``, and the updated caches."""

    def layer(h: Array, one_layer: tuple[PyTree, Cache]) -> tuple[Array, Any]:
        layer_params, cache = one_layer
        return block(config, layer_params, h, unconstrained, cache, start)

    h = embed_tokens(config, params[OUTER], tokens, unconstrained, start)
    h, caches = jax.lax.scan(layer, h, (params[LAYERS], caches))
    return logits(config, params[OUTER], h[:, -1:], unconstrained)[:, 0], caches


def keep_highest(scores: Float[Array, "batch vocab"], top_k: int | None) -> Float[Array, "batch vocab"]:
    """Returns scores with minus infinity for all but the ``top_k`` highest of a row and those equal to the lowest of these."""
    if top_k is None:
        return scores
    least = jax.lax.top_k(scores, min(top_k, scores.shape[1]))[0][:, -1:]
    return jnp.where(scores >= least, scores, -jnp.inf)


def _check(
    config: TransformerConfig,
    shape: tuple[int, ...],
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    key: PyTree,
) -> None:
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"a prompt must be tokens [batch, seq], at least one a row; got shape {shape}. Give rows of tokens."
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be positive; got {num_tokens}. Choose 1 or more.")
    if config.positions == "learned" and (room := config.max_positions - shape[1]) < num_tokens:
        raise ValueError(
            "a model with learned positions has no more positions than its table; got a prompt of "
            f"{shape[1]} and num_tokens={num_tokens}, max_positions={config.max_positions}. Cut the prompt"
            + (f", or ask for at most {room} tokens." if room > 0 else ".")
        )
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more; got {temperature}. 0 takes the likeliest token.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be positive; got {top_k}. Leave it out to draw from all tokens.")
    if temperature > 0 and key is None:
        raise ValueError(
            f"drawing tokens needs a key; got temperature={temperature}, key=None. Give jax.random.key(0)."
        )


def _check_tokens(config: TransformerConfig, prompt: jax.Array | np.ndarray) -> None:
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers; got {prompt.dtype}. Give those that the model's tokenizer makes.")
    if isinstance(prompt, Tracer):
        return
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= config.vocab_size:
        raise ValueError(
            f"tokens must be from 0 to vocab_size - 1; got tokens from {lowest} to {highest}, vocab_size={config.vocab_size}. "
            "Give those that the model's own tokenizer makes."
        )


def _check_drawn(tokens: Int[Array, "batch length"]) -> None:
    if not isinstance(tokens, Tracer) and int(tokens.min()) == NO_TOKEN:
        raise FloatingPointError(
            "a model's scores must be finite for a token to be drawn; got some that are not. Look for NaN or infinity in the "
            'params, or compute in a wider dtype, such as compute_dtype="float32".'
        )
