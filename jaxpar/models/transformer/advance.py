"""Passes tokens through all layers, beside a cache: whole prompts, or one token a row.

A step of one token a row takes as long as the weights take to be read, once, if little else is done. So for GPUs a loop has
a few layers in each trip, and of a few rows there are copies.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.devices import on_gpus
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.models.transformer.attention import unconstrained
from jaxpar.models.transformer.cache import Cache
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.layers import block, embed_tokens
from jaxpar.models.transformer.span import Span

# With fewer there are more counters and slices of vectors, with more it takes longer to compile.
LAYERS_OF_A_TRIP = 4
# The layers of a step of one row that are written out, without a loop. Where products add biases, XLA would copy all weights.
MOST_OF_ONE_ROW = 24
MOST_TRIPS = (
    16  # of which XLA keeps the products as it has recorded them (xla_cmd_buffer_trace_cache_size)
)
ROWS_OF_A_PRODUCT = 8  # of 16-bit floats: XLA pads fewer before each product

Index = Int[Array, ""] | int


def advance(
    config: TransformerConfig,
    params: PyTree,
    tokens: Int[Array, "batch seq"],
    span: Span,
    cache: Cache,
) -> tuple[Float[Array, "batch seq embed"], Cache]:
    """Returns the output of the last block for the tokens of a span, and the cache with their keys and values."""
    is_step = on_gpus() and not span.is_start
    h = embed_tokens(config, params[OUTER], tokens, span, unconstrained)
    copies = _copies(len(tokens)) if is_step else 1
    if copies > 1:
        h, positions, lengths = (
            jnp.repeat(each, copies, axis=0) for each in (h, span.positions, span.lengths)
        )
        span = span._replace(positions=positions, lengths=lengths)
        h = jax.lax.optimization_barrier(
            h
        )  # XLA would take equal rows for a bias of the first product
    for index, own in enumerate(params[OUTER].get("dense_layers", ())):
        h, cache = _layer(config, own, span, h, cache, index)
    at_once = _layers_of_a_trip(config, params[LAYERS], len(tokens), is_step)
    h, cache = _stacked_layers(config, params[LAYERS], span, h, cache, at_once)
    return h[::copies], cache


def _layers_of_a_trip(config: TransformerConfig, params: PyTree, rows: int, is_step: bool) -> int:
    if not on_gpus():
        return 1
    is_cast = any(leaf.dtype != jnp.dtype(config.compute_dtype) for leaf in jax.tree.leaves(params))
    if is_cast or not is_step:
        at_once = 1  # XLA would cast the weights of all layers of a trip before the first is used
    elif rows == 1 and config.num_layers <= MOST_OF_ONE_ROW and config.biases is False:
        at_once = config.num_layers
    else:
        at_once = LAYERS_OF_A_TRIP
    return max(at_once, math.ceil(config.num_layers / MOST_TRIPS))


def _copies(rows: int) -> int:
    """Returns how many copies of each row make products of as many rows as libraries multiply.

    XLA also computes a product of one row without a library, if it is small, and reads a transposed copy of all its weights.
    """
    return (
        1 if rows >= ROWS_OF_A_PRODUCT else ROWS_OF_A_PRODUCT // math.gcd(rows, ROWS_OF_A_PRODUCT)
    )


def _layer(
    config: TransformerConfig, own: PyTree, span: Span, h: Array, cache: Cache, index: Index
) -> tuple[Array, Cache]:
    h, written, _ = block(config, own, h, span, unconstrained, cache._replace(layer=index))
    return h, (written or cache)._replace(layer=None)


def _stacked_layers(
    config: TransformerConfig, params: PyTree, span: Span, h: Array, cache: Cache, at_once: int
) -> tuple[Array, Cache]:
    """Returns the output of the stacked layers, of which a loop runs so many at once, and those left over come after it."""
    count, before = config.num_stacked_layers, config.num_leading_layers

    def some(first: Index, h: Array, cache: Cache, count: int) -> tuple[Array, Cache]:
        for j, own in enumerate(_layers_at(params, first, count)):
            h, cache = _layer(config, own, span, h, cache, first + j + before)
        return h, cache

    def trip(carry: tuple[Array, Array, Cache]) -> tuple[Array, Array, Cache]:
        i, h, cache = carry
        return i + 1, *some(i * at_once, h, cache, at_once)

    if at_once >= count:
        return some(0, h, cache, count)
    # A loop of JAX's over inputs would have a second counter, by which XLA does not know where a layer's weights begin.
    num_trips, left = divmod(count, at_once)
    _, h, cache = jax.lax.while_loop(
        lambda carry: carry[0] < num_trips, trip, (jnp.int32(0), h, cache)
    )
    return some(count - left, h, cache, left) if left else (h, cache)


def _layers_at(params: PyTree, first: Index, count: int) -> Iterator[PyTree]:
    """Yields the params of ``count`` layers."""
    is_vector = lambda a: a.ndim == 2
    # Vectors together: a norm's kernel reads an array from its beginning, so each would first be cut out of the stack.
    some = jax.tree.map(
        lambda a: jax.lax.dynamic_slice_in_dim(a, first, count) if is_vector(a) else a, params
    )

    def of_layer(j: int) -> PyTree:
        at = lambda a: jax.lax.dynamic_index_in_dim(
            a, j if is_vector(a) else first + j, keepdims=False
        )
        return jax.tree.map(at, some)

    return map(of_layer, range(count))
