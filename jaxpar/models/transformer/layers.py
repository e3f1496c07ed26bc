"""The transformer as a LayeredModel: embedding, block, head.

    tokens [b, t] --> h [b, t, d] --> block ... block --> norm --> logits [b, t, v]

    block:  h = h + attention(norm_1(h));  h = h + mlp(norm_2(h))      norm_order="pre"
            h = h + norm_1(attention(h));  h = h + norm_2(mlp(h))      norm_order="post"

The looked up embeddings, what a block adds to h, and the logits may be multiplied by a number each (Granite).
With experts these take the place of the MLP. Leading layers that have an MLP all the same run in the embedding.

The model does not depend on a mesh. Sharding constraints on activations are passed as a function ``constrain(x, where)``, which
returns x. ``where`` is "stream" for h, "in" and "out" for the inputs and outputs of attention, MLP and head; "out" also for
looked up embeddings. "kv_heads" is for weights and biases [..., kv_heads, qkv, head_dim] with copied heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree

from jaxpar import context_parallel
from jaxpar.backward.padded_dims import without_padding
from jaxpar.documents import Documents
from jaxpar.fields import arg
from jaxpar.layered_model import LayeredModel
from jaxpar.models.transformer.attention import (
    Cache,
    Constrain,
    attention,
    documents_of,
    unconstrained,
)
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.experts import experts
from jaxpar.models.transformer.mlp import mlp
from jaxpar.models.transformer.norms import norm, scaled
from jaxpar.models.transformer.padding import real_tokens, token_weights
from jaxpar.models.transformer.products import check_products
from jaxpar.models.transformer.router import RouterSums, route
from jaxpar.models.transformer.router_losses import RoutedLogits
from jaxpar.models.transformer.span import Span, runs_in
from jaxpar.row_dependence import row_wise


class Stream(NamedTuple):
    """What travels between blocks, where it is more than ``h``.

    Attributes:
        h: The activations.
        segments: The segments of the tokens.
        sums: The sums of routers.
        positions: The positions of the tokens.
        real: For a model with experts, whether a token is not padding.
        documents: Where segments lie, for a kernel that takes them so: found once, not in each pass of each layer.
    """

    h: Float[Array, "batch seq embed"]
    segments: Int[Array, "batch seq"] | None
    sums: RouterSums | None
    positions: Int[Array, "batch seq"] | None = None
    real: Bool[Array, "batch seq"] | None = None
    documents: Documents | None = None


Activations = Array | Stream


def make_model(
    config: TransformerConfig,
    *,
    constrain: Constrain = unconstrained,
    weights: Callable[[PyTree], Any] = token_weights,
) -> LayeredModel:
    """Returns the transformer as a LayeredModel whose batch has ``tokens`` [batch, seq] and whose outputs are logits.

    If the batch has ``segments`` [batch, seq], int32, as packed documents do, attention does not cross from one segment, a run
    of equal numbers, to another, and positions begin anew in each: a segment's logits are those of the same tokens in a row of
    their own.

    If it has ``positions`` [batch, seq], which ``jaxpar.shard_batch`` adds for a ``context`` axis, tokens of a row may be in
    another order, and each document of a row has a segment of its own number, below seq. Over ``context`` a batch must have
    them; one that is not in the order of ``shard_batch`` gives NaN, as far as its positions show it.

    With experts, tokens that no loss depends on are padding: neither they nor a later token of their row or segment have a
    weight (``padding.py``). No expert computes them and no router counts them, so logits of such tokens are not those of a
    batch in which they are learned.

    Where routers have losses or drop tokens (``config.has_routing_losses``), outputs are ``RoutedLogits``, for
    ``add_routing_losses``.

    Args:
        config: The model.
        constrain: Constrains the sharding of activations, such as ``jaxpar.tensor_parallel.sequence_parallel``.
        weights: ``weights(batch)``: the weights of the tokens in the loss, ``[batch, seq]`` or ``[batch]``; None: all tokens
            count. By default ``weight`` of the batch, and 0 where ``targets`` is -100.

    Raises:
        ValueError: Products are asked for in FP8, for which all of the model's are too small.
    """
    check_products(config)

    def embed(outer: PyTree, batch: PyTree) -> Activations:
        tokens = jnp.asarray(batch["tokens"])
        segments = jnp.asarray(batch["segments"]) if "segments" in batch else None
        positions = jnp.asarray(batch["positions"]) if "positions" in batch else None
        segments = segments if segments is None or positions is not None else runs_in(segments)
        _check_capacity(config, segments)
        documents = row_wise(partial(documents_of, config))(segments)
        span = _span(tokens, segments, positions)._replace(documents=documents)
        h = embed_tokens(config, outer, tokens, span, constrain)
        if segments is not None and config.max_documents is not None:
            are_few = _num_documents(segments, positions) <= config.max_documents
            h = h + jnp.where(are_few, 0, jnp.nan).astype(h.dtype)[:, None, None]
        if context_parallel.num_parts() > 1 and positions is not None:
            # Added, so that the backward pass is that of a lookup alone (``pipeline/embed_and_head.py``).
            h = (
                h
                + jnp.where(_are_in_place(positions, segments), 0, jnp.nan).astype(h.dtype)[
                    :, None, None
                ]
            )
        for params in outer.get("dense_layers", ()):
            h, *_ = block(config, params, h, span, constrain)
        sums = RouterSums.zeros(config, h) if config.has_routing_losses else None
        given = weights(batch) if config.experts is not None else None
        real = None if given is None else real_tokens(given, span, tokens.shape)
        others = (segments, sums, positions, real)
        return h if all(each is None for each in others) else Stream(h, *others, documents)

    def layer(params: PyTree, x: Activations) -> Activations:
        stream = x if isinstance(x, Stream) else Stream(x, None, None)
        span = _span(stream.h, stream.segments, stream.positions)._replace(
            documents=stream.documents
        )
        h, _, sums = block(
            config, params, stream.h, span, constrain, sums=stream.sums, real=stream.real
        )
        return stream._replace(h=h, sums=sums) if isinstance(x, Stream) else h

    def head(outer: PyTree, x: Activations) -> Float[Array, "batch seq vocab"] | RoutedLogits:
        stream = x if isinstance(x, Stream) else Stream(x, None, None)
        scores = logits(config, outer, stream.h, constrain)
        return scores if stream.sums is None else RoutedLogits(scores, stream.sums)

    return LayeredModel(embed, layer, head)


def _span(tokens: Array, segments: Array | None, positions: Array | None) -> Span:
    if positions is not None:
        return Span.given(positions, segments)
    seq = tokens.shape[1]
    return Span(jnp.arange(seq)[None], seq) if segments is None else Span.packed(segments)


def _check_capacity(config: TransformerConfig, segments: Array | None) -> None:
    """Raises for experts with room for some tokens of a row, where a row has several documents or is on several devices."""
    factor, parts = config.experts and config.experts.capacity_factor, context_parallel.num_parts()
    if factor is not None and segments is not None:
        raise ValueError(
            "an expert has room for some tokens of a row, which its documents would share; got segments in the batch and "
            f"capacity_factor={factor}. Leave capacity_factor out, or the segments."
        )
    if factor is not None and parts > 1:
        raise ValueError(
            "an expert has room for some tokens of a whole row, which context splits; got "
            f"capacity_factor={factor}, {arg(context=parts)}. Leave capacity_factor out, or use {arg(context=1)}."
        )


def _are_in_place(
    positions: Int[Array, "batch seq"], segments: Int[Array, "batch seq"] | None
) -> Bool[Array, " batch"]:
    """Returns whether the first token of each segment is where the order of ``shard_batch`` says, by each of its tokens."""
    starts = context_parallel.places(positions.shape[1])[None] - positions
    goes_on = starts[:, 1:] == starts[:, :-1]
    return jnp.all(
        goes_on if segments is None else goes_on | (segments[:, 1:] != segments[:, :-1]), axis=1
    )


def _num_documents(
    segments: Int[Array, "batch seq"], positions: Int[Array, "batch seq"] | None
) -> Int[Array, " batch"]:
    """Returns the number of documents of each row; over ``context`` of the whole row."""
    if positions is None:
        return segments[:, -1] + 1  # they are numbered
    return context_parallel.sum_over_sequence(jnp.sum(positions == 0, axis=1))


def embed_tokens(
    config: TransformerConfig,
    outer: PyTree,
    tokens: Integer[Array, "batch seq"],
    span: Span,
    constrain: Constrain,
) -> Float[Array, "batch seq embed"]:
    """Returns the input of the first block for the tokens of a span, NaN for tokens outside the vocabulary."""
    tokens = tokens.astype(jnp.int32)
    # Otherwise -1 would select the last row, and a token from vocab_size to vocab_rows - 1 a padding row.
    rows = jnp.where((tokens >= 0) & (tokens < config.vocab_size), tokens, config.vocab_rows)
    h: Array = _look_up(jnp.asarray(outer["tokens"]), rows, config.compute_dtype)
    h = scaled(h, config.embedding_multiplier)
    if config.positions == "learned":
        if (seq := tokens.shape[1] * context_parallel.num_parts()) > config.max_positions:
            raise ValueError(
                "a sequence must not be longer than a learned table of positions; got a sequence of "
                f"{seq}, max_positions={config.max_positions}. Cut it, or choose a larger max_positions."
            )
        is_table = span.is_start and span.is_in_order and span.segments is None
        first = outer["positions"][None, : tokens.shape[1]]
        rows = (
            first if is_table else jnp.take(outer["positions"], span.positions, axis=0, mode="clip")
        )
        h = h + rows.astype(h.dtype)
    h = constrain(h, "out")
    return norm(config, outer["norm_in"], h) if config.norm_embedding else h


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _look_up(
    table: Float[Array, "vocab embed"], rows: Int[Array, "batch seq"], dtype: Any
) -> Array:
    """Returns rows of a table, cast before XLA adds up what the shards of its vocabulary found; gradients are cast after."""
    return jnp.take(table.astype(dtype), rows, axis=0, mode="fill")


@_look_up.defjvp
def _(dtype: Any, inputs: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _look_up(*inputs, dtype), jnp.take(tangents[0], inputs[1], axis=0, mode="fill").astype(
        dtype
    )


def block(
    config: TransformerConfig,
    params: PyTree,
    h: Float[Array, "batch seq embed"],
    span: Span,
    constrain: Constrain,
    cache: Cache | None = None,
    sums: RouterSums | None = None,
    real: Bool[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq embed"], Cache | None, RouterSums | None]:
    """Returns the output of a block, its cache updated with the keys and values of the span's positions, and the sums.

    Tokens that are not ``real`` get no expert. With a cache products are in the compute dtype: in FP8 rows share a scale.
    """
    config = config if cache is None else replace(config, products="compute")

    def normed(name: str, x: Array, order: str) -> Array:
        return norm(config, params[name], x) if config.norm_order == order else x

    def plus(h: Array, name: str, y: Array) -> Array:
        return h + scaled(normed(name, constrain(y, "out"), "post"), config.residual_multiplier)

    h = constrain(h, "stream")
    x = constrain(normed("norm_1", h, "pre"), "in")
    mixed, cache = attention(config, params["attention"], x, span, cache, constrain)
    h = plus(h, "norm_1", mixed)
    x = constrain(normed("norm_2", h, "pre"), "in")
    if config.experts is None or "mlp" in params:
        y = mlp(config, params["mlp"], x)
    else:
        # Copies of a row (``advance.py``) have the experts of the first.
        copies = 1 if cache is None else len(x) // cache.batch
        x = x[::copies]
        routing = route(config.experts, params["router"], x, real)
        # Rows are dim 0, and what one drops does not depend on others.
        of_tokens = row_wise(partial(experts, config, drops=cache is None))
        y, dropped = of_tokens(params, x, routing)
        if sums is not None:
            sums = sums.plus(config.experts, params["router"], routing, dropped, span.segments)
        y = jnp.repeat(y, copies, axis=0) if copies > 1 else y
    return plus(h, "norm_2", y), cache, sums


def logits(
    config: TransformerConfig,
    outer: PyTree,
    h: Float[Array, "batch seq embed"],
    constrain: Constrain,
) -> Array:
    """Returns the scores ``[batch, seq, vocab]`` of each word of the vocabulary as the next one."""
    h = constrain(norm(config, outer["norm_out"], constrain(h, "stream")), "in")
    if config.tied:
        scores = jnp.einsum("btd,vd->btv", h, outer["tokens"].astype(h.dtype))
    else:
        scores = jnp.einsum("btd,dv->btv", h, outer["head"].astype(h.dtype))
    return without_padding(scaled(scores, 1 / config.logits_divisor), config.vocab_size)
