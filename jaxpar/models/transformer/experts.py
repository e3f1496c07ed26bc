"""The experts of a layer: each token's experts multiply it, and their outputs are added with the router's weights.

    x [t, d] --dispatch--> rows, by expert --gate, up--> hidden * weight --down--> rows --combine--> y [t, d]

The router's weight multiplies the hidden rows, not the outputs, which the backward pass would have to store.

Nothing is dropped: an expert has as many rows as tokens chose it. Or, with ``capacity_factor``, each expert has room for a
fixed number of tokens of a row of the batch, and the first ones get it: no token depends on later ones, and a row drops the
same tokens in every batch and on every mesh.

Where a mesh splits layers over automatic axes (jaxpar's ``tensor``), its shards are the leading dim of all arrays here, so that
each works on its own experts, or on its own slice of the hidden width of all of them, and the sum over that dim is the one
all-reduce of the forward pass. Its transpose, of the broadcast input, is that of the backward pass:

    expert_split="experts"       expert 0, 1 | expert 2, 3      rows of the own experts; balanced if the routing is
    expert_split="expert_mlp"    half of each | half of each    all rows; always balanced, products half as wide

Where the params' sharding puts the experts over ``data``, a replica has the weights of its own experts alone, and rows travel:

    all_to_all   each row to the owner of its expert, with its weight and the expert's number; the result back the same way
    gather       all rows to all replicas; the results of the own experts are added over them (for many experts a token)

All arrays have fixed sizes, so a replica has room for ``expert_buffer`` times the rows that its own tokens have, as many as it
gets if the routing is balanced. If it gets more, the layer's output is NaN, and with it the loss: nothing is dropped in
silence, and ``make_train_step`` skips and counts the step. Beside an automatic axis each of its shards sends a slice of the
width of rows and has a slice of the hidden width of each expert, whatever ``expert_split`` is.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.devices import on_gpus
from jaxpar.models.grouped_product import TILE, fits, grouped_product
from jaxpar.models.lora import is_adapted
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.dispatch import (
    OWNERS,
    Shards,
    Slots,
    by_expert_first,
    combine,
    dispatch,
    dropless,
    num_over,
    within_capacity,
)
from jaxpar.models.transformer.mlp import activated, mlp
from jaxpar.models.transformer.router import Routing

# (k, tokens [shards, t, d], weights [t, k], slots) -> [shards, t, d], of which the sum over the shards is the output
OfRows = Callable[[int, Array, Array, Slots], Array]


def experts(
    config: TransformerConfig,
    params: PyTree,
    x: Float[Array, "batch seq embed"],
    routing: Routing,
    *,
    drops: bool = True,
) -> tuple[Float[Array, "batch seq embed"], Int[Array, " batch"]]:
    """Returns the sum of the experts' outputs for each token, and the number of pairs that each row drops.

    Args:
        config: The model.
        params: The params of a layer, with ``experts`` and ``shared``. Inside a step that is manual over ``data`` the experts
            may be those alone that this replica owns.
        x: The normalized input.
        routing: The experts of each token and their weights.
        drops: Whether ``capacity_factor`` applies.

    Raises:
        ValueError: The experts have factors of LoRA, or are of another number.

    **Collectives**: where the layer is split over an axis, an all-reduce of ``x`` over it in the forward pass, and in the
    backward pass one of ``x`` and one of the weights of pairs. Where replicas own experts, three all-to-alls over ``data`` in
    the forward pass and three in the backward pass, two of rows and a small one of weights; or two all-gathers and a
    reduce-scatter, and their transposes. Over the other axis the rows that a replica gets are then gathered, and what it gives
    is reduced, in slices.
    """
    own, shared = params["experts"], params.get("shared")
    if adapted := [name for name, weight in own.items() if is_adapted(weight)]:
        raise ValueError(
            f"the weights of experts take no factors of LoRA; got some for {adapted[0]}. Take the weights of attention and of "
            "shared experts as targets: transformer.LAYER_WEIGHTS."
        )
    shards, num_experts = Shards.of_experts(config, len(own["w_expert_down"])), config.num_experts or 0
    capacity = capacity_of(config, x.shape[1]) if drops else None
    product, tile = _product(config, shards, x.dtype) if capacity is None else (_batched, 1)

    def times(rows: Array, name: str, sizes: Array) -> Array:
        weight = shards.split(_of_shards(shards, jnp.asarray(own[name], x.dtype), name))
        return shards.split(product(rows, weight, sizes))

    def of_rows(k: int, tokens: Array, weights: Array, slots: Slots) -> Array:
        slots = Slots(*map(shards.split, slots))
        rows = shards.split(dispatch(k, tokens, slots))
        by = shards.split(dispatch(1, shards.on_each(weights.reshape(-1, 1)), slots))
        gate = times(rows, "w_expert_gate", slots.sizes) if config.mlp == "swiglu" else None
        hidden = (activated(gate, times(rows, "w_expert_up", slots.sizes)).astype(by.dtype) * by).astype(x.dtype)
        return shards.split(combine(k, times(hidden, "w_expert_down", slots.sizes), slots))

    dropped = jnp.zeros(len(x), jnp.int32)
    if capacity is not None:
        dropped = num_over(routing.experts, num_experts, capacity)
    if shards.owners > 1:
        exchange = _gathered if _gathers(config, shards) else _sent
        # Beside a slice XLA would split the width of its source too, and of what that is made of.
        y = exchange(config, shards.whole(x), routing, shards, of_rows, capacity, tile)
        y = shards.whole(y.reshape(x.shape))
        return y if shared is None else y + mlp(config, shared, x), dropped
    if capacity is None:
        slots = dropless(routing.experts.reshape(-1), num_experts, shards, tile=tile, room=routing.experts.size)
    else:
        slots = within_capacity(routing.experts, num_experts, shards, capacity=capacity)
    tokens = shards.on_each(x.reshape(-1, x.shape[-1]))
    y = of_rows(config.experts_per_token, tokens, routing.weights, slots)
    is_cut = shared is not None and shards.count > 1 and _can_be_cut(shared, shards.count)
    y = y + _part_of_mlp(config, shared, tokens, shards) if is_cut else y
    y = shards.total(y.reshape(shards.count, *x.shape))
    return y if is_cut or shared is None else y + mlp(config, shared, x), dropped


def capacity_of(config: TransformerConfig, seq: int) -> int | None:
    """Returns how many tokens of a row of ``seq`` an expert has room for; None: for all."""
    if config.capacity_factor is None or config.num_experts is None:
        return None
    return min(seq, math.ceil(config.capacity_factor * config.experts_per_token * seq / config.num_experts))


def _of_shards(shards: Shards, weight: Array, name: str) -> Array:
    """Returns ``[shards, experts, in, out]``: each shard has some of the experts, or a slice of their hidden width."""
    if shards.by_expert:
        return weight.reshape(shards.count, -1, *weight.shape[1:])
    return _cut(weight, 1 if name == "w_expert_down" else 2, shards.count)


def _cut(weight: Array, dim: int, count: int) -> Array:
    """Returns ``[shards, ...]``, a slice of the weight along ``dim`` for each shard."""
    shape = (*weight.shape[:dim], count, -1, *weight.shape[dim + 1 :])
    return jnp.moveaxis(weight.reshape(shape), dim, 0)


def _can_be_cut(params: PyTree, count: int) -> bool:
    return not any(map(is_adapted, params.values())) and len(params["w_down"]) % count == 0


def _part_of_mlp(
    config: TransformerConfig, params: PyTree, z: Float[Array, "shards tokens embed"], shards: Shards
) -> Array:
    """Returns each shard's part of the sum over the MLP's hidden width, so that one all-reduce adds it and the experts'."""
    w_up, w_down = params["w_up"].astype(z.dtype), params["w_down"].astype(z.dtype)
    up = jnp.einsum("snd,sdgf->sngf", z, shards.split(_cut(w_up, 2, shards.count)))
    gate, up = (up[:, :, 0], up[:, :, 1]) if config.mlp == "swiglu" else (None, up[:, :, 0])
    return jnp.einsum("snf,sfd->snd", activated(gate, up), shards.split(_cut(w_down, 0, shards.count)))


