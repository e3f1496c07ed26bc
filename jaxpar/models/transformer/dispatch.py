"""Where the rows of experts lie: the slots of a token's pairs, on the shards of a layer, and the way to other replicas.

A token and one of its k experts are a pair. Each pair has a slot among rows that are in the order of the experts, or of the
replicas to which they are sent. `Slots` knows the pair of a slot and the slot of a pair, so ``dispatch`` and ``combine`` are
gathers, and each is the other's transpose. (The scatter that JAX would derive adds in an order of its own on GPUs, and XLA
would gather for it over ``tensor``.)

`Shards` says how a layer is split where it is traced: its shards over automatic axes, which are the leading dim of arrays, and
the replicas among which its experts are divided, to which rows are sent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxpar.models.transformer.config import TransformerConfig

OWNERS = "data"  # the axis of replicas that may divide experts among them: models import no mesh


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
    """How a layer is split where this is traced.

    Attributes:
        axes: The automatic axes of a mesh whose other axes are manual; none outside of such a mesh.
        size: The number of devices over them.
        count: The number of shards over them that the experts are split into; 1 for experts that each device has whole.
        by_expert: Whether each shard has some of the experts, rather than a slice of their hidden width.
        owners: The number of replicas among which the experts are divided; 1 for replicas that have all of them.
    """

    axes: tuple[str, ...]
    size: int
    count: int
    by_expert: bool
    owners: int

    @classmethod
    def of_experts(cls, config: TransformerConfig, held: int) -> "Shards":
        """Returns those of the mesh for which this is traced.

        Args:
            config: The model.
            held: The number of experts in the weights: all, or those that a replica owns.

        Raises:
            ValueError: The weights are of another number of experts.
        """
        mesh, num_experts = jax.sharding.get_abstract_mesh(), config.num_experts or 1
        axes = tuple(mesh.auto_axes) if mesh.manual_axes else ()
        size = math.prod(mesh.shape[axis] for axis in axes)
        replicas = mesh.shape[OWNERS] if OWNERS in mesh.manual_axes else 1
        if held * replicas != num_experts and held != num_experts:
            raise ValueError(
                f"the weights of experts must be of all of them, or of equal parts over {OWNERS}; got those of {held} experts "
                f"with num_experts={num_experts}, {OWNERS}={replicas}. Make the params from "
                "transformer.param_table(config), and shard them by its dims."
            )
        by_expert = config.expert_split == "experts" and held == num_experts
        dim = num_experts if by_expert else config.expert_hidden_dim
        return cls(axes, size, 1 if dim % size else size, by_expert, num_experts // held)

    def own(self, num_experts: int) -> tuple[int, Int[Array, "shards 1"]]:
        """Returns how many of a replica's experts each shard works on, and which part of them."""
        numbers = jnp.arange(self.count)[:, None]
        return (num_experts // self.count, numbers) if self.by_expert else (num_experts, jnp.zeros_like(numbers))

    def split(self, x: Any) -> Array:
        """Returns an array whose leading dim, of the shards, is split over them."""
        return x if self.count == 1 else jax.lax.with_sharding_constraint(x, self._spec)

    def whole(self, x: Array) -> Array:
        """Returns an array that every shard has whole: XLA would split it, as its readers are, and gather it again."""
        return x if self.size == 1 else jax.lax.with_sharding_constraint(x, PartitionSpec())

    def on_each(self, x: Shaped[Array, "*dims"]) -> Shaped[Array, "shards *dims"]:
        """Returns ``x`` on each shard."""
        if self.count == 1:  # not a broadcast, of which the derivative would be a sum
            return x.reshape(1, *x.shape)
        return self.split(jnp.broadcast_to(x[None], (self.count, *x.shape)))

    def total(self, x: Float[Array, "shards *dims"]) -> Float[Array, "*dims"]:
        """Returns the sum over the shards."""
        return x.reshape(x.shape[1:]) if self.count == 1 else x.sum(0)

    def each(self, function: Callable[..., Array], *args: Array) -> Array:
        """Returns ``function`` of each shard's part of the arguments, for a kernel that XLA cannot split."""
        return self._each(function, self._spec, *args) if self.axes else function(*args)

    def send(
        self, function: Callable[[Array], Array], rows: Float[Array, "*rows width"]
    ) -> Float[Array, "*sent width"]:
        """Returns ``function(rows)``, a collective over the replicas, of a slice of the width on each shard.

        Otherwise every shard would send the whole rows.
        """
        spec = self._of_width(rows)
        return function(rows) if spec is None else self._each(function, spec, rows)

    def sliced(self, rows: Any) -> Float[Array, "*rows width"]:
        """Returns rows of which each shard has a slice of the width, as they are sent."""
        spec = self._of_width(rows)
        return rows if spec is None else jax.lax.with_sharding_constraint(rows, spec)

    def _of_width(self, rows: Array) -> PartitionSpec | None:
        *others, width = rows.shape
        return PartitionSpec(*(None for _ in others), self.axes) if self.size > 1 and width % self.size == 0 else None

    def _each(self, function: Callable[..., Array], spec: PartitionSpec, *args: Array) -> Array:
        in_specs, axes = (spec,) * len(args), set(self.axes)
        return jax.shard_map(function, in_specs=in_specs, out_specs=spec, axis_names=axes, check_vma=False)(*args)

    @property
    def _spec(self) -> PartitionSpec:
        return PartitionSpec() if self.count == 1 else PartitionSpec(self.axes)


# Slots ----------------------------------------------------------------------------------------------------------------------


def dropless(chosen: Int[Array, " pairs"], num_experts: int, shards: Shards, *, tile: int, room: int) -> Slots:
    """Returns slots for all pairs, in the order of the experts, each expert's beginning at a multiple of ``tile``.

    Args:
        chosen: The expert of each pair; ``num_experts`` for none.
        num_experts: The number of experts on this replica.
        shards: The shards.
        tile: A number of rows.
        room: The most pairs that may have an expert. Those after them get no slot.
    """
    num_pairs, count, (own, part) = len(chosen), shards.count, shards.own(num_experts)
    order, rank, sizes, starts = _sorted(chosen[None], num_experts, shards)
    of_shard = lambda a: jnp.broadcast_to(a.reshape(-1, own), (count, own))
    # Experts without pairs have no slots: of a few tokens most have none.
    num_slots = min(room * tile, -(-room // tile) * tile + (own * tile if tile > 1 else 0))
    ends = jnp.minimum(jnp.cumsum(-(-of_shard(sizes) // tile) * tile, 1), num_slots)
    padded = jnp.diff(ends, axis=1, prepend=0)
    begins = ends - padded
    # The slot of a pair: that of its expert's first, and its place among the expert's.
    slot = at(begins, jnp.broadcast_to(chosen[None] % own, (count, num_pairs))) + rank
    slot = jnp.where((chosen[None] // own == part) & (slot < num_slots), slot, num_slots)
    # The pair of a slot, the other way around.
    here = jnp.broadcast_to(jnp.arange(num_slots, dtype=ends.dtype)[None], (count, num_slots))
    owner = jnp.sum(ends[:, :, None] <= here[:, None], 1)
    there = jnp.minimum(owner, own - 1)
    within = here - at(begins, there)
    is_taken = (owner < own) & (within < at(of_shard(sizes), there))
    pair = order[0, jnp.where(is_taken, at(of_shard(starts), there) + within, 0)]
    return Slots(jnp.where(is_taken, pair, num_pairs), slot, padded)


def within_capacity(
    chosen: Int[Array, "batch seq chosen"], num_experts: int, shards: Shards, *, capacity: int
) -> Slots:
    """Returns ``capacity`` slots for each expert and row, in this order, which the row's first tokens get.

    Args:
        chosen: The experts of each token; ``num_experts`` for none.
        num_experts: The number of experts on this replica.
        shards: The shards.
        capacity: The slots of an expert for a row.
    """
    rows, (own, part) = len(chosen), shards.own(num_experts)
    chosen = chosen.reshape(rows, -1)
    order, rank, sizes, starts = _sorted(chosen, num_experts, shards)
    row, num_pairs, num_slots = jnp.arange(rows)[:, None], chosen.size, own * rows * capacity
    slot = (chosen % own * rows + row) * capacity + rank
    has_slot = ((chosen // own).reshape(1, -1) == part) & (rank < capacity).reshape(1, -1)
    slot = jnp.where(has_slot, slot.reshape(1, -1), num_slots)
    # [experts, rows, capacity]
    here = jnp.arange(capacity)[None, None]
    is_taken = here < sizes.T[:, :, None]
    first = jnp.where(is_taken, starts.T[:, :, None] + here, 0)
    pair = jnp.where(is_taken, order[row[None], first] + row[None] * chosen.shape[1], num_pairs)
    pair = jnp.broadcast_to(pair.reshape(-1, num_slots), (shards.count, num_slots))
    return Slots(pair, slot, jnp.full((shards.count, own), rows * capacity, sizes.dtype))


def _sorted(
    chosen: Int[Array, "rows pairs"], num_experts: int, shards: Shards
) -> tuple[Int[Array, "rows pairs"], Int[Array, "rows pairs"], Int[Array, "rows experts"], Int[Array, "rows experts"]]:
    """Returns each row's pairs in the order of the experts, the rank of each among its expert's, and their sizes and starts."""
    order = jnp.argsort(chosen, axis=1, stable=True)
    sizes = shards.whole(_counts(chosen, num_experts))
    starts = shards.whole(jnp.cumsum(sizes, 1) - sizes)
    rank = jnp.argsort(order, axis=1) - at(starts, jnp.minimum(chosen, num_experts - 1))
    return order, rank, sizes, starts


def by_expert_first(owners: int, num_experts: int, room: int, shards: Shards) -> Slots:
    """Returns the slots, in the order [experts, owners, room], of rows that come from each owner as [experts, room]."""
    pairs = jnp.arange(owners * num_experts * room)
    swapped = lambda *sizes: shards.on_each(pairs.reshape(*sizes, room).swapaxes(0, 1).reshape(-1))
    sizes = jnp.full((shards.count, num_experts), owners * room)
    return Slots(swapped(owners, num_experts), swapped(num_experts, owners), sizes)


def num_over(chosen: Int[Array, "rows seq chosen"], count: int, room: int) -> Int[Array, " rows"]:
    """Returns how many pairs of each row are more than ``room`` of one of ``count`` experts."""
    sizes = _counts(chosen.reshape(len(chosen), -1), count)
    return jnp.maximum(sizes - room, 0).sum(1, dtype=jnp.int32)


def _counts(chosen: Int[Array, "rows pairs"], num_experts: int) -> Int[Array, "rows experts"]:
    of_each = chosen[..., None] == jnp.arange(num_experts, dtype=chosen.dtype)[None, None]
    return of_each.sum(1, dtype=jnp.int32)


def at(table: Int[Array, "rows entries"], index: Int[Array, "rows indices"]) -> Array:
    """Returns the entries of each row at these places, which must be in it."""
    return jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")


# Rows to slots and back -----------------------------------------------------------------------------------------------------


def _to_slots(k: int, x: Float[Array, "shards tokens width"], slots: Slots) -> Array:
    """Returns ``[shards, slots, width]``, the token of each slot's pair, zeros where there is none; a token has k pairs."""
    is_taken = slots.pair < slots.slot.shape[1]
    return _take(x, jnp.where(is_taken, slots.pair, 0) // k, is_taken)


def _to_tokens(k: int, rows: Float[Array, "shards slots width"], slots: Slots) -> Array:
    """Returns ``[shards, tokens, width]``, the sum of the rows of each token's k pairs."""
    has_slot = slots.slot < slots.pair.shape[1]
    picked = _take(rows, jnp.where(has_slot, slots.slot, 0), has_slot)
    return picked if k == 1 else picked.reshape(len(rows), -1, k, rows.shape[-1]).sum(2)


def _take(x: Float[Array, "shards from width"], index: Array, is_there: Bool[Array, "shards to"]) -> Array:
    rows = jnp.take_along_axis(x, index[..., None], axis=1, mode="promise_in_bounds")
    return jnp.where(is_there[..., None], rows, 0)


def _with_transpose(move: Callable[..., Array], back: Callable[..., Array]) -> Callable[..., Any]:
    """Returns a linear ``move(k, rows, slots)`` whose transpose is ``back``."""
    moved = jax.custom_vjp(move, nondiff_argnums=(0,))
    # The gather itself, which a layer's backward pass may repeat: it does not look into a jax.custom_vjp.
    moved.defvjp(lambda k, x, slots: (move(k, x, slots), slots), lambda k, slots, ct: (back(k, ct, slots), None))
    return moved


dispatch, combine = _with_transpose(_to_slots, _to_tokens), _with_transpose(_to_tokens, _to_slots)
