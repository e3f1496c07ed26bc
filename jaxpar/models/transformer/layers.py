"""The transformer as a LayeredModel: embedding, block, head.

    tokens [b, t] --> h [b, t, d] --> block ... block --> norm --> logits [b, t, v]

    block:  h = h + attention(norm_1(h));  h = h + mlp(norm_2(h))      norm_order="pre"
            h = h + norm_1(attention(h));  h = h + norm_2(mlp(h))      norm_order="post"

The model does not depend on a mesh. Sharding constraints on activations are passed as a function ``constrain(x, where)``, which
returns x. ``where`` is "stream" for h, "in" and "out" for the inputs and outputs of attention, MLP and head, and "whole" for
looked up embeddings. "kv_heads" is for weights and biases [..., kv_heads, qkv, head_dim] with copied heads.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PyTree

from jaxpar.layered_model import LayeredModel
from jaxpar.models.lora import einsum
from jaxpar.models.transformer.attention import Cache, Constrain, Span, attention, runs_in, unconstrained
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.norms import norm

Activations = Array | tuple[Array, Array]  # h, or h and the segment of each token


def make_model(config: TransformerConfig, *, constrain: Constrain = unconstrained) -> LayeredModel:
    """Returns the transformer as a LayeredModel whose batch has ``tokens`` [batch, seq] and whose outputs are logits.

    If the batch has ``segments`` [batch, seq], int32, as packed documents do, attention does not cross from one segment, a run
    of equal numbers, to another, and positions begin anew in each: a segment's logits are those of the same tokens in a row of
    their own.

    Args:
        config: The model.
        constrain: Constrains the sharding of activations, such as ``jaxpar.tensor_parallel.sequence_parallel``.
    """

    def embed(outer: PyTree, batch: PyTree) -> Activations:
        tokens = jnp.asarray(batch["tokens"])
        if "segments" not in batch:
            return embed_tokens(config, outer, tokens, Span.first(tokens.shape[1]), constrain)
        segments = runs_in(jnp.asarray(batch["segments"]))
        return embed_tokens(config, outer, tokens, Span.packed(segments), constrain), segments

    def layer(params: PyTree, x: Activations) -> Activations:
        if not isinstance(x, tuple):
            return block(config, params, x, Span.first(x.shape[1]), constrain)[0]
        h, segments = x
        return block(config, params, h, Span.packed(segments), constrain)[0], segments

    def head(outer: PyTree, x: Activations) -> Float[Array, "batch seq vocab"]:
        return logits(config, outer, x[0] if isinstance(x, tuple) else x, constrain)

    return LayeredModel(embed, layer, head)


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
    h = jnp.take(outer["tokens"], rows, axis=0, mode="fill").astype(config.compute_dtype)
    if config.positions == "learned":
        if tokens.shape[1] > config.max_positions:
            raise ValueError(
                "a sequence must not be longer than a learned table of positions; got a sequence of "
                f"{tokens.shape[1]}, max_positions={config.max_positions}. Cut it, or choose a larger max_positions."
            )
        is_table = span.is_start and span.segments is None
        first = outer["positions"][None, : tokens.shape[1]]
        rows = first if is_table else jnp.take(outer["positions"], span.positions, axis=0, mode="clip")
        h = h + rows.astype(h.dtype)
    h = constrain(h, "whole")
    return norm(config, outer["norm_in"], h) if config.norm_embedding else h


def block(
    config: TransformerConfig,
    params: PyTree,
    h: Float[Array, "batch seq embed"],
    span: Span,
    constrain: Constrain,
    cache: Cache | None = None,
) -> tuple[Float[Array, "batch seq embed"], Cache | None]:
    """Returns the output of a block, and its cache updated with the keys and values of the span's positions."""

    def normed(name: str, x: Array, order: str) -> Array:
        return norm(config, params[name], x) if config.norm_order == order else x

    h = constrain(h, "stream")
    x = constrain(normed("norm_1", h, "pre"), "in")
    mixed, cache = attention(config, params["attention"], x, span, cache, constrain)
    h = h + normed("norm_1", constrain(mixed, "out"), "post")
    x = constrain(normed("norm_2", h, "pre"), "in")
    return h + normed("norm_2", constrain(mlp(config, params["mlp"], x), "out"), "post"), cache


def mlp(config: TransformerConfig, params: PyTree, x: Float[Array, "batch seq embed"]) -> Array:
    """Returns GELU(x w_up) w_down, or (SiLU(x w_gate) * x w_up) w_down."""
    up = einsum("btd,dgf->btgf", x, params["w_up"].astype(x.dtype))
    if "b_up" in params:
        up = up + params["b_up"].astype(x.dtype)[None, None]
    if config.mlp == "swiglu":
        hidden = jax.nn.silu(up[:, :, 0]) * up[:, :, 1]
    else:
        hidden = jax.nn.gelu(up[:, :, 0], approximate=True)
    out = einsum("btf,fd->btd", hidden, params["w_down"].astype(x.dtype))
    return out + params["b_down"].astype(x.dtype)[None, None] if "b_down" in params else out


def logits(config: TransformerConfig, outer: PyTree, h: Float[Array, "batch seq embed"], constrain: Constrain) -> Array:
    """Returns the scores ``[batch, seq, vocab]`` of each token as the next one."""
    h = constrain(norm(config, outer["norm_out"], constrain(h, "stream")), "in")
    if config.tied:
        scores = jnp.einsum("btd,vd->btv", h, outer["tokens"].astype(h.dtype))
    else:
        scores = jnp.einsum("btd,dv->btv", h, outer["head"].astype(h.dtype))
    if config.vocab_rows == config.vocab_size:
        return scores
    real = jnp.arange(config.vocab_rows) < config.vocab_size
    return jnp.where(real[None, None], scores, jnp.finfo(scores.dtype).min)
