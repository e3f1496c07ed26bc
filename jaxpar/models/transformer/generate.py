"""Generates text one token at a time, with a cache of the keys and values of earlier positions.

prompts, padded on the right --one pass--> cache [l, b, kv_heads, length, head_dim], scores of the next token
up to num_tokens times: drawn token --one position a row--> cache, scores of the next token

Lengths are rounded up to powers of two, so that prompts of all lengths share a few compiled programs. Padding is never attended
to: it comes after the last token of a row, and a generated token replaces it before it is reached.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar._compat import Tracer
from jaxpar.devices import on_gpus
from jaxpar.dtypes import on_host
from jaxpar.fields import check_at_least
from jaxpar.layered_model import LAYERS, OUTER, check_unpacked
from jaxpar.models.transformer.advance import advance
from jaxpar.models.transformer.attention import unconstrained
from jaxpar.models.transformer.cache import Cache, empty_cache
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.layers import logits
from jaxpar.models.transformer.sampling import NO_TOKEN, Sampling, draw, make_sampling
from jaxpar.models.transformer.span import Span

LEAST = 16  # below it a program for each power of two would save nothing


class Prompts(NamedTuple):
    """Prompts as a compiled program takes them.

    Attributes:
        tokens: Those of the prompts, padded with zeros on the right to a power of two.
        lengths: The tokens of each row.
        sizes: The positions that the cache must have, and the columns for new tokens.
        rows: The rows as they were given, on the host, if they are of unequal lengths.
    """

    tokens: Int[Array, "batch seq"]
    lengths: Int[np.ndarray, " batch"]
    sizes: tuple[int, int]
    rows: list[np.ndarray] | None


def generate(
    config: TransformerConfig,
    params: PyTree,
    prompt: Any,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: PyTree = None,
    eos: int | Sequence[int] = (),
    pad: int | None = None,
) -> Int[Array, "batch length"] | list[np.ndarray]:
    """Returns each prompt followed by ``num_tokens`` tokens drawn from the model, as without a cache.

    The likeliest tokens of a row do not depend on the other rows. With a "dynamic" rope scaling a key keeps the rotation of the
    length that its row had when the key was computed, as in ``transformers``, so beyond the original positions the tokens are
    not those of full passes, which rotate all keys anew.

    Args:
        config: The model.
        params: Its params, on one device or sharded over a mesh.
        prompt: Tokens ``[batch, seq]``, at least one per row; or a list of rows of unequal lengths.
        num_tokens: The number of tokens to add.
        temperature: Scores are divided by it before a token is drawn; 0 selects the token with the highest score.
        top_k: Tokens are drawn from those with the ``top_k`` highest scores; None: from all.
        top_p: Tokens are drawn from the fewest likeliest ones whose probabilities add up to this (Holtzman et al. 2019, arXiv
            1904.09751), after ``top_k``; None: from all.
        key: A PRNG key, needed if ``temperature`` is not 0.
        eos: The token, or tokens, that end a row.
        pad: The token that fills a row of an array after its end; None: the first of ``eos``.

    Returns:
        For an array of prompts ``[batch, seq]`` an array ``[batch, seq + num_tokens]``; for rows of unequal lengths a list of
        rows on the host, each up to and including the token that ended it.

    Under ``jax.jit`` the values of tokens and scores cannot be checked: a token drawn from scores that are not finite is -1.

    Raises:
        TypeError: Tokens that are not integers, or params that are packed for a pipeline.
        ValueError: An argument out of range, a token outside the vocabulary, or more positions than a learned table has.
        FloatingPointError: The model's scores are not finite, so there is no token to draw.

    **Collectives**: over ``tensor`` two all-reduces of the activation of one position per layer and token, on GPUs of eight
    rows at least. Layers that are sharded over ``stage`` are gathered once per call, so each device must have room for its
    tensor shard of all layers.
    """
    sampling = make_sampling(config, temperature, top_k, top_p, key=key, eos=eos, pad=pad)
    prompts, params = read_prompts(config, prompt, num_tokens), with_all_layers(params)
    state = _first(config, prompts.sizes, params, prompts.tokens, prompts.lengths, sampling)
    state = _extend(config, params, state, sampling, num_tokens)
    if prompts.rows is None:
        tokens = jnp.concatenate(
            [prompts.tokens[:, : prompts.lengths[0]], state.new[:, :num_tokens]], axis=1
        )
        check_drawn(tokens)
        return tokens
    new, counts = on_host(state.new), on_host(state.counts)
    check_drawn(new)
    return [np.concatenate([row, new[i, : counts[i]]]) for i, row in enumerate(prompts.rows)]


def stream(
    config: TransformerConfig,
    params: PyTree,
    prompt: Any,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: PyTree = None,
    eos: int | Sequence[int] = (),
) -> Iterator[list[int | None]]:
    """Returns an iterator over the tokens that ``generate`` adds: at each step one token a row, None for a row that has ended.

    The steps run as they are asked for; on several processes all must ask. Arguments are those of ``generate``, and are checked
    at once.
    """
    sampling = make_sampling(config, temperature, top_k, top_p, key=key, eos=eos)
    prompts, params = read_prompts(config, prompt, num_tokens), with_all_layers(params)
    return _steps(config, prompts, sampling, params, num_tokens)


def _steps(
    config: TransformerConfig, prompts: Prompts, sampling: Sampling, params: PyTree, num_tokens: int
) -> Iterator[list[int | None]]:
    state = _first(config, prompts.sizes, params, prompts.tokens, prompts.lengths, sampling)
    for step in range(num_tokens):
        if step:
            state = _extend(config, params, state, sampling, step + 1)
        tokens, is_in, is_done = (
            on_host(each) for each in (state.token, state.counts > step, state.done)
        )
        check_drawn(tokens)
        yield [int(token) if drawn else None for token, drawn in zip(tokens, is_in, strict=True)]
        if is_done.all():
            return


# A kernel of Triton's multiplies the weights of one layer only after XLA has copied them out of those of all layers; cuBLAS
# reads them where they are, also with the flags of a run that copy slices (``EACH_KERNEL_ONCE``).
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_dynamic_slice_fusion": True}


class JitForGpus(NamedTuple):
    """A compiled function, and the same with options for GPUs, which JAX takes only where nothing is being traced."""

    plain: Any
    for_gpus: Any

    def __call__(self, *args: Any) -> Any:
        """Returns what the function does."""
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        return (self.for_gpus if on_gpus() and not is_traced else self.plain)(*args)


def jit_for_gpus(
    for_gpus: dict[str, Any], **how: Any
) -> Callable[[Callable[..., Any]], JitForGpus]:
    """Returns a decorator to compile a function; ``how`` are arguments of ``jax.jit``, ``for_gpus`` options of XLA."""
    return lambda function: JitForGpus(
        jax.jit(function, **how), jax.jit(function, compiler_options=for_gpus, **how)
    )


class _State(NamedTuple):
    """Rows that are being generated.

    Attributes:
        cache: Keys and values of all layers.
        token: The last token of each row, which is not in the cache.
        positions: Its position.
        done: Whether the row has ended.
        counts: The tokens drawn for the row, up to and including the one that ended it.
        num_new: The tokens drawn for the batch.
        new: These tokens, then padding.
    """

    cache: Cache
    token: Int[Array, " batch"]
    positions: Int[Array, " batch"]
    done: Bool[Array, " batch"]
    counts: Int[Array, " batch"]
    num_new: Int[Array, ""]
    new: Int[Array, "batch room"]


@jit_for_gpus(BY_CUBLAS, static_argnums=(0, 1))
def _first(
    config: TransformerConfig,
    sizes: tuple[int, int],
    params: PyTree,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"],
    sampling: Sampling,
) -> _State:
    """Returns the rows with their first token."""
    batch, seq = tokens.shape
    span = Span(jnp.arange(seq)[None], lengths[:, None])
    h, cache = advance(config, params, tokens, span, empty_cache(config, batch, sizes[0]))
    last = jnp.take_along_axis(h, lengths[:, None, None] - 1, axis=1)
    nothing, none = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    new = jnp.full((batch, sizes[1]), sampling.pad, jnp.int32)
    state = _State(cache, nothing, lengths - 1, none, nothing, jnp.int32(0), new)
    return _add(state, sampling, logits(config, params[OUTER], last, unconstrained)[:, 0])


@jit_for_gpus(BY_CUBLAS, static_argnums=0, donate_argnums=2)
def _extend(
    config: TransformerConfig,
    params: PyTree,
    state: _State,
    sampling: Sampling,
    num_tokens: Int[Array, ""] | int,
) -> _State:
    """Returns the rows after ``num_tokens`` tokens, or once all have ended."""

    def one(state: _State) -> _State:
        positions = state.positions[:, None]
        span = Span(positions, positions + 1, is_start=False)
        h, cache = advance(config, params, state.token[:, None], span, state.cache)
        scores = logits(config, params[OUTER], h, unconstrained)[:, 0]
        return _add(state._replace(cache=cache), sampling, scores)

    return jax.lax.while_loop(
        lambda state: (state.num_new < num_tokens) & ~state.done.all(), one, state
    )


def _add(state: _State, sampling: Sampling, scores: Float[Array, "batch vocab"]) -> _State:
    """Returns the rows with one more token each, drawn by its scores."""
    token = draw(sampling, scores, (state.positions + 1).max())
    token = jnp.where(state.done, sampling.pad, token)
    return state._replace(
        token=token,
        positions=state.positions + 1,
        done=state.done | (token[:, None] == sampling.eos[None]).any(-1),
        counts=state.counts + ~state.done,
        num_new=state.num_new + 1,
        new=jax.lax.dynamic_update_slice_in_dim(state.new, token[:, None], state.num_new, axis=1),
    )


def with_all_layers(params: PyTree) -> PyTree:
    """Returns params whose layers are not sharded over their leading dim: each step needs all of them."""
    check_unpacked(params)

    def gather(leaf: Any) -> Any:
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if (
            not isinstance(sharding, jax.sharding.NamedSharding)
            or not sharding.spec
            or sharding.spec[0] is None
        ):
            return leaf
        spec = jax.sharding.PartitionSpec(None, *sharding.spec[1:])
        return jax.device_put(leaf, jax.sharding.NamedSharding(sharding.mesh, spec))

    return params | {LAYERS: jax.tree.map(gather, params[LAYERS])}


# Prompts --------------------------------------------------------------------------------------------------------------------


def read_prompts(config: TransformerConfig, prompt: Any, num_tokens: int) -> Prompts:
    """Returns prompts ready for a model; raises for those that it cannot continue by ``num_tokens`` tokens."""
    rows = _unequal_rows(prompt)
    if rows is None:
        tokens = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
        _check_shape(tokens.shape)
        check_tokens(config, tokens)
        lengths = [tokens.shape[1]] * len(tokens)
    else:
        lengths = [len(row) for row in rows]
        _check_shape((len(rows), min(lengths)))
        check_tokens(config, np.concatenate(rows))
        rows = [row.astype(np.int32) for row in rows]
        tokens = np.array([*zip_longest(*rows, fillvalue=0)]).T
    longest = max(lengths)
    check_at_least(1, num_tokens=num_tokens)
    if config.positions == "learned" and (room := config.max_positions - longest) < num_tokens:
        raise ValueError(
            "a model with learned positions has no more positions than its table; got a prompt of "
            f"{longest} and num_tokens={num_tokens}, max_positions={config.max_positions}. Cut the prompt"
            + (f", or ask for at most {room} tokens." if room > 0 else ".")
        )
    most = config.max_positions if config.positions == "learned" else None
    padded = jnp.pad(
        jnp.asarray(tokens, jnp.int32), ((0, 0), (0, round_up(longest, most) - longest))
    )
    sizes = round_up(longest + num_tokens, most), round_up(num_tokens, None)
    return Prompts(padded, np.asarray(lengths, np.int32), sizes, rows)


def next_power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not below ``count``, which is positive.

    >>> next_power_of_two(3)
    4
    """
    return 1 << (count - 1).bit_length()