# Over replicas --------------------------------------------------------------------------------------------------------------


def _gathers(config: TransformerConfig, shards: Shards) -> bool:
    """Whether all rows are gathered: they then travel once a replica, and not once an expert."""
    if config.expert_exchange == "auto":
        return config.experts_per_token >= shards.owners
    return config.expert_exchange == "gather"


def _room(config: TransformerConfig, num_tokens: int, shards: Shards, parts: int) -> tuple[int, bool]:
    """Returns the room for rows from each of ``parts`` of the replicas, and whether they may be too many for it."""
    k, num_experts = config.experts_per_token, config.num_experts or 0
    most = num_tokens * shards.owners // parts * min(k, num_experts // shards.owners)
    if config.expert_buffer is None:
        return most, False
    room = math.ceil(config.expert_buffer * k * num_tokens / parts)
    return min(room, most), room < most


def _sent(
    config: TransformerConfig,
    x: Float[Array, "batch seq embed"],
    routing: Routing,
    shards: Shards,
    of_rows: OfRows,
    capacity: int | None,
    tile: int,
) -> Float[Array, "tokens embed"]:
    """Returns the output of experts to whose owners rows are sent, and back."""
    k, owners, num_experts = config.experts_per_token, shards.owners, config.num_experts or 0
    own, tokens, here = num_experts // owners, x.reshape(-1, x.shape[-1]), dataclasses.replace(shards, count=1)
    move: Callable[[Any], Any] = lambda a: jax.lax.all_to_all(a, OWNERS, 1, 1, tiled=True)
    if capacity is None:
        room, may_overflow = _room(config, len(tokens), shards, owners)
        to = (routing.experts // own).reshape(1, -1, k)
        there = within_capacity(to, owners, here, capacity=room)
        is_over = num_over(to, owners, room)[0] > 0 if may_overflow else None
    else:
        there, is_over = within_capacity(routing.experts, num_experts, here, capacity=capacity), None
    # A slot without a pair has the expert 0 - 1, of no owner.
    marks = jnp.stack([routing.weights, (routing.experts % own + 1).astype(routing.weights.dtype)], -1)
    marks = move(dispatch(1, marks.reshape(1, -1, 2), there))[0]
    rows = shards.whole(shards.send(move, dispatch(k, shards.sliced(tokens)[None], there)))[0]
    if capacity is None:
        chosen = jax.lax.stop_gradient(marks[:, 1]).astype(jnp.int32) - 1
        slots = dropless(jnp.where(chosen < 0, own, chosen), own, shards, tile=tile, room=len(rows))
    else:
        slots = by_expert_first(owners, own, len(x) * capacity, shards)
    y = shards.sliced(shards.total(of_rows(1, shards.on_each(rows), marks[:, :1], slots)))
    return _or_nan(shards.sliced(combine(k, shards.send(move, y[None]), there))[0], is_over)


def _gathered(
    config: TransformerConfig,
    x: Float[Array, "batch seq embed"],
    routing: Routing,
    shards: Shards,
    of_rows: OfRows,
    capacity: int | None,
    tile: int,
) -> Float[Array, "tokens embed"]:
    """Returns the output of experts whose owners get all rows, and add up what they give."""
    own, tokens = (config.num_experts or 0) // shards.owners, x.reshape(-1, x.shape[-1])
    gather = lambda a: jax.lax.all_gather(a, OWNERS, axis=0, tiled=True)
    add = lambda a: jax.lax.psum_scatter(a, OWNERS, scatter_dimension=0, tiled=True)
    marks = gather(jnp.stack([routing.weights, routing.experts.astype(routing.weights.dtype)], -1))
    rows = shards.whole(shards.send(gather, shards.sliced(tokens)))
    chosen = jax.lax.stop_gradient(marks[..., 1]).astype(jnp.int32) - jax.lax.axis_index(OWNERS) * own
    chosen, is_over = jnp.where((chosen >= 0) & (chosen < own), chosen, own), None
    if capacity is None:
        room, may_overflow = _room(config, len(tokens), shards, 1)
        slots = dropless(chosen.reshape(-1), own, shards, tile=tile, room=room)
        is_over = jnp.sum(chosen < own) > room if may_overflow else None
    else:
        slots = within_capacity(chosen, own, shards, capacity=capacity)
    y = shards.total(of_rows(config.experts_per_token, shards.on_each(rows), marks[..., 0], slots))
    return shards.send(add, _or_nan(shards.sliced(y), is_over))


def _or_nan(y: Array, is_over: Array | None) -> Array:
    return y if is_over is None else jnp.where(is_over, jnp.nan, y)


# Products -------------------------------------------------------------------------------------------------------------------


_BATCHED = jax.lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [1], [1])


