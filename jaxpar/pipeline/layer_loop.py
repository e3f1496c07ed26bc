"""Loops over the layers of a stage's chunks, and their gradients: added to the sums of earlier microbatches, and reduced.

ZeRO 3 reduce-scatters the gradients of a layer before it adds them. In a program that masks, the loop does so one trip behind:

    layer L      its gradients
    layer L-1    its gradients; at the same time those of L are reduce-scattered and added to their sums
    ...
    at the end   layer 0's are reduce-scattered and added

They then need nothing of the products of their trip, and XLA runs these between the start and the end of the collective. With
one stage that overlaps reductions the last B has this form too, and reduces the complete sums of a layer in place of the
reduce-scatter; at ZeRO 2 so does B of the microbatches before, as at ZeRO 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.pipeline import buffers
from jaxpar.pipeline.control_flow import for_range, masked, stage_index
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import OpRow

GradsOf = Callable[[Any, Any, list], tuple[Any, list]]
Finish = Callable[[list, list, Any], list]


@dataclass(frozen=True)
class LayerLoop:
    """The layers of a stage, and how their gradients are added.

    Attributes:
        layout: Which stage and chunk holds which layers.
        params: This stage's packed layers ``[num_chunks * positions_per_chunk, ...]``, already cast.
        masks: Whether the program masks idle ops.
        gather: Returns the params of one layer as ops read them; at ZeRO 3 it gathers them.
        scatter: Returns the gradients of one layer as they are added.
        reduce: Returns the complete gradients ``[1, ...]`` of a layer, reduced over the replicas.
        is_late: Whether masked ticks ``scatter`` and add the gradients of a layer while they compute those of the next one.
    """

    layout: LayerLayout
    params: list
    masks: bool
    gather: Callable[[list], list]
    scatter: Callable[[list], list]
    reduce: Callable[[list], list]
    is_late: bool

    def num_layers(self, chunk: jax.Array) -> Any:
        """The number of layers of a chunk of this stage: an int if all chunks have the same, so that trip counts are static."""
        if self.layout.is_even:
            return self.layout.positions_per_chunk
        return jnp.asarray(self.layout.layer_counts)[stage_index(), chunk]

    def params_at(self, chunk: jax.Array, position: Any) -> list:
        """The params of the layer at a position of a chunk."""
        index = chunk * self.layout.positions_per_chunk + position
        return self.gather(buffers.take(self.params, index, as_stored=self.masks))

    def index(self, row: OpRow, name: str, position: Any) -> tuple:
        """The slot of a buffer and the place in it where the values of a layer are.

        F beside B turns round the positions that hold a layer in every chunk.
        """
        if row.reversed is not None:
            common = self.layout.min_layers
            position = jnp.where((row.reversed > 0) & (position < common), common - 1 - position, position)
        return getattr(row, name), position

    def over_layers(
        self, body: Callable, chunk: jax.Array, carry: Any, *, back: bool = False, everywhere: Callable | None = None
    ) -> Any:
        """Runs ``body(carry, position, layer_params)`` over the layers of a chunk, forward or backward.

        On a GPU the host waits in each trip of a loop whose length it does not know, so in a program that masks the positions
        that hold a layer in every chunk have a loop of their own, with the body ``everywhere`` if there is one.
        """
        common = self.layout.min_layers if self.masks else 0
        loops = [(0, common, everywhere or body), (common, self.num_layers(chunk), body)]
        for start, stop, each in loops[:: -1 if back else 1]:
            carry = self.over_positions(start, stop, each, chunk, carry, back=back)
        return carry

    def over_positions(
        self, start: int, stop: Any, body: Callable, chunk: jax.Array, carry: Any, *, back: bool = False
    ) -> Any:
        """Does so over some positions."""
        at = lambda position, carry: body(carry, position, self.params_at(chunk, position))
        return for_range(start, stop, at, carry, back=back)

    def add_over_layers(
        self,
        grads_of: GradsOf,
        row: OpRow,
        carry: Any,
        sums: list,
        *,
        back: bool = False,
        everywhere: GradsOf | None = None,
    ) -> tuple[Any, list]:
        """Runs ``grads_of`` over the layers of a chunk; returns its last carry, and the sums with the gradients added.

        Args:
            grads_of: ``(carry, position, layer_params) -> (carry, gradients)``.
            row: The op's row of the tables.
            carry: The first carry.
            sums: ``[num_chunks * positions_per_chunk, ...]`` for each param of a layer.
            back: Whether to run from the last layer to the first; an op that adds or reduces one trip behind always does.
            everywhere: In place of ``grads_of`` at the positions that hold a layer in every chunk, in a program that masks.
        """
        everywhere = everywhere or grads_of
        # In a branch no collective runs beside anything; one stage has no branches.
        in_branch = row.on is True and self.layout.num_stages > 1
        if not (row.reduces or (self.is_late and not in_branch)):
            add, add_everywhere = self._adding(row, grads_of), self._adding(row, everywhere)
            return self.over_layers(add, row.chunk, (carry, sums), back=back, everywhere=add_everywhere)
        # Positions that do not hold a layer in every chunk have a loop whose length the host does not know.
        of_some, add = (self.layout.min_layers, self.num_layers(row.chunk)), self._adding(row, grads_of)
        carry, sums = self.over_positions(*of_some, add, row.chunk, (carry, sums), back=True)
        if not row.reduces:
            return self._one_behind(everywhere, self._added_at(row), row.chunk, carry, sums)
        reduce, totals = self._reducing(row, sums)
        return self._one_behind(everywhere, reduce, row.chunk, carry, totals)

    def _adding(self, row: OpRow, grads_of: GradsOf) -> Callable:
        """The body of a loop that adds the gradients of a layer at once."""
        finish = self._added_at(row)

        def add(state: tuple, position: Any, params: list) -> tuple:
            carry, grads = grads_of(state[0], position, params)
            return carry, finish(state[1], grads, position)

        return add

    def _added_at(self, row: OpRow) -> Finish:
        first = row.chunk * self.layout.positions_per_chunk
        return lambda sums, grads, at: buffers.add_at(sums, self._masked(grads, row), first + at)

    def _one_behind(self, grads_of: GradsOf, finish: Finish, chunk: Any, carry: Any, totals: list) -> tuple[Any, list]:
        """Runs ``grads_of`` over the positions that hold a layer in every chunk, back, and ``finish`` one trip behind."""
        num_layers = self.layout.min_layers
        if num_layers == 0:
            return carry, totals
        # XLA must not know the position: it turns slices at a loop's own index into asynchronous copies, and as of JAX 0.11 it
        # then ends the reduction before the products. Nor may it gather these params (ZeRO 3) for the next tick and compile
        # the ticks twice for that: they depend on the sums.
        last, totals = jax.lax.optimization_barrier((jnp.int32(num_layers - 1), totals))
        carry, grads = grads_of(carry, last, self.params_at(chunk, last))

        def trip(_: Any, state: tuple) -> tuple:
            carry, totals, grads, position = state
            totals = finish(totals, grads, position)
            carry, grads = grads_of(carry, position - 1, self.params_at(chunk, position - 1))
            return carry, totals, grads, position - 1

        carry, totals, grads, first = jax.lax.fori_loop(0, num_layers - 1, trip, (carry, totals, grads, last))
        return carry, finish(totals, grads, first)

    def _reducing(self, row: OpRow, sums: list) -> tuple[Finish, list]:
        """Returns a ``finish`` that adds the gradients of a layer and reduces their complete sums, and its totals.

        The totals take the place of the sums, except where reduced gradients have another shape (ZeRO 1). One stage has one
        chunk, in which every position holds a layer.
        """
        like = jax.eval_shape(self.reduce, [a[:1] for a in sums])
        in_place = [new.shape == (1, *a.shape[1:]) for new, a in zip(like, sums, strict=True)]
        totals = [
            a if same else jnp.zeros((len(a), *new.shape[1:]), new.dtype)
            for a, new, same in zip(sums, like, in_place, strict=True)
        ]

        def finish(totals: list, grads: list, position: Any) -> list:
            read = [total if same else a for total, a, same in zip(totals, sums, in_place, strict=True)]
            here = [jax.lax.dynamic_slice_in_dim(a, position, 1) for a in read]
            reduced = self.reduce(buffers.add_at(here, self._masked(grads, row), 0))
            write = lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new.astype(a.dtype), position, axis=0)
            return list(map(write, totals, reduced))

        return finish, totals

    def _masked(self, grads: list, row: OpRow) -> list:
        """The gradients of one layer as they are added; zeros where the op is off."""
        return masked(row.on, self.scatter(grads))
