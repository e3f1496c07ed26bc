"""A Schedule walked from Python: each stage runs its own order of ops on its own devices, and no stage waits for a tick.

    for each op, in an order in which its inputs are there:
        dispatch the stage's jitted function      F, R, B, W (parts.py); returns at once, devices run what they have inputs for
        send what it made to the next stage       device to device

One process drives all devices. A stage's ops run in the order of the schedule, since each waits for the one before; what an
op stores is let go when the last op that reads it has been dispatched, so that a stage never holds more than the schedule's
peak. Stages share no program, so their layers may be unlike each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers
from jaxpar.manual import manual_over_data_and_stage
from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.at_rest import AtRest
from jaxpar.pipeline.ends import Ends, cut_ends
from jaxpar.pipeline.layout import LayerLayout, check_layout
from jaxpar.pipeline.parts import Part, add, jit_op, own_of, own_sharding, zeros_like_sums
from jaxpar.pipeline.split import SplitLayer, split_layer
from jaxpar.pipeline.submeshes import submeshes
from jaxpar.schedule import Op, Schedule

Values = dict[str, Any]
Shapes = Any


def run_free(
    model: LayeredModel,
    loss: Callable,
    mesh: Mesh,
    schedule: Schedule,
    layout: LayerLayout | None,
    *,
    cut: Callable[[PyTree, int], PyTree],
    reduce: Callable[[PyTree], PyTree],
    check: Callable[[PyTree, PyTree], None],
) -> Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]:
    """Returns ``(params, batch) -> (loss, gradients)`` that walks a schedule. It is called as it is, not under ``jax.jit``.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``.
        mesh: The mesh, all of whose devices this process must own.
        schedule: The schedule.
        layout: Where layers live, for stacked params that are packed already; for a list of layers which stage has which.
        cut: ``(a replica's rows, num_microbatches) -> microbatches`` with a leading dim.
        reduce: Sums over the replicas, called inside ``shard_map``.
        check: Raises where params or batch do not fit the model; called once for each new set of shapes.

    Raises:
        ValueError: The mesh has devices of several processes.
    """
    _check_one_process(mesh)
    schedule.check()
    made: dict[Any, _Pipeline] = {}

    def value_and_grad(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        leaves, tree = jax.tree.flatten((params, batch))
        _check_not_traced(leaves)
        key = (tree, *((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves))
        if key not in made:
            check(params, batch)
            made[key] = _Pipeline.build(model, loss, mesh, schedule, layout, params, batch, cut=cut, reduce=reduce)
        return made[key](params, batch)

    return value_and_grad


def _check_one_process(mesh: Mesh) -> None:
    processes = sorted({device.process_index for device in mesh.devices.flat})
    if len(processes) > 1:
        raise ValueError(
            'executor="free" drives all devices from one process; got a mesh over the processes '
            f'{processes}. Use executor="spmd".'
        )


def _check_not_traced(leaves: list) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            'executor="free" dispatches a program a stage from Python, so it is called with arrays; got a traced argument, '
            'under jax.jit or another transformation. Call it as it is, or use executor="spmd".'
        )


@dataclass(frozen=True)
class _Pipeline:
    """All that is made once for params and batches of given shapes: the jitted functions and where arrays go."""

    mesh: Mesh
    schedule: Schedule
    at_rest: AtRest
    ends: Ends
    shapes: PyTree
    meshes: list[Mesh]
    ops: dict[tuple[str, int], Callable]
    parts: list[Part]
    zeros: list[Callable[[], Values]]
    indices: list[list[jax.Array]]
    totals: Callable
    grads: list[Callable]
    routes: dict[tuple[str, int], list[NamedSharding]]

    @classmethod
    def build(
        cls,
        model: LayeredModel,
        loss: Callable,
        mesh: Mesh,
        schedule: Schedule,
        layout: LayerLayout | None,
        params: PyTree,
        batch: PyTree,
        *,
        cut: Callable,
        reduce: Callable,
    ) -> "_Pipeline":
        is_packed = layout is not None and is_stacked(params)
        count = num_layers(params)
        layout = layout or LayerLayout(count, schedule.num_stages, schedule.num_chunks, schedule.placement)
        check_layout(layout, schedule, count, is_packed=is_packed)
        at_rest = AtRest.of(params, mesh, layout, is_packed=is_packed)
        shapes, rows = jax.eval_shape(lambda *trees: trees, params, batch)
        own_rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0] // mesh.shape[DATA], *a.shape[1:]), a.dtype), rows)
        microbatch_of = lambda rows, index: jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), cut(rows, schedule.num_microbatches)
        )
        microbatch = jax.eval_shape(microbatch_of, own_rows, jax.ShapeDtypeStruct((), jnp.int32))
        layers, xs = _split(model, shapes, microbatch)
        ends = cut_ends(model, loss, shapes[OUTER], xs[-1], microbatch)

        meshes = submeshes(mesh)
        parts = _parts(schedule, layout, layers, xs, is_stacked(params), ends, microbatch_of)
        last, first = schedule.place_of(schedule.num_virtual_stages - 1)[0], schedule.place_of(0)[0]
        loss_shape, weight_shape, *_ = jax.eval_shape(
            ends.head, [jax.tree.leaves(shapes[OUTER])[i] for i in ends.head_reads], jax.tree.leaves(xs[-1]), microbatch
        )
        ...
