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
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
from jax import lax
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
from jaxpar.row_dependence import row_wise

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

    If none are dropped, it is ``row_wise``: tokens of all rows are sorted by expert, and put back.

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
    settings = config.experts
    assert settings is not None, "the params of experts are of a model with experts"
    _check_not_adapted(params["experts"])
    capacity = capacity_of(settings, x.shape[1]) if drops else None
    of_tokens = partial(_of_tokens, config, settings, capacity)
    return (row_wise(of_tokens) if capacity is None else of_tokens)(params, x, routing)


def _of_tokens(
    config: TransformerConfig,
    settings: Experts,
    capacity: int | None,
    params: PyTree,
    x: Hidden,
    routing: Routing,
) -> tuple[Hidden, Int[Array, " batch"]]:
    weights, shared = params["experts"], params.get("shared")
    num_held = len(weights["w_expert_down"])
    shards = Shards.of_experts(settings, config.expert_hidden_dim, num_held)
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Experts:
    """The experts of a layer as this replica has them, and their products.

    Attributes:
        config: The model.
        settings: What it says of its experts.
        weights: The params of the experts.
        shards: How the layer is split.
        capacity: How many tokens of a row an expert has room for; None: for all.
        dtype: That of the products.
    """

    config: TransformerConfig
    settings: Experts
    weights: PyTree
    shards: Shards
    capacity: int | None
    dtype: Any

    @property
    def num_own(self) -> int:
        """The number of experts of this replica."""
        return self.settings.count // self.shards.owners

    @cached_property
    def product(self) -> tuple[Callable[..., Array], int]:
        """The product of rows with the experts' weights, and of what the sizes of groups are multiples."""
        if self.capacity is not None:
            return _batched, 1
        return _product(self.config, self.settings, self.shards, self.dtype)

    @property
    def tile(self) -> int:
        """Where an expert's slots begin: at a multiple of it."""
        return self.product[1]

    def slots(self, chosen: Int[Array, "batch seq chosen"], num_experts: int) -> Slots:
        """Returns the slots of pairs of this replica's tokens among some experts."""
        if self.capacity is not None:
            return within_capacity(chosen, num_experts, self.shards, capacity=self.capacity)
        pairs = chosen.reshape(-1)
        return dropless(pairs, num_experts, self.shards, tile=self.tile, room=chosen.size)

    def of_rows(
        self,
        k: int,
        tokens: OnShards,
        weights: Float[Array, "*tokens k"],
        slots: Slots,
    ) -> OnShards:
        """Returns what the experts give to tokens of k pairs each; the sum over the shards is the output."""
        shards = self.shards
        slots = Slots(*map(shards.split, slots))
        rows = shards.split(dispatch(k, tokens, slots))
        of_pairs = shards.on_each(weights.reshape(-1, 1))
        by = shards.split(dispatch(1, of_pairs, slots))
        gate = None
        if self.config.mlp == "swiglu":
            gate = self._times(rows, "w_expert_gate", slots)
        up = self._times(rows, "w_expert_up", slots)
        hidden = activated(gate, up).astype(by.dtype) * by
        hidden = hidden.astype(self.dtype)
        down = self._times(hidden, "w_expert_down", slots)
        return shards.split(combine(k, down, slots))

    def _times(self, rows: Array, name: str, slots: Slots) -> Array:
        shards = self.shards
        multiply, _ = self.product
        weight = jnp.asarray(self.weights[name], self.dtype)
        weight = shards.split(_of_shards(shards, weight, name))
        return shards.split(multiply(rows, weight, slots.sizes))


def _of_shards(shards: Shards, weight: Array, name: str) -> Array:
    """Returns ``[shards, experts, in, out]``: each shard has some of the experts, or a slice of their hidden width."""
    if shards.by_expert:
        return weight.reshape(shards.count, -1, *weight.shape[1:])
    hidden_dim = 1 if name == "w_expert_down" else 2
    return _cut(weight, hidden_dim, shards.count)


def _cut(weight: Array, dim: int, count: int) -> Array:
    """Returns ``[shards, ...]``, a slice of the weight along ``dim`` for each shard."""
    before, after = weight.shape[:dim], weight.shape[dim + 1 :]
    slices = weight.reshape(*before, count, -1, *after)
    return jnp.moveaxis(slices, dim, 0)


def _num_dropped(layer: _Experts, routing: Routing) -> Int[Array, " batch"]:
    chosen = routing.experts
    if layer.capacity is None:
        return jnp.zeros(len(chosen), jnp.int32)
    return num_over(chosen, layer.settings.count, layer.capacity)


# On one replica -------------------------------------------------------------------------------------------------------------


def _on_this_replica(
    layer: _Experts, shared: PyTree, x: Hidden, routing: Routing
) -> tuple[Hidden, bool]:
    """Returns the output of experts that each replica has all of, and whether that of shared ones is in it."""
    shards, settings = layer.shards, layer.settings
    slots = layer.slots(routing.experts, settings.count)
    tokens = shards.on_each(_tokens(x))
    y = layer.of_rows(settings.per_token, tokens, routing.weights, slots)
    is_cut = shards.count > 1 and _can_be_cut(shared, shards.count)
    if is_cut:
        y = y + _part_of_mlp(layer.config, shared, tokens, shards)
    y = y.reshape(shards.count, *x.shape)
    return shards.total(y), is_cut


def _tokens(x: Hidden) -> Float[Array, "tokens embed"]:
    return x.reshape(-1, x.shape[-1])