def round_up(length: int, most: int | None) -> int:
    """Returns the smallest power of two from 16 on that is not below ``length``, and at most ``most``."""
    rounded = max(LEAST, next_power_of_two(length))
    return rounded if most is None else min(rounded, most)


def _unequal_rows(prompt: Any) -> list[np.ndarray] | None:
    """Returns the rows of a prompt that is no array and whose rows are of unequal lengths."""
    if isinstance(prompt, (jax.Array, np.ndarray)) or not isinstance(prompt, Sequence):
        return None
    rows = [np.asarray(row) for row in prompt]
    return (
        rows if all(row.ndim == 1 for row in rows) and len({len(row) for row in rows}) > 1 else None
    )


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"a prompt must be tokens [batch, seq], at least one a row; got shape {shape}. Give rows of tokens."
        )


def check_tokens(config: TransformerConfig, prompt: jax.Array | np.ndarray) -> None:
    """Raises for tokens that are no integers, or outside the vocabulary."""
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(
            f"tokens must be integers; got {prompt.dtype}. Give those that the model's tokenizer makes."
        )
    if isinstance(prompt, Tracer):
        return
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= config.vocab_size:
        raise ValueError(
            f"tokens must be from 0 to vocab_size - 1; got tokens from {lowest} to {highest}, vocab_size={config.vocab_size}. "
            "Give those that the model's own tokenizer makes."
        )


def check_drawn(tokens: jax.Array | np.ndarray) -> None:
    """Raises if a token could not be drawn."""
    if not isinstance(tokens, Tracer) and int(tokens.min()) == NO_TOKEN:
        raise FloatingPointError(
            "a model's scores must be finite for a token to be drawn; got some that are not. Look for NaN or infinity in the "
            'params, or compute in a wider dtype, such as compute_dtype="float32".'
        )
