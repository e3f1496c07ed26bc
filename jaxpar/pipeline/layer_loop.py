"""Loops over the layers of a stage's chunks, and their gradients: added to the sums of earlier microbatches, and reduced.

ZeRO 3 reduce-scatters the gradients of a layer before it adds them. In a program that masks, the loop does so one trip behind:

    layer L      its gradients
    layer L-1    its gradients; at the same time those of L are reduce-scattered and added to their sums
    ...
    at the end   layer 0's are reduce-scattered and added

They then need nothing of the products of their trip, and XLA runs these between the start and the end of the collective. So
does ZeRO 2 with one stage, beside ``tensor`` if ``overlap_grad_reduce`` asks for it. At lower levels that lets the last B
reduce the complete sums of a layer in place of the reduce-scatter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.pipeline import buffers
from jaxpar.pipeline.control_flow import for_range, masked, stage_index
from jaxpar.pipeline.layer import Arrays, Layer
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import OpRow, Program

Span = tuple[int, Any]  # positions of layers in a chunk: the first, and that after the last
GradsOf = Callable[[Any, Any, Arrays], tuple[Any, Arrays]]
Finish = Callable[[Arrays, Arrays, Any], Arrays]


@dataclass(frozen=True)
class LayerLoop:
    """The layers of a stage, and loops over them.

    Attributes:
        layout: Which stage and chunk holds which layers.
        program: The compiled schedule.
        layer: The functions of one layer.
        given: This stage's packed layers ``[num_chunks * positions_per_chunk, ...]``.
        params: The same, already cast.
    """

    layout: LayerLayout
    program: Program
    layer: Layer
    given: Arrays
    params: Arrays

    # -- positions -----------------------------------------------------------------------------------------------------

    def num_layers(self, chunk: jax.Array) -> Any:
        """The number of layers of a chunk of this stage: an int if all chunks have the same, so that trip counts are static."""
        if self.layout.is_even:
            return self.layout.positions_per_chunk
        counts = jnp.asarray(self.layout.layer_counts)
        return counts[stage_index(), chunk]

    @property
    def common(self) -> Span:
        """The positions that hold a layer in every chunk."""
        return 0, self.layout.min_layers

    def others(self, chunk: jax.Array) -> Span:
        """The other positions at which a chunk holds a layer."""
        return self.layout.min_layers, self.num_layers(chunk)

    def params_at(self, chunk: jax.Array, position: Any) -> Arrays:
        """The params of the layer at a position of a chunk."""
        first = chunk * self.layout.positions_per_chunk
        stored = buffers.take(self.params, first + position, as_stored=self.program.masks)
        return self.layer.fetch(stored)

    def index(self, row: OpRow, name: str, position: Any) -> tuple:
        """The slot of a buffer and the place in it where the values of a layer are.

        F beside B turns round the positions that hold a layer in every chunk.
        """
        if row.reversed is not None:
            common = self.layout.min_layers
            is_turned = (row.reversed > 0) & (position < common)
            position = jnp.where(is_turned, common - 1 - position, position)
        return getattr(row, name), position

    # -- loops ---------------------------------------------------------------------------------------------------------

    def over_layers(
        self,
        body: Callable,
        chunk: jax.Array,
        carry: Any,
        *,
        back: bool = False,
        everywhere: Callable | None = None,
    ) -> Any:
        """Runs ``body(carry, position, layer_params)`` over the layers of a chunk, forward or backward.

        On a GPU the host waits in each trip of a loop whose length it does not know, so in a program that masks the positions
        that hold a layer in every chunk have a loop of their own, with the body ``everywhere`` if there is one.
        """
        if not self.program.masks:
            whole = 0, self.num_layers(chunk)
            return self.over_positions(whole, body, chunk, carry, back=back)
        loops = [(self.common, everywhere or body), (self.others(chunk), body)]
        for positions, each in loops[:: -1 if back else 1]:
            carry = self.over_positions(positions, each, chunk, carry, back=back)
        return carry

    def over_positions(
        self,
        positions: Span,
        body: Callable,
        chunk: jax.Array,
        carry: Any,
        *,
        back: bool = False,
    ) -> Any:
        """Does so over some positions."""

        def at(position: Any, carry: Any) -> Any:
            return body(carry, position, self.params_at(chunk, position))

        return for_range(*positions, at, carry, back=back)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def add_over_layers(
        self,
        grads_of: GradsOf,
        row: OpRow,
        carry: Any,
        sums: Arrays,
        *,
        back: bool = False,
        everywhere: GradsOf | None = None,
    ) -> tuple[Any, Arrays]:
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
        chunk = row.chunk
        if not self._is_behind(row):
            add, at_common = (self._adding(row, each) for each in (grads_of, everywhere))
            return self.over_layers(add, chunk, (carry, sums), back=back, everywhere=at_common)
        # The other positions have a loop whose length the host does not know.
        others, add = self.others(chunk), self._adding(row, grads_of)
        carry, sums = self.over_positions(others, add, chunk, (carry, sums), back=True)
        if row.reduces:
            finish, sums = self._reducing(row, sums)
        else:
            finish = self._added_at(row)
        return self._one_behind(everywhere, finish, chunk, carry, sums)

    def _is_behind(self, row: OpRow) -> bool:
        """Whether an op adds or reduces the gradients of a layer while it computes those of the next one."""
        # In a branch no collective runs beside anything; one stage has no branches.
        in_branch = row.on is True and self.layout.num_stages > 1
        return row.reduces or (self._is_late and not in_branch)

    @property
    def _is_late(self) -> bool:
        """Whether masked ticks reduce-scatter and add the gradients of a layer while they compute those of the next one.

        A gradient that waits takes memory: at ZeRO 2 it does so with microbatches in turn, and in other programs if asked for.
        """
        zero = self.layer.zero
        waits = zero.gathers_layers or zero.overlaps or self.program.is_in_turn
        return zero.scatters_early and waits

    def _adding(self, row: OpRow, grads_of: GradsOf) -> Callable:
        """The body of a loop that adds the gradients of a layer at once."""
        finish = self._added_at(row)

        def add(state: tuple, position: Any, params: Arrays) -> tuple:
            carry, sums = state
            carry, grads = grads_of(carry, position, params)
            return carry, finish(sums, grads, position)

        return add

    def _added_at(self, row: OpRow) -> Finish:
        first = row.chunk * self.layout.positions_per_chunk

        def added(sums: Arrays, grads: Arrays, position: Any) -> Arrays:
            own = self._masked(grads, row)
            return buffers.add_at(sums, own, first + position)

        return added

    def _one_behind(
        self,
        grads_of: GradsOf,
        finish: Finish,
        chunk: Any,
        carry: Any,
        totals: Arrays,
    ) -> tuple[Any, Arrays]:
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
            below = position - 1
            carry, grads = grads_of(carry, below, self.params_at(chunk, below))
            return carry, totals, grads, below

        state = carry, totals, grads, last
        carry, totals, grads, first = jax.lax.fori_loop(0, num_layers - 1, trip, state)
        return carry, finish(totals, grads, first)

    def _reducing(self, row: OpRow, sums: Arrays) -> tuple[Finish, Arrays]:
        """Returns a ``finish`` that adds the gradients of a layer and reduces their complete sums, and its totals.

        The totals take the place of the sums, except where reduced gradients have another shape (ZeRO 1). One stage has one
        chunk, in which every position holds a layer.
        """
        like = jax.eval_shape(self.layer.finish, [own[:1] for own in sums])
        totals = []
        for own, reduced in zip(sums, like, strict=True):
            shape = len(own), *reduced.shape[1:]
            totals.append(own if shape == own.shape else jnp.zeros(shape, reduced.dtype))

        def finish(totals: Arrays, grads: Arrays, position: Any) -> Arrays:
            complete = []
            for total, own in zip(totals, sums, strict=True):
                read = total if total.shape == own.shape else own
                complete.append(jax.lax.dynamic_slice_in_dim(read, position, 1))
            complete = buffers.add_at(complete, self._masked(grads, row), 0)
            reduced = []
            for total, new in zip(totals, self.layer.finish(complete), strict=True):
                new = new.astype(total.dtype)
                reduced.append(jax.lax.dynamic_update_slice_in_dim(total, new, position, axis=0))
            return reduced

        return finish, totals

    def _masked(self, grads: Arrays, row: OpRow) -> Arrays:
        """The gradients of one layer as they are added; zeros where the op is off."""
        return masked(row.on, self.layer.add(grads))