def _product(config: TransformerConfig, shards: Shards, dtype: Any) -> tuple[Callable[..., Array], int]:
    """Returns ``(rows [s, r, in], weights [s, e, in, out], sizes [s, e]) -> [s, r, out]``, and of what sizes are multiples."""
    given = config.expert_products
    if callable(given):
        of_shard = lambda *args: given(*(a[0] for a in args))[None]
        return lambda *args: shards.each(of_shard, *args), 1
    hidden = config.expert_hidden_dim // (1 if shards.by_expert else shards.count)
    if given == "tiles" or (given == "auto" and on_gpus() and fits(dtype, config.embed_dim, hidden)):
        return partial(grouped_product, shards.each), TILE
    return _ragged, 1


def _ragged(rows: Array, weights: Array, sizes: Array) -> Array:
    if len(rows) == 1:
        first = lambda a: a.reshape(a.shape[1:])
        y = jax.lax.ragged_dot(first(rows), first(weights), first(sizes))
        return y.reshape(1, *y.shape)
    return jax.lax.ragged_dot_general(rows, weights, sizes, _BATCHED)


def _batched(rows: Array, weights: Array, sizes: Array) -> Array:
    del sizes  # all the same
    grouped = rows.reshape(*weights.shape[:2], -1, rows.shape[-1])
    return jnp.einsum("semd,sedf->semf", grouped, weights).reshape(*rows.shape[:2], -1)
