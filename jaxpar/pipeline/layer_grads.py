"""The gradients of a stage's layers: added to the sums of earlier microbatches and, if asked, reduced over the replicas.

The sums of all stages are complete in the last tick only. There, in a program that masks, the loop over layers also reduces:

    layer L      its gradients
    layer L-1    its gradients; at the same time those of L are added to their sums, and these are reduced
    ...
    at the end   layer 0's are added and reduced

Addition and reduction are one trip behind, so that they need nothing of the products of their trip, and XLA runs these between
the start and the end of the collective. With ZeRO 2, which reduce-scatters the gradients of every microbatch before it adds
them, the loop has this form in every masked tick.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpar.pipeline.masks import masked

if TYPE_CHECKING:
    from jaxpar.pipeline.stage import Row, Stage

GradsOf = Callable[[Any, Any, list], tuple[Any, list]]
Finish = Callable[[list, list, Any], list]


def add_over_layers(
    stage: "Stage", grads_of: GradsOf, row: "Row", carry: Any, sums: list, *, back: bool = False
) -> tuple[Any, list]:
    """Runs ``grads_of`` over the layers of a chunk; returns its last carry, and the sums with the gradients added.

    Args:
        stage: The stage.
        grads_of: ``(carry, position, layer_params) -> (carry, gradients)``.
        row: The op's row of the tables, and whether it ``reduces`` the complete sums over the replicas.
        carry: The first carry.
        sums: ``[num_chunks * positions_per_chunk, ...]`` for each param of a layer.
        back: Whether to run from the last layer to the first. An op that adds or reduces one position behind always does.
    """
    chunk, positions = row["chunk"], stage.layout.positions_per_chunk

    def own(grads: list) -> list:
        return masked(row["on"], stage.cut_grads(grads))

    def finish(sums: list, grads: list, position: Any) -> list:
        return stage.add_to_layer(sums, own(grads), chunk * positions + position)

    def add(both: tuple, position: Any, params: list) -> tuple:
        carry, grads = grads_of(both[0], position, params)
        return carry, finish(both[1], grads, position)

    is_masked = row["on"] is not True
    if not (row["reduces"] or (is_masked and stage.adds_late)):
        return stage.over_layers(add, chunk, (carry, sums), back=back)
    # The positions that do not hold a layer in every chunk are in a loop of their own, whose length the host does not know.
    of_some = (stage.layout.min_layers, stage.num_layers(chunk))
    carry, sums = stage.over_positions(*of_some, add, chunk, (carry, sums), back=True)
    if not row["reduces"]:
        return _adding_late(stage, grads_of, finish, chunk, carry, sums)
    by_chunk = [total.reshape(-1, positions, *total.shape[1:]) for total in sums]
    reduce, totals = _reducing(stage, own, chunk, by_chunk)
    carry, totals = _adding_late(stage, grads_of, reduce, chunk, carry, totals)
    return carry, [total.reshape(-1, *total.shape[2:]) for total in totals]


def _adding_late(
    stage: "Stage", grads_of: GradsOf, finish: Finish, chunk: Any, carry: Any, totals: list
) -> tuple[Any, list]:
    """Runs ``grads_of`` over the positions that hold a layer in every chunk, back, and ``finish`` one position behind."""
    if not stage.layout.min_layers:
        return carry, totals
    # XLA must not know the position: it turns slices at a loop's own index into asynchronous copies, and as of JAX 0.11 it
    # then ends the reduction before the products.
    last, totals = jax.lax.optimization_barrier((jnp.int32(stage.layout.min_layers - 1), totals))
    carry, grads = grads_of(carry, last, stage.params_at(chunk, last))

    def trip(_: Any, state: tuple) -> tuple:
        carry, totals, grads, position = state
        totals = finish(totals, grads, position)
        carry, grads = grads_of(carry, position - 1, stage.params_at(chunk, position - 1))
        return carry, totals, grads, position - 1

    state = jax.lax.fori_loop(0, stage.layout.min_layers - 1, trip, (carry, totals, grads, last))
    carry, totals, grads, first = state
    return carry, finish(totals, grads, first)


def _reducing(stage: "Stage", own: Callable[[list], list], chunk: Any, sums: list) -> tuple[Finish, list]:
    """Returns a ``finish`` that adds gradients and reduces the complete sums of all chunks at a position, and its totals.

    The totals take the place of the sums, except where reduced gradients have another shape (ZeRO). Those at positions that do
    not hold a layer in every chunk are reduced at once, also where they are padding, as they are without overlap.

    Args:
        stage: The stage.
        own: Masks and cuts the gradients of one layer.
        chunk: The chunk of those gradients.
        sums: ``[num_chunks, positions_per_chunk, ...]`` for each param of a layer.
    """
    everywhere, positions = stage.layout.min_layers, stage.layout.positions_per_chunk
    like = jax.eval_shape(stage.reduce_layers, [total[:, 0] for total in sums])
    in_place = [a.shape == total[:, 0].shape for a, total in zip(like, sums, strict=True)]
    totals = [
        total if same else jnp.zeros((len(total), positions, *a.shape[1:]), a.dtype)
        for total, a, same in zip(sums, like, in_place, strict=True)
    ]

    def put(totals: list, reduced: list, position: Any) -> list:
        write = lambda a, value: jax.lax.dynamic_update_slice_in_dim(a, value.astype(a.dtype), position, axis=1)
        return [
            write(total, value.reshape(len(total), -1, *total.shape[2:]))
            for total, value in zip(totals, reduced, strict=True)
        ]

    def finish(totals: list, grads: list, position: Any) -> list:
        read = [total if same else each for total, each, same in zip(totals, sums, in_place, strict=True)]
        at_position = [jax.lax.dynamic_index_in_dim(a, position, axis=1, keepdims=False) for a in read]
        return put(totals, stage.reduce_layers(stage.add_to_layer(at_position, own(grads), chunk)), position)

    if everywhere < positions:
        rest = [total[:, everywhere:] for total in sums]
        totals = put(totals, stage.reduce_layers([a.reshape(-1, *a.shape[2:]) for a in rest]), everywhere)
    return finish, totals
