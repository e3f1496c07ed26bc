"""The experts of a layer: each token's experts multiply it, and their outputs are added with the router's weights.

    x [t, d] --dispatch--> rows, by expert --gate, up--> hidden * weight --down--> rows --combine--> y [t, d]

A token and one of its k experts are a pair, and each pair has a slot among the rows, which are in the order of the experts.
`Slots` knows the pair of a slot and the slot of a pair, so ``dispatch`` and ``combine`` are gathers, and each is the other's
transpose. (The scatter that JAX would derive adds in an order of its own on GPUs, and XLA would gather for it over ``tensor``.)
The router's weight multiplies the hidden rows, not the outputs, which the backward pass would have to store.

Nothing is dropped: an expert has as many rows as tokens chose it. Or, with ``capacity_factor``, each expert has room for a
fixed number of tokens of a row of the batch, and the first ones get it: no token depends on later ones, and a row drops the
same tokens in every batch and on every mesh.

Where a mesh splits layers over automatic axes (jaxpar's ``tensor``), its shards are the leading dim of all arrays here, so that
each works on its own experts, or on its own slice of the hidden width of all of them, and the sum over that dim is the one
all-reduce of the forward pass. Its transpose, of the broadcast input, is that of the backward pass:

    expert_split="experts"       expert 0, 1 | expert 2, 3      rows of the own experts; balanced if the routing is
    expert_split="expert_mlp"    half of each | half of each    all rows; always balanced, products half as wide
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.models.grouped_product import TILE, fits, grouped_product, on_gpus
from jaxpar.models.lora import is_adapted
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.mlp import activated, mlp
from jaxpar.models.transformer.router import Routing


class Slots(NamedTuple):
    """Where the rows of the products come from and go to, on each shard.

    Attributes:
        pair: The pair of each slot, the number of pairs where there is none.
        slot: The slot of each pair, the number of slots where there is none: on other shards, or dropped.
        sizes: The number of consecutive slots of each expert.
    """

    pair: Int[Array, "shards slots"]
    slot: Int[Array, "shards pairs"]
    sizes: Int[Array, "shards experts"]


@dataclass(frozen=True)
class Shards:
    """The shards that a layer is split into where this is traced.

    Attributes:
        axes: The automatic axes of a mesh whose other axes are manual; none outside of such a mesh.
        count: The number of shards over them that the experts are split into; 1 for experts that each device has whole.
    """

    axes: tuple[str, ...]
    count: int

    @classmethod
    def of_experts(cls, config: TransformerConfig) -> "Shards":
        """Returns those of the mesh for which this is traced, if they divide the dim of the experts that is split."""
        mesh = jax.sharding.get_abstract_mesh()
        axes = tuple(mesh.auto_axes) if mesh.manual_axes else ()
        count = math.prod(mesh.shape[axis] for axis in axes)
        dim = config.num_experts if config.expert_split == "experts" else config.expert_hidden_dim
        return cls(axes, 1 if dim is None or dim % count else count)

    def split(self, x: Any) -> Array:
        """Returns an array whose leading dim, of the shards, is split over them."""
        return x if self.count == 1 else jax.lax.with_sharding_constraint(x, self._spec)

    def whole(self, x: Array) -> Array:
        """Returns an array that every shard has whole: XLA would split it, as its readers are, and gather it again."""
        return x if self.count == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec())

    def each(self, function: Callable[..., Array], *args: Array) -> Array:
        """Returns ``function`` of each shard's part of the arguments, for a kernel that XLA cannot split."""
        if not self.axes:
            return function(*args)
        in_specs, axes = (self._spec,) * len(args), set(self.axes)
        return jax.shard_map(function, in_specs=in_specs, out_specs=self._spec, axis_names=axes, check_vma=False)(*args)

    @property
    def _spec(self) -> PartitionSpec:
        return PartitionSpec() if self.count == 1 else PartitionSpec(self.axes)


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
        params: The params of a layer, with ``experts`` and ``shared``.
        x: The normalized input.
        routing: The experts of each token and their weights.
        drops: Whether ``capacity_factor`` applies.

    Raises:
        ValueError: The experts have factors of LoRA.

    **Collectives**: where the layer is split over an axis, an all-reduce of ``x`` over it in the forward pass, and in the
    backward pass one of ``x`` and one of the weights of pairs.
    """
    shards = Shards.of_experts(config)
    capacity = capacity_of(config, x.shape[1]) if drops else None
    if capacity is None:
        product, tile = _product(config, shards, x.dtype)
        slots, dropped = _dropless(config, routing.experts.reshape(-1), shards, tile), jnp.zeros(len(x), jnp.int32)
    else:
        product = _batched
        slots, dropped = _within_capacity(config, routing.experts, shards, capacity)
    own, shared, slots = params["experts"], params.get("shared"), Slots(*map(shards.split, slots))
    if adapted := [name for name, weight in own.items() if is_adapted(weight)]:
        raise ValueError(
            f"the weights of experts take no factors of LoRA; got some for {adapted[0]}. Take the weights of attention and of "
            "shared experts as targets: transformer.LAYER_WEIGHTS."
        )

    def times(rows: Array, name: str) -> Array:
        weight = shards.split(_of_shards(config, jnp.asarray(own[name], x.dtype), name, shards.count))
        return shards.split(product(rows, weight, slots.sizes))

    z = _on_each(shards, x.reshape(-1, x.shape[-1]))
    rows = shards.split(_dispatch(config.experts_per_token, z, slots.pair, slots.slot))
    weights = _on_each(shards, routing.weights.reshape(-1, 1))
    weights = shards.split(_dispatch(1, weights, slots.pair, slots.slot))
    gate = times(rows, "w_expert_gate") if config.mlp == "swiglu" else None
    hidden = (activated(gate, times(rows, "w_expert_up")).astype(weights.dtype) * weights).astype(x.dtype)
    y = shards.split(_combine(config.experts_per_token, times(hidden, "w_expert_down"), slots.pair, slots.slot))
    is_cut = shared is not None and shards.count > 1 and _can_be_cut(shared, shards.count)
    y = y + _part_of_mlp(config, shared, z, shards) if is_cut else y
    y = y.reshape(shards.count, *x.shape).sum(0)
    return y if is_cut or shared is None else y + mlp(config, shared, x), dropped


def capacity_of(config: TransformerConfig, seq: int) -> int | None:
    """Returns how many tokens of a row of ``seq`` an expert has room for; None: for all."""
    if config.capacity_factor is None or config.num_experts is None:
        return None
    return min(seq, math.ceil(config.capacity_factor * config.experts_per_token * seq / config.num_experts))


def _on_each(shards: Shards, a: Float[Array, "tokens width"]) -> Float[Array, "shards tokens width"]:
    return shards.split(jnp.broadcast_to(a[None], (shards.count, *a.shape)))


def _of_shards(config: TransformerConfig, weight: Array, name: str, count: int) -> Array:
    """Returns ``[shards, experts, in, out]``: each shard has some of the experts, or a slice of their hidden width."""
    if config.expert_split == "experts":
        return weight.reshape(count, -1, *weight.shape[1:])
    return _cut(weight, 1 if name == "w_expert_down" else 2, count)


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


# Slots ----------------------------------------------------------------------------------------------------------------------


def _dropless(config: TransformerConfig, chosen: Int[Array, " pairs"], shards: Shards, tile: int) -> Slots:
    """Returns slots for all pairs, in the order of the experts, each expert's beginning at a multiple of ``tile``."""
    num_experts, num_pairs, count = config.num_experts or 0, len(chosen), shards.count
    order = jnp.argsort(chosen, stable=True)
    place = jnp.argsort(order)
    sizes = shards.whole(_counts(chosen[None], num_experts)[0])
    starts = shards.whole(jnp.cumsum(sizes) - sizes)
    by_expert = config.expert_split == "experts"
    own = num_experts // count if by_expert else num_experts
    of_shard = lambda a: a.reshape(count, own) if by_expert else jnp.broadcast_to(a[None], (count, own))
    padded = -(-of_shard(sizes) // tile) * tile
    ends = jnp.cumsum(padded, 1)
    begins = ends - padded
    num_slots = -(-num_pairs // tile) * tile + (own * tile if tile > 1 else 0)
    # The slot of a pair: that of its expert's first, and its place among the expert's.
    expert = jnp.broadcast_to((chosen % own if by_expert else chosen)[None], (count, num_pairs))
    is_own = (chosen // own)[None] == jnp.arange(count)[:, None] if by_expert else jnp.ones_like(expert, bool)
    slot = _at(begins, expert) + (place - starts[chosen])[None]
    slot = jnp.where(is_own, slot, num_slots)
    # The pair of a slot, the other way around.
    at = jnp.broadcast_to(jnp.arange(num_slots, dtype=ends.dtype)[None], (count, num_slots))
    owner = jax.vmap(partial(jnp.searchsorted, side="right"))(ends, at)
    known = jnp.minimum(owner, own - 1)
    within = at - _at(begins, known)
    is_taken = (owner < own) & (within < _at(of_shard(sizes), known))
    pair = order[jnp.where(is_taken, _at(of_shard(starts), known) + within, 0)]
    return Slots(jnp.where(is_taken, pair, num_pairs), slot, padded)


def _within_capacity(
    config: TransformerConfig, chosen: Int[Array, "batch seq chosen"], shards: Shards, capacity: int
) -> tuple[Slots, Int[Array, " batch"]]:
    """Returns ``capacity`` slots for each expert and row, which the row's first tokens get, and the pairs without one."""
    num_experts, rows, count = config.num_experts or 0, len(chosen), shards.count
    chosen = chosen.reshape(rows, -1)
    per_row = chosen.shape[1]
    order = jnp.argsort(chosen, axis=1, stable=True)
    place = jnp.argsort(order, axis=1)
    sizes = shards.whole(_counts(chosen, num_experts))
    starts = shards.whole(jnp.cumsum(sizes, 1) - sizes)
    rank = place - _at(starts, chosen)
    fits_in = rank < capacity
    row = jnp.arange(rows)[:, None]
    by_expert = config.expert_split == "experts"
    own = num_experts // count if by_expert else num_experts
    slot = ((chosen % own if by_expert else chosen) * rows + row) * capacity + rank
    num_slots = own * rows * capacity
    shard = jnp.arange(count)[:, None]
    is_own = (chosen // own).reshape(1, -1) == shard if by_expert else jnp.ones((count, chosen.size), bool)
    slot = jnp.where(is_own & fits_in.reshape(1, -1), slot.reshape(1, -1), num_slots)
    # [experts, rows, capacity]
    at = jnp.arange(capacity)[None, None]
    is_taken = at < sizes.T[:, :, None]
    first = jnp.where(is_taken, starts.T[:, :, None] + at, 0)
    pair = order[row[None], first] + row[None] * per_row
    pair = jnp.where(is_taken, pair, rows * per_row)
    pair = pair.reshape(count, -1) if by_expert else jnp.broadcast_to(pair.reshape(1, -1), (count, num_slots))
    full = jnp.full((count, own), rows * capacity, sizes.dtype)
    return Slots(pair, slot, full), jnp.sum(~fits_in, 1, dtype=jnp.int32)


def _counts(chosen: Int[Array, "rows pairs"], num_experts: int) -> Int[Array, "rows experts"]:
    of_each = chosen[..., None] == jnp.arange(num_experts, dtype=chosen.dtype)[None, None]
    return of_each.sum(1, dtype=jnp.int32)


def _at(table: Int[Array, "rows entries"], index: Int[Array, "rows indices"]) -> Array:
    return jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")


# Rows to slots and back -----------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(k: int, x: Float[Array, "shards tokens width"], pair: Array, slot: Array) -> Array:
    """Returns ``[shards, slots, width]``, the token of each slot's pair, zeros where there is none; a token has k pairs."""
    is_taken = pair < slot.shape[1]
    return _take(x, jnp.where(is_taken, pair, 0) // k, is_taken)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(k: int, rows: Float[Array, "shards slots width"], pair: Array, slot: Array) -> Array:
    """Returns ``[shards, tokens, width]``, the sum of the rows of each token's k pairs."""
    has_slot = slot < pair.shape[1]
    picked = _take(rows, jnp.where(has_slot, slot, 0), has_slot)
    return picked if k == 1 else picked.reshape(len(rows), -1, k, rows.shape[-1]).sum(2)


def _take(x: Float[Array, "shards from width"], index: Array, is_there: Bool[Array, "shards to"]) -> Array:
    rows = jnp.take_along_axis(x, index[..., None], axis=1, mode="promise_in_bounds")
    return jnp.where(is_there[..., None], rows, 0)


_dispatch.defvjp(
    lambda k, x, pair, slot: (_dispatch(k, x, pair, slot), (pair, slot)),
    lambda k, at, ct: (_combine(k, ct, *at), None, None),
)
_combine.defvjp(
    lambda k, rows, pair, slot: (_combine(k, rows, pair, slot), (pair, slot)),
    lambda k, at, ct: (_dispatch(k, ct, *at), None, None),
)


# Products -------------------------------------------------------------------------------------------------------------------


_BATCHED = jax.lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [1], [1])


def _product(config: TransformerConfig, shards: Shards, dtype: Any) -> tuple[Callable[..., Array], int]:
    """Returns ``(rows [s, r, in], weights [s, e, in, out], sizes [s, e]) -> [s, r, out]``, and of what sizes are multiples."""
    given = config.expert_products
    if callable(given):
        of_shard = lambda *args: given(*(a[0] for a in args))[None]
        return lambda *args: shards.each(of_shard, *args), 1
    hidden = config.expert_hidden_dim // (shards.count if config.expert_split == "expert_mlp" else 1)
    if given == "tiles" or (given == "auto" and on_gpus() and fits(dtype, config.embed_dim, hidden)):
        return partial(grouped_product, shards.each), TILE
    return _ragged, 1


def _ragged(rows: Array, weights: Array, sizes: Array) -> Array:
    if len(rows) == 1:
        return jax.lax.ragged_dot(rows[0], weights[0], sizes[0])[None]
    return jax.lax.ragged_dot_general(rows, weights, sizes, _BATCHED)


def _batched(rows: Array, weights: Array, sizes: Array) -> Array:
    del sizes  # all the same
    grouped = rows.reshape(*weights.shape[:2], -1, rows.shape[-1])
    return jnp.einsum("semd,sedf->semf", grouped, weights).reshape(*rows.shape[:2], -1)
