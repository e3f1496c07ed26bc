"""The gradients of a stage's layers: added to the sums of earlier microbatches and, if asked, reduced over the replicas.

The sums of all stages are complete in the last tick only. There, in a program that masks, the loop over layers also reduces:

    layer L      its gradients
    layer L-1    its gradients; at the same time those of L are added to their sums, and these are reduced
    ...
    at the end   layer 0's are added and reduced

Addition and reduction are one trip behind, so that they need nothing of the products of their trip, and XLA runs these between
the start and the end of the collective. ZeRO 2 (if asked) and ZeRO 3 reduce-scatter the gradients of every microbatch before
they add them; the loop then has this form in every masked tick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.pipeline import buffers
from jaxpar.pipeline.layer_loop import LayerLoop
from jaxpar.pipeline.masks import masked

GradsOf = Callable[[Any, Any, list], tuple[Any, list]]
Finish = Callable[[list, list, Any], list]


@dataclass(frozen=True)
class LayerGrads:
    """How the gradients of layers are added and reduced.

    Attributes:
        loop: The layers.
        cut: Returns the gradients of one layer as they are added.
        reduce: Returns the complete gradients of some layers, along their leading dim, reduced over the replicas.
        adds_late: Whether masked ticks ``cut`` and add the gradients of a layer while they compute those of the next one.
    """

    loop: LayerLoop
    cut: Callable[[list], list]
    reduce: Callable[[list], list]
    adds_late: bool

    def add_over_layers(
        self,
        grads_of: GradsOf,
        row: dict[str, Any],
        carry: Any,
        sums: list,
        *,
        back: bool = False,
        everywhere: GradsOf | None = None,
    ) -> tuple[Any, list]:
        """Runs ``grads_of`` over the layers of a chunk; returns its last carry, and the sums with the gradients added.

        Args:
            grads_of: ``(carry, position, layer_params) -> (carry, gradients)``.
            row: The op's row of the tables, and whether it ``reduces`` the complete sums over the replicas.
            carry: The first carry.
            sums: ``[num_chunks * positions_per_chunk, ...]`` for each param of a layer.
            back: Whether to run from the last layer to the first; an op that adds or reduces one trip behind always does.
            everywhere: In place of ``grads_of`` at the positions that hold a layer in every chunk, in a program that masks.
        """
        chunk, positions = row["chunk"], self.loop.layout.positions_per_chunk
        own = lambda grads: masked(row["on"], self.cut(grads))
        finish = lambda sums, grads, position: self._added(sums, own(grads), chunk * positions + position)

        def adding(grads_of: GradsOf) -> Callable:
            def add(both: tuple, position: Any, params: list) -> tuple:
                carry, grads = grads_of(both[0], position, params)
                return carry, finish(both[1], grads, position)

            return add

        is_late = row["reduces"] or (row["on"] is not True and self.adds_late)
        if not is_late and everywhere is None:
            return self.loop.over_layers(adding(grads_of), chunk, (carry, sums), back=back)
        # The positions that do not hold a layer in every chunk: a loop whose length the host does not know, as without overlap.
        of_some = (self.loop.layout.min_layers, self.loop.num_layers(chunk))
        carry, sums = self.loop.over_positions(*of_some, adding(grads_of), chunk, (carry, sums), back=True)
        grads_of = everywhere or grads_of
        if not is_late:
            of_all = (0, self.loop.layout.min_layers)
            return self.loop.over_positions(*of_all, adding(grads_of), chunk, (carry, sums), back=True)
        if not row["reduces"]:
            return self._one_behind(grads_of, finish, chunk, carry, sums)
        reduce, totals = self._reducing(own, chunk, [a.reshape(-1, positions, *a.shape[1:]) for a in sums])
        carry, totals = self._one_behind(grads_of, reduce, chunk, carry, totals)
        return carry, [total.reshape(-1, *total.shape[2:]) for total in totals]

    def _one_behind(self, grads_of: GradsOf, finish: Finish, chunk: Any, carry: Any, totals: list) -> tuple[Any, list]:
        """Runs ``grads_of`` over the positions that hold a layer in every chunk, back, and ``finish`` one trip behind."""
        num_layers = self.loop.layout.min_layers
        if num_layers == 0:
            return carry, totals
        # XLA must not know the position: it turns slices at a loop's own index into asynchronous copies, and as of JAX 0.11 it
        # then ends the reduction before the products. Nor may it gather these params (ZeRO 3) for the next tick and compile
        # the ticks twice for that: they depend on the sums.
        last, totals = jax.lax.optimization_barrier((jnp.int32(num_layers - 1), totals))
        carry, grads = grads_of(carry, last, self.loop.params_at(chunk, last))

        def trip(_: Any, state: tuple) -> tuple:
            carry, totals, grads, position = state
            totals = finish(totals, grads, position)
            carry, grads = grads_of(carry, position - 1, self.loop.params_at(chunk, position - 1))
            return carry, totals, grads, position - 1

        carry, totals, grads, first = jax.lax.fori_loop(0, num_layers - 1, trip, (carry, totals, grads, last))
        return carry, finish(totals, grads, first)

    def _reducing(self, own: Callable[[list], list], chunk: Any, sums: list) -> tuple[Finish, list]:
        """Returns a ``finish`` that adds gradients and reduces the complete sums of all chunks at a position, and its totals.

        The totals take the place of the sums, except where reduced gradients have another shape (ZeRO 1). Those at positions
        that do not hold a layer in every chunk are reduced at once, also where they are padding, as they are without overlap.

        Args:
            own: Masks and cuts the gradients of one layer.
            chunk: The chunk of those gradients.
            sums: ``[num_chunks, positions_per_chunk, ...]`` for each param of a layer.
        """
        everywhere, positions = self.loop.layout.min_layers, self.loop.layout.positions_per_chunk
        like = jax.eval_shape(self.reduce, [a[:, 0] for a in sums])
        in_place = [new.shape == a[:, 0].shape for new, a in zip(like, sums, strict=True)]
        totals = [
            a if same else jnp.zeros((len(a), positions, *new.shape[1:]), new.dtype)
            for a, new, same in zip(sums, like, in_place, strict=True)
        ]

        def put(totals: list, reduced: list, position: Any) -> list:
            write = lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new.astype(a.dtype), position, axis=1)
            return [write(a, new.reshape(len(a), -1, *a.shape[2:])) for a, new in zip(totals, reduced, strict=True)]

        def finish(totals: list, grads: list, position: Any) -> list:
            read = [total if same else a for total, a, same in zip(totals, sums, in_place, strict=True)]
            here = [jax.lax.dynamic_index_in_dim(a, position, axis=1, keepdims=False) for a in read]
            return put(totals, self.reduce(self._added(here, own(grads), chunk)), position)

        if everywhere < positions:
            rest = [a[:, everywhere:] for a in sums]
            totals = put(totals, self.reduce([a.reshape(-1, *a.shape[2:]) for a in rest]), everywhere)
        return finish, totals

    def _added(self, sums: list, grads: list, index: Any) -> list:
        return buffers.add_at(sums, grads, index, as_stored=self.loop.masks)