def _can_be_cut(params: PyTree, count: int) -> bool:
    if params is None or any(map(is_adapted, params.values())):
        return False
    return len(params["w_down"]) % count == 0


def _part_of_mlp(
    config: TransformerConfig, params: PyTree, z: OnShards, shards: Shards
) -> OnShards:
    """Returns each shard's part of the sum over the MLP's hidden width, so that one all-reduce adds it and the experts'."""
    w_up = params["w_up"].astype(z.dtype)
    w_down = params["w_down"].astype(z.dtype)
    w_up = shards.split(_cut(w_up, 2, shards.count))
    up = jnp.einsum("snd,sdgf->sngf", z, w_up)
    gate = None
    if config.mlp == "swiglu":
        gate, up = up[:, :, 0], up[:, :, 1]
    else:
        up = up[:, :, 0]
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
    tokens = _tokens(x)
    there, is_over = _slots_of_owners(layer, routing, len(tokens))
    move = lambda a: lax.all_to_all(a, OWNERS, 1, 1, tiled=True)

    # A slot without a pair has the expert 0 - 1, of no owner.
    expert = (routing.experts % layer.num_own + 1).astype(routing.weights.dtype)
    marks = jnp.stack([routing.weights, expert], -1)
    marks = dispatch(1, marks.reshape(1, -1, 2), there)
    marks = move(marks)[0]
    sent = dispatch(k, shards.sliced(tokens)[None], there)
    rows = shards.send(move, sent)
    rows = shards.whole(rows)[0]
    slots = _slots_of_sent(layer, marks[:, 1], len(x))

    y = layer.of_rows(1, shards.on_each(rows), marks[:, :1], slots)
    y = shards.sliced(shards.total(y))
    back = shards.send(move, y[None])
    y = shards.sliced(combine(k, back, there))
    return _or_nan(y[0], is_over)


def _slots_of_owners(
    layer: _Experts, routing: Routing, num_tokens: int
) -> tuple[Slots, Array | None]:
    """Returns the slots of the rows that are sent, by owner, and whether there are more rows than slots, if that can be."""
    settings = layer.settings
    unsplit = dataclasses.replace(layer.shards, count=1)
    if layer.capacity is not None:
        chosen, room = routing.experts, layer.capacity
        return within_capacity(chosen, settings.count, unsplit, capacity=room), None
    owners, own = layer.shards.owners, layer.num_own
    room, may_overflow = _room(layer, num_tokens, owners)
    to = (routing.experts // own).reshape(1, -1, settings.per_token)
    slots = within_capacity(to, owners, unsplit, capacity=room)
    if not may_overflow:
        return slots, None
    return slots, num_over(to, owners, room)[0] > 0


def _slots_of_sent(layer: _Experts, marks: Float[Array, " rows"], num_rows: int) -> Slots:
    """Returns the slots of the rows that came, whose experts are told by their marks."""
    own, shards = layer.num_own, layer.shards
    if layer.capacity is not None:
        room = num_rows * layer.capacity
        return by_expert_first(shards.owners, own, room, shards)
    chosen = lax.stop_gradient(marks).astype(jnp.int32) - 1
    chosen = jnp.where(chosen < 0, own, chosen)
    return dropless(chosen, own, shards, tile=layer.tile, room=len(marks))


def _gathered(layer: _Experts, x: Hidden, routing: Routing) -> Float[Array, "tokens embed"]:
    """Returns the output of experts whose owners get all rows, and add up what they give."""
    shards, own = layer.shards, layer.num_own
    tokens = _tokens(x)
    gather = lambda a: lax.all_gather(a, OWNERS, axis=0, tiled=True)
    add = lambda a: lax.psum_scatter(a, OWNERS, scatter_dimension=0, tiled=True)

    expert = routing.experts.astype(routing.weights.dtype)
    marks = jnp.stack([routing.weights, expert], -1)
    marks = gather(marks)
    rows = shards.send(gather, shards.sliced(tokens))
    rows = shards.whole(rows)
    chosen = lax.stop_gradient(marks[..., 1]).astype(jnp.int32)
    chosen = chosen - lax.axis_index(OWNERS) * own
    is_own = (chosen >= 0) & (chosen < own)
    chosen = jnp.where(is_own, chosen, own)
    is_over = None
    if layer.capacity is not None:
        slots = layer.slots(chosen, own)
    else:
        room, may_overflow = _room(layer, len(tokens), 1)
        pairs = chosen.reshape(-1)
        slots = dropless(pairs, own, shards, tile=layer.tile, room=room)
        if may_overflow:
            is_over = jnp.sum(chosen < own) > room

    k = layer.settings.per_token
    y = layer.of_rows(k, shards.on_each(rows), marks[..., 0], slots)
    y = shards.sliced(shards.total(y))
    return shards.send(add, _or_nan(y, is_over))


def _or_nan(y: Array, is_over: Array | None) -> Array:
    return y if is_over is None else jnp.where(is_over, jnp.nan, y)


# Products -------------------------------------------------------------------------------------------------------------------


_BATCHED = lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [1], [1])


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
        y = lax.ragged_dot(first(rows), first(weights), first(sizes))
        return y.reshape(1, *y.shape)
    return lax.ragged_dot_general(rows, weights, sizes, _BATCHED)


def _batched(rows: Array, weights: Array, sizes: Array) -> Array:
    del sizes  # all the same
    shards, num_rows, width = rows.shape
    grouped = rows.reshape(*weights.shape[:2], -1, width)
    products = jnp.einsum("semd,sedf->semf", grouped, weights)
    return products.reshape(shards, num_rows, -1)
