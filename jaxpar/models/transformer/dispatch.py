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
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxpar.models.transformer.config import Experts

Move = Callable[..., Any]
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
    def of_experts(cls, experts: Experts, mlp_dim: int, held: int) -> "Shards":
        """Returns those of the mesh for which this is traced.

        Args:
            experts: The experts of the model.
            mlp_dim: Their hidden width.
            held: The number of experts in the weights: all, or those that a replica owns.

        Raises:
            ValueError: The weights are of another number of experts.
        """
        mesh = jax.sharding.get_abstract_mesh()
        axes = tuple(mesh.auto_axes) if mesh.manual_axes else ()
        size = math.prod(mesh.shape[axis] for axis in axes)
        _check_held(held, experts.count, mesh)
        by_expert = experts.split == "experts" and held == experts.count
        split_dim = experts.count if by_expert else mlp_dim
        count = size if split_dim % size == 0 else 1
        return cls(axes, size, count, by_expert, owners=experts.count // held)

    def own(self, num_experts: int) -> tuple[int, Int[Array, "shards 1"]]:
        """Returns how many of a replica's experts each shard works on, and which part of them."""
        numbers = jnp.arange(self.count)[:, None]
        if self.by_expert:
            return num_experts // self.count, numbers
        return num_experts, jnp.zeros_like(numbers)

    def split(self, x: Any) -> Array:
        """Returns an array whose leading dim, of the shards, is split over them."""
        if self.count == 1:
            return x
        return lax.with_sharding_constraint(x, self._spec)

    def whole(self, x: Array) -> Array:
        """Returns an array that every shard has whole: XLA would split it, as its readers are, and gather it again."""
        if self.size == 1:
            return x
        return lax.with_sharding_constraint(x, PartitionSpec())

    def on_each(self, x: Shaped[Array, "*dims"]) -> Shaped[Array, "shards *dims"]:
        """Returns ``x`` on each shard."""
        if self.count == 1:  # not a broadcast, of which the derivative would be a sum
            return x.reshape(1, *x.shape)
        shape = (self.count, *x.shape)
        return self.split(jnp.broadcast_to(x[None], shape))

    def total(self, x: Float[Array, "shards *dims"]) -> Float[Array, "*dims"]:
        """Returns the sum over the shards."""
        if self.count == 1:
            return x.reshape(x.shape[1:])
        return x.sum(0)

    def each(self, function: Callable[..., Array], *args: Array) -> Array:
        """Returns ``function`` of each shard's part of the arguments, for a kernel that XLA cannot split."""
        if not self.axes:
            return function(*args)
        return self._each(function, self._spec, *args)

    def send(
        self, function: Callable[[Array], Array], rows: Float[Array, "*rows width"]
    ) -> Float[Array, "*sent width"]:
        """Returns ``function(rows)``, a collective over the replicas, of a slice of the width on each shard.

        Otherwise every shard would send the whole rows.
        """
        spec = self._of_width(rows)
        if spec is None:
            return function(rows)
        return self._each(function, spec, rows)

    def sliced(self, rows: Any) -> Float[Array, "*rows width"]:
        """Returns rows of which each shard has a slice of the width, as they are sent."""
        spec = self._of_width(rows)
        if spec is None:
            return rows
        return lax.with_sharding_constraint(rows, spec)

    def _of_width(self, rows: Array) -> PartitionSpec | None:
        *others, width = rows.shape
        if self.size == 1 or width % self.size:
            return None
        return PartitionSpec(*(None for _ in others), self.axes)

    def _each(self, function: Callable[..., Array], spec: PartitionSpec, *args: Array) -> Array:
        on_shards = jax.shard_map(
            function,
            in_specs=(spec,) * len(args),
            out_specs=spec,
            axis_names=set(self.axes),
            check_vma=False,
        )
        return on_shards(*args)

    @property
    def _spec(self) -> PartitionSpec:
        return PartitionSpec() if self.count == 1 else PartitionSpec(self.axes)


def _check_held(held: int, num_experts: int, mesh: jax.sharding.AbstractMesh) -> None:
    """Raises ValueError unless the weights are of all experts, or of equal parts of them over the owners."""
    replicas = mesh.shape[OWNERS] if OWNERS in mesh.manual_axes else 1
    if held not in (num_experts, num_experts / replicas):
        raise ValueError(
            f"the weights of experts must be of all of them, or of equal parts over {OWNERS}; got those of {held} of "
            f"{num_experts} experts, {OWNERS}={replicas}. Make the params from "
            "transformer.param_table(config), and shard them by its dims."
        )


# Slots ----------------------------------------------------------------------------------------------------------------------


def dropless(
    chosen: Int[Array, " pairs"], num_experts: int, shards: Shards, *, tile: int, room: int
) -> Slots:
    """Returns slots for all pairs, in the order of the experts, each expert's beginning at a multiple of ``tile``.

    With experts of 3, 0 and 2 pairs and a tile of 2:

        slots   0 0 0 . 2 2          begins 0 4 4      ends 4 4 6

    Args:
        chosen: The expert of each pair; ``num_experts`` for none.
        num_experts: The number of experts on this replica.
        shards: The shards.
        tile: A number of rows.
        room: The most pairs that may have an expert. Those after them get no slot.
    """
    count = shards.count
    own, part = shards.own(num_experts)
    by_expert = _sorted(chosen[None], num_experts, shards)
    of_shard = lambda a: jnp.broadcast_to(a.reshape(-1, own), (count, own))
    num_slots = _num_slots(own, tile, room)
    num_tiles = -(-of_shard(by_expert.sizes) // tile)
    ends = jnp.cumsum(num_tiles * tile, 1)
    ends = jnp.minimum(ends, num_slots)
    sizes = jnp.diff(ends, axis=1, prepend=0)
    begins = ends - sizes

    # The slot of a pair: that of its expert's first, and its place among the expert's.
    pairs = chosen[None]
    expert = jnp.broadcast_to(pairs % own, (count, len(chosen)))
    slot = at(begins, expert) + by_expert.rank
    is_own = pairs // own == part
    has_slot = is_own & (slot < num_slots)
    slot = jnp.where(has_slot, slot, num_slots)

    # The pair of a slot, the other way around.
    here = jnp.arange(num_slots, dtype=ends.dtype)
    here = jnp.broadcast_to(here[None], (count, num_slots))
    is_past = ends[:, :, None] <= here[:, None]
    expert = jnp.sum(is_past, 1)
    is_one = expert < own
    expert = jnp.minimum(expert, own - 1)
    within = here - at(begins, expert)
    is_taken = is_one & (within < at(of_shard(by_expert.sizes), expert))
    place = at(of_shard(by_expert.starts), expert) + within
    place = jnp.where(is_taken, place, 0)
    pair = by_expert.order[0, place]
    pair = jnp.where(is_taken, pair, len(chosen))
    return Slots(pair, slot, sizes)


def _num_slots(num_experts: int, tile: int, room: int) -> int:
    """Returns how many slots ``room`` pairs of some experts may take; experts without pairs have none."""
    if tile == 1:
        return room
    of_all = -(-room // tile) * tile + num_experts * tile
    return min(room * tile, of_all)


def within_capacity(
    chosen: Int[Array, "batch seq chosen"], num_experts: int, shards: Shards, *, capacity: int
) -> Slots:
    """Returns ``capacity`` slots for each expert and row, in this order, which the row's first tokens get.

        slot = (expert * rows + row) * capacity + rank of the pair among the row's for this expert

    Args:
        chosen: The experts of each token; ``num_experts`` for none.
        num_experts: The number of experts on this replica.
        shards: The shards.
        capacity: The slots of an expert for a row.
    """
    rows = len(chosen)
    own, part = shards.own(num_experts)
    chosen = chosen.reshape(rows, -1)
    by_expert = _sorted(chosen, num_experts, shards)
    row = jnp.arange(rows)[:, None]
    num_slots = own * rows * capacity

    # The slot of a pair.
    block = chosen % own * rows + row
    slot = block * capacity + by_expert.rank
    owner = chosen // own
    is_own = owner.reshape(1, -1) == part
    fits = by_expert.rank < capacity
    has_slot = is_own & fits.reshape(1, -1)
    slot = jnp.where(has_slot, slot.reshape(1, -1), num_slots)

    # The pair of a slot [experts, rows, capacity], the other way around.
    here = jnp.arange(capacity)[None, None]
    is_taken = here < by_expert.sizes.T[:, :, None]
    place = by_expert.starts.T[:, :, None] + here
    place = jnp.where(is_taken, place, 0)
    row = row[None]
    pair = by_expert.order[row, place] + row * chosen.shape[1]
    pair = jnp.where(is_taken, pair, chosen.size)
    pair = pair.reshape(-1, num_slots)
    pair = jnp.broadcast_to(pair, (shards.count, num_slots))
    of_each = rows * capacity
    sizes = jnp.full((shards.count, own), of_each, by_expert.sizes.dtype)
    return Slots(pair, slot, sizes)


class ByExpert(NamedTuple):
    """The pairs of each row in the order of the experts.

    Attributes:
        order: The pairs in this order.
        rank: The place of each pair among its expert's.
        sizes: How many pairs each expert has.
        starts: Where in the order those of each expert begin.
    """

    order: Int[Array, "rows pairs"]
    rank: Int[Array, "rows pairs"]
    sizes: Int[Array, "rows experts"]
    starts: Int[Array, "rows experts"]


def _sorted(chosen: Int[Array, "rows pairs"], num_experts: int, shards: Shards) -> ByExpert:
    order = jnp.argsort(chosen, axis=1, stable=True)
    sizes = shards.whole(_counts(chosen, num_experts))
    starts = shards.whole(jnp.cumsum(sizes, 1) - sizes)
    place = jnp.argsort(order, axis=1)
    expert = jnp.minimum(chosen, num_experts - 1)
    return ByExpert(order, place - at(starts, expert), sizes, starts)


def by_expert_first(owners: int, num_experts: int, room: int, shards: Shards) -> Slots:
    """Returns the slots, in the order [experts, owners, room], of rows that come from each owner as [experts, room]."""
    pairs = jnp.arange(owners * num_experts * room)

    def swapped(*sizes: int) -> Array:
        of_both = pairs.reshape(*sizes, room)
        in_order = of_both.swapaxes(0, 1).reshape(-1)
        return shards.on_each(in_order)

    sizes = jnp.full((shards.count, num_experts), owners * room)
    return Slots(swapped(owners, num_experts), swapped(num_experts, owners), sizes)


def num_over(chosen: Int[Array, "rows seq chosen"], count: int, room: int) -> Int[Array, " rows"]:
    """Returns how many pairs of each row are more than ``room`` of one of ``count`` experts."""
    sizes = _counts(chosen.reshape(len(chosen), -1), count)
    return jnp.maximum(sizes - room, 0).sum(1, dtype=jnp.int32)


def _counts(chosen: Int[Array, "rows pairs"], num_experts: int) -> Int[Array, "rows experts"]:
    chosen = chosen[..., None]
    numbers = jnp.arange(num_experts, dtype=chosen.dtype)
    of_each = chosen == numbers[None, None]
    return of_each.sum(1, dtype=jnp.int32)


def at(table: Int[Array, "rows entries"], index: Int[Array, "rows indices"]) -> Array:
    """Returns the entries of each row at these places, which must be in it."""
    return jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")


# Rows to slots and back -----------------------------------------------------------------------------------------------------


def _to_slots(k: int, x: Float[Array, "shards tokens width"], slots: Slots) -> Array:
    """Returns ``[shards, slots, width]``, the token of each slot's pair, zeros where there is none; a token has k pairs."""
    num_pairs = slots.slot.shape[1]
    is_taken = slots.pair < num_pairs
    token = jnp.where(is_taken, slots.pair, 0) // k
    return _take(x, token, is_taken)


def _to_tokens(k: int, rows: Float[Array, "shards slots width"], slots: Slots) -> Array:
    """Returns ``[shards, tokens, width]``, the sum of the rows of each token's k pairs."""
    num_slots = slots.pair.shape[1]
    has_slot = slots.slot < num_slots
    slot = jnp.where(has_slot, slots.slot, 0)
    picked = _take(rows, slot, has_slot)
    if k == 1:
        return picked
    shards, _, width = rows.shape
    of_tokens = picked.reshape(shards, -1, k, width)
    return of_tokens.sum(2)


def _take(
    x: Float[Array, "shards from width"],
    index: Int[Array, "shards to"],
    is_there: Bool[Array, "shards to"],
) -> Float[Array, "shards to width"]:
    index = index[..., None]
    rows = jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")
    return jnp.where(is_there[..., None], rows, 0)


def _with_transpose(move: Move, back: Move) -> Move:
    """Returns a linear ``move(k, rows, slots)`` whose transpose is ``back``."""

    def forward(k: int, x: Array, slots: Slots) -> tuple[Array, Slots]:
        # The gather itself, which a layer's backward pass may repeat: it does not look into a jax.custom_vjp.
        return move(k, x, slots), slots

    def backward(k: int, slots: Slots, ct: Array) -> tuple[Array, None]:
        return back(k, ct, slots), None

    moved = jax.custom_vjp(move, nondiff_argnums=(0,))
    moved.defvjp(forward, backward)
    return moved


dispatch = _with_transpose(_to_slots, _to_tokens)
combine = _with_transpose(_to_tokens, _to_slots)
