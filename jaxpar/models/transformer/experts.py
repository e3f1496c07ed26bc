"""The experts of a layer: each token's experts multiply it, and their outputs are added with the router's weights.

    x [t, d] --dispatch--> rows, by expert --gate, up--> hidden * weight --down--> rows --combine--> y [t, d]

The router's weight multiplies the hidden rows, not the outputs, which the backward pass would have to store.

Nothing is dropped: an expert has as many rows as tokens chose it. Or, with ``capacity_factor``, each expert has room for a
fixed number of tokens of a row of the batch, and the first ones get it: no token depends on later ones, and a row drops the
same tokens in every batch and on every mesh.

Where a mesh splits layers over automatic axes (jaxpar's ``tensor``), its shards are the leading dim of all arrays here, so that
each works on its own experts, or on its own slice of the hidden width of all of them, and the sum over that dim is the one
all-reduce of the forward pass. Its transpose, of the broadcast input, is that of the backward pass:

    split="experts"       expert 0, 1 | expert 2, 3      rows of the own experts; balanced if the routing is
    split="expert_mlp"    half of each | half of each    all rows; always balanced, products half as wide

Where the params' sharding puts the experts over ``data``, a replica has the weights of its own experts alone, and rows travel:

    all_to_all   each row to the owner of its expert, with its weight and the expert's number; the result back the same way
    gather       all rows to all replicas; the results of the own experts are added over them (for many experts a token)

All arrays have fixed sizes, so a replica has room for ``buffer`` times the rows that its own tokens have, as many as it
gets if the routing is balanced. If it gets more, the layer's output is NaN, and with it the loss: nothing is dropped in
silence, and ``make_train_step`` skips and counts the step. Beside an automatic axis each of its shards sends a slice of the
width of rows and has a slice of the hidden width of each expert, whatever ``split`` is.
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
from jaxpar.models.transformer.config import Experts, TransformerConfig
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

Hidden = Float[Array, "batch seq embed"]
OnShards = Float[Array, "shards tokens embed"]


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
        config: The model, which has experts.
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
    weights, shared, settings = params["experts"], params.get("shared"), config.experts
    assert settings is not None, "the params of experts are of a model with experts"
    _check_not_adapted(weights)
    shards = Shards.of_experts(settings, config.expert_hidden_dim, len(weights["w_expert_down"]))
    capacity = capacity_of(settings, x.shape[1]) if drops else None
    layer = _Experts(config, settings, weights, shards, capacity, x.dtype)
    if shards.owners > 1:
        y = _over_owners(layer, x, routing)
        is_added = False
    else:
        y, is_added = _on_this_replica(layer, shared, x, routing)
    if shared is not None and not is_added:
        y = y + mlp(config, shared, x)
    return y, _num_dropped(layer, routing)


def capacity_of(settings: Experts, seq: int) -> int | None:
    """Returns how many tokens of a row of ``seq`` an expert has room for; None: for all."""
    if settings.capacity_factor is None:
        return None
    mean = settings.per_token * seq / settings.count
    return min(seq, math.ceil(settings.capacity_factor * mean))


def _check_not_adapted(weights: PyTree) -> None:
    adapted = [name for name, weight in weights.items() if is_adapted(weight)]
    if adapted:
        raise ValueError(
            f"the weights of experts take no factors of LoRA; got some for {adapted[0]}. Take the weights of attention and of "
            "shared experts as targets: transformer.LAYER_WEIGHTS."
        )


class _Experts:
    """The experts of a layer as this replica has them, and their products.

    Attributes:
        config: The model.
        settings: What it says of its experts.
        weights: The params of the experts.
        shards: How the layer is split.
        capacity: How many tokens of a row an expert has room for; None: for all.
        tile: Where an expert's slots begin: at a multiple of it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        settings: Experts,
        weights: PyTree,
        shards: Shards,
        capacity: int | None,
        dtype: Any,
    ) -> None:
        self.config, self.settings = config, settings
        self.weights, self.shards, self.capacity = weights, shards, capacity
        self._dtype = dtype
        self._product, self.tile = _batched, 1
        if capacity is None:
            self._product, self.tile = _product(config, settings, shards, dtype)

    @property
    def num_own(self) -> int:
        """The number of experts of this replica."""
        return self.settings.count // self.shards.owners

    def slots(self, chosen: Int[Array, "batch seq chosen"], num_experts: int) -> Slots:
        """Returns the slots of pairs of this replica's tokens among some experts."""
        if self.capacity is not None:
            return within_capacity(chosen, num_experts, self.shards, capacity=self.capacity)
        return dropless(
            chosen.reshape(-1), num_experts, self.shards, tile=self.tile, room=chosen.size
        )

    def of_rows(
        self, k: int, tokens: OnShards, weights: Float[Array, "*tokens k"], slots: Slots
    ) -> OnShards:
        """Returns what the experts give to tokens of k pairs each; the sum over the shards is the output."""
        split, shards = self.shards.split, self.shards
        slots = Slots(*map(split, slots))
        rows = split(dispatch(k, tokens, slots))
        of_pairs = shards.on_each(weights.reshape(-1, 1))
        by = split(dispatch(1, of_pairs, slots))
        gate = None
        if self.config.mlp == "swiglu":
            gate = self._times(rows, "w_expert_gate", slots)
        up = self._times(rows, "w_expert_up", slots)
        hidden = activated(gate, up).astype(by.dtype) * by
        down = self._times(hidden.astype(self._dtype), "w_expert_down", slots)
        return split(combine(k, down, slots))

    def _times(self, rows: Array, name: str, slots: Slots) -> Array:
        weight = jnp.asarray(self.weights[name], self._dtype)
        weight = self.shards.split(_of_shards(self.shards, weight, name))
        return self.shards.split(self._product(rows, weight, slots.sizes))


def _of_shards(shards: Shards, weight: Array, name: str) -> Array:
    """Returns ``[shards, experts, in, out]``: each shard has some of the experts, or a slice of their hidden width."""
    if shards.by_expert:
        return weight.reshape(shards.count, -1, *weight.shape[1:])
    hidden_dim = 1 if name == "w_expert_down" else 2
    return _cut(weight, hidden_dim, shards.count)


def _cut(weight: Array, dim: int, count: int) -> Array:
    """Returns ``[shards, ...]``, a slice of the weight along ``dim`` for each shard."""
    shape = (*weight.shape[:dim], count, -1, *weight.shape[dim + 1 :])
    return jnp.moveaxis(weight.reshape(shape), dim, 0)


def _num_dropped(layer: _Experts, routing: Routing) -> Int[Array, " batch"]:
    if layer.capacity is None:
        return jnp.zeros(len(routing.experts), jnp.int32)
    return num_over(routing.experts, layer.settings.count, layer.capacity)


# On one replica -------------------------------------------------------------------------------------------------------------


def _on_this_replica(
    layer: _Experts, shared: PyTree, x: Hidden, routing: Routing
) -> tuple[Hidden, bool]:
    """Returns the output of experts that each replica has all of, and whether that of shared ones is in it."""
    config, shards = layer.config, layer.shards
    slots = layer.slots(routing.experts, layer.settings.count)
    tokens = shards.on_each(x.reshape(-1, x.shape[-1]))
    y = layer.of_rows(layer.settings.per_token, tokens, routing.weights, slots)
    is_cut = shared is not None and shards.count > 1 and _can_be_cut(shared, shards.count)
    if is_cut:
        y = y + _part_of_mlp(config, shared, tokens, shards)
    return shards.total(y.reshape(shards.count, *x.shape)), is_cut


def _can_be_cut(params: PyTree, count: int) -> bool:
    is_plain = not any(map(is_adapted, params.values()))
    return is_plain and len(params["w_down"]) % count == 0


def _part_of_mlp(
    config: TransformerConfig, params: PyTree, z: OnShards, shards: Shards
) -> OnShards:
    """Returns each shard's part of the sum over the MLP's hidden width, so that one all-reduce adds it and the experts'."""
    w_up, w_down = params["w_up"].astype(z.dtype), params["w_down"].astype(z.dtype)
    w_up = shards.split(_cut(w_up, 2, shards.count))
    up = jnp.einsum("snd,sdgf->sngf", z, w_up)
    gate, up = (up[:, :, 0], up[:, :, 1]) if config.mlp == "swiglu" else (None, up[:, :, 0])
    w_down = shards.split(_cut(w_down, 0, shards.count))
    return jnp.einsum("snf,sfd->snd", activated(gate, up), w_down)


# Over replicas --------------------------------------------------------------------------------------------------------------


def _over_owners(layer: _Experts, x: Hidden, routing: Routing) -> Hidden:
    """Returns the output of experts that are divided among replicas."""
    exchange = _gathered if _gathers(layer.settings, layer.shards) else _sent
    # Beside a slice XLA would split the width of its source too, and of what that is made of.
    whole = layer.shards.whole
    y = exchange(layer, whole(x), routing)
    return whole(y.reshape(x.shape))


def _gathers(settings: Experts, shards: Shards) -> bool:
    """Whether all rows are gathered: they then travel once a replica, and not once an expert."""
    if settings.exchange == "auto":
        return settings.per_token >= shards.owners
    return settings.exchange == "gather"


def _room(layer: _Experts, num_tokens: int, parts: int) -> tuple[int, bool]:
    """Returns the room for rows from each of ``parts`` of the replicas, and whether they may be too many for it."""
    settings, owners = layer.settings, layer.shards.owners
    k = settings.per_token
    most = num_tokens * owners // parts * min(k, layer.num_own)
    if settings.buffer is None:
        return most, False
    room = math.ceil(settings.buffer * k * num_tokens / parts)
    return min(room, most), room < most


def _sent(layer: _Experts, x: Hidden, routing: Routing) -> Float[Array, "tokens embed"]:
    """Returns the output of experts to whose owners rows are sent, and back."""
    shards, k = layer.shards, layer.settings.per_token
    tokens = x.reshape(-1, x.shape[-1])
    there, is_over = _slots_of_owners(layer, routing, len(tokens))
    move: Callable[[Any], Any] = lambda a: jax.lax.all_to_all(a, OWNERS, 1, 1, tiled=True)

    # A slot without a pair has the expert 0 - 1, of no owner.
    expert = (routing.experts % layer.num_own + 1).astype(routing.weights.dtype)
    marks = jnp.stack([routing.weights, expert], -1).reshape(1, -1, 2)
    marks = move(dispatch(1, marks, there))[0]
    sent = dispatch(k, shards.sliced(tokens)[None], there)
    rows = shards.whole(shards.send(move, sent))[0]
    slots = _slots_of_sent(layer, marks[:, 1], len(x))

    y = layer.of_rows(1, shards.on_each(rows), marks[:, :1], slots)
    y = shards.sliced(shards.total(y))
    back = shards.send(move, y[None])
    return _or_nan(shards.sliced(combine(k, back, there))[0], is_over)


def _slots_of_owners(
    layer: _Experts, routing: Routing, num_tokens: int
) -> tuple[Slots, Array | None]:
    """Returns the slots of the rows that are sent, by owner, and whether there are more rows than slots, if that can be."""
    unsplit = dataclasses.replace(layer.shards, count=1)
    if layer.capacity is not None:
        return within_capacity(
            routing.experts, layer.settings.count, unsplit, capacity=layer.capacity
        ), None
    owners, own = layer.shards.owners, layer.num_own
    room, may_overflow = _room(layer, num_tokens, owners)
    to = (routing.experts // own).reshape(1, -1, layer.settings.per_token)
    slots = within_capacity(to, owners, unsplit, capacity=room)
    is_over = num_over(to, owners, room)[0] > 0 if may_overflow else None
    return slots, is_over


def _slots_of_sent(layer: _Experts, marks: Float[Array, " rows"], num_rows: int) -> Slots:
    """Returns the slots of the rows that came, whose experts are told by their marks."""
    if layer.capacity is not None:
        room = num_rows * layer.capacity
        return by_expert_first(layer.shards.owners, layer.num_own, room, layer.shards)
    own = layer.num_own
    chosen = jax.lax.stop_gradient(marks).astype(jnp.int32) - 1
    chosen = jnp.where(chosen < 0, own, chosen)
    return dropless(chosen, own, layer.shards, tile=layer.tile, room=len(marks))


def _gathered(layer: _Experts, x: Hidden, routing: Routing) -> Float[Array, "tokens embed"]:
    """Returns the output of experts whose owners get all rows, and add up what they give."""
    shards, own = layer.shards, layer.num_own
    tokens = x.reshape(-1, x.shape[-1])
    gather = lambda a: jax.lax.all_gather(a, OWNERS, axis=0, tiled=True)
    add = lambda a: jax.lax.psum_scatter(a, OWNERS, scatter_dimension=0, tiled=True)

    expert = routing.experts.astype(routing.weights.dtype)
    marks = gather(jnp.stack([routing.weights, expert], -1))
    rows = shards.whole(shards.send(gather, shards.sliced(tokens)))
    chosen = jax.lax.stop_gradient(marks[..., 1]).astype(jnp.int32)
    chosen = chosen - jax.lax.axis_index(OWNERS) * own
    chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
    if layer.capacity is not None:
        slots, is_over = layer.slots(chosen, own), None
    else:
        room, may_overflow = _room(layer, len(tokens), 1)
        slots = dropless(chosen.reshape(-1), own, shards, tile=layer.tile, room=room)
        is_over = jnp.sum(chosen < own) > room if may_overflow else None

    y = layer.of_rows(layer.settings.per_token, shards.on_each(rows), marks[..., 0], slots)
    y = shards.sliced(shards.total(y))
    return shards.send(add, _or_nan(y, is_over))


def _or_nan(y: Array, is_over: Array | None) -> Array:
    return y if is_over is None else jnp.where(is_over, jnp.nan, y)


# Products -------------------------------------------------------------------------------------------------------------------


_BATCHED = jax.lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [1], [1])


def _product(
    config: TransformerConfig, settings: Experts, shards: Shards, dtype: Any
) -> tuple[Callable[..., Array], int]:
    """Returns ``(rows [s, r, in], weights [s, e, in, out], sizes [s, e]) -> [s, r, out]``, and of what sizes are multiples."""
    given = settings.products
    if callable(given):
        of_shard = lambda *args: given(*(a[0] for a in args))[None]
        return partial(shards.each, of_shard), 1
    hidden = config.expert_hidden_dim
    if not shards.by_expert:
        hidden //= shards.count
    fits_tiles = on_gpus() and fits(dtype, config.embed_dim, hidden)
    if given == "tiles" or (given == "auto" and fits_tiles):
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
    products = jnp.einsum("semd,sedf->semf", grouped, weights)
    return products.reshape(*rows.shape[:2], -1)
