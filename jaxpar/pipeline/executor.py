"""The SPMD executor: a loop over the ticks of a Program, in which each stage runs its row of the tables (``stage.py``).

``build_stage`` prepares what a stage needs in every tick from a model: its ends, its layer split into ops, and flat lists of
its params.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import row_major
from jaxpar.backward.partition import Cut, ParamShards
from jaxpar.backward.passes import LayerPasses
from jaxpar.backward.split import SplitLayer, split_layer
from jaxpar.devices import on_gpus
from jaxpar.dtypes import wide_dtype
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.mesh import STAGE, TENSOR
from jaxpar.pipeline.buffers import State
from jaxpar.pipeline.control_flow import is_maskable, permutes, stage_index
from jaxpar.pipeline.embed_and_head import Ends, Outer
from jaxpar.pipeline.layer import Layer, orders_in_memory
from jaxpar.pipeline.layer_ops import LayerOps
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.one_stage import accumulate_in_turn, writes_out
from jaxpar.pipeline.program import Program, Row, spmd_program
from jaxpar.pipeline.segments import Segment
from jaxpar.pipeline.stage import Stage
from jaxpar.schedule import NAMED, Schedule, check_schedule_name
from jaxpar.shard_map import on_tensor_shards
from jaxpar.trainable import only_trained, trained_indices
from jaxpar.zero import Zero


def masks_idle_ops(mesh: Mesh, schedule: str | Schedule) -> bool:
    """Returns whether programs of a schedule for a mesh mask the ops of idle stages.

    On GPUs, where a branch makes the host wait; and with several stages and tensor shards, since XLA may exchange what it
    cuts over ``tensor`` in a permutation, for which all devices of the mesh must meet (``check_permutes``). So they do if
    every tick is masked, as without W.
    """
    if isinstance(schedule, str):
        check_schedule_name(schedule)
    if mesh.devices.flat[0].platform == "gpu":
        return True
    splits_backward = (NAMED[schedule] if isinstance(schedule, str) else schedule).splits_backward
    return mesh.shape[STAGE] > 1 and mesh.shape[TENSOR] > 1 and not splits_backward


def accumulate_pipelined(stage: Stage, params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns one stage's ((loss_sum, further sums), gradients) over its replica's microbatches; call it under ``shard_map``.

    Losses and gradients are added, and returned, in float32 or wider.

    Args:
        stage: The stage, from ``build_stage``.
        params: The params that it was built from.

    Returns:
        This stage's contribution. The caller sums the sums and the gradients of outer over the stages
        (``sum_over_stages``); the gradients of layers are complete, and if the program reduces, reduced over the replicas.

    **Collectives**: over ``stage`` at most two collective-permutes a tick, of one activation each. For each microbatch and
    chunk a stage sends one activation to the next stage and one cotangent to the previous one.
    """
    state = accumulate_in_turn(stage) if stage.program.is_in_turn else _accumulate_over_ticks(stage)
    outer, layers = (jax.tree.structure(only_trained(params[part])) for part in (OUTER, LAYERS))
    of_outer = jax.tree.leaves(state.outer_grads)
    grads = {OUTER: outer.unflatten(of_outer), LAYERS: layers.unflatten(state.layer_grads)}
    return state.loss, grads


def _accumulate_over_ticks(stage: Stage) -> State:
    """Runs the ticks of a program, and returns the last state."""
    index = stage_index()
    names, columns = stage.program.table()
    table = jnp.asarray(columns)

    def tick(segment: Segment, number: jax.Array, state: State) -> State:
        def row_of(stage: jax.Array) -> Row:
            start = jnp.int32(number), stage, jnp.int32(0)
            row = jax.lax.dynamic_slice(table, start, (1, 1, len(names)))[0, 0]
            return dict(zip(names, row, strict=True))

        last = (
            row_of(jnp.int32(stage.program.schedule.num_stages - 1)) if stage.ends.parts else None
        )
        return stage.tick(segment, number, state, row_of(index), last)

    state = stage.first_state()
    for segment in stage.program.segments:
        if stage.program.reduces_in(
            segment
        ):  # one tick; with ZeRO 1 gradients have another shape after it
            state = tick(segment, jnp.int32(segment.start), state)
        else:
            state = jax.lax.fori_loop(segment.start, segment.stop, partial(tick, segment), state)
    return state


def build_stage(
    model: LayeredModel,
    loss: Callable,
    program: Program,
    layout: LayerLayout,
    params: PyTree,
    *,
    microbatches: PyTree,
    total_weight: jax.Array,
    zero: Zero,
    layer_shards: ParamShards | None = None,
    outer_specs: PyTree | None = None,
) -> Stage:
    """Returns the stage of one shard, for ``accumulate_pipelined``; call it under ``shard_map``.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with further sums after the two.
        program: The compiled schedule.
        layout: Which stage and chunk holds which layers.
        params: This stage's packed layers ``[num_chunks * positions_per_chunk, ...]`` and all of outer.
        microbatches: ``[num_microbatches, rows, ...]``, the same on every stage.
        total_weight: The weight of the whole batch; gradients are those of loss_sum / total_weight.
        zero: What the stage exchanges with other replicas.
        layer_shards: How the params of a layer are sharded over ``tensor``, by default replicated.
        outer_specs: The PartitionSpecs over ``tensor`` of outer, by default replicated.
    """
    leaves = jax.tree.leaves(params[LAYERS])
    num_shards = jax.sharding.get_abstract_mesh().shape[TENSOR]
    shards = layer_shards or ParamShards((None,) * len(leaves), num_shards)
    of_one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    microbatch = jax.tree.map(of_one, microbatches)
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    of_layers, of_outer = zero[LAYERS], zero[OUTER].by_grad(trained_indices(params[OUTER]))
    one_layer = jax.eval_shape(of_layers.fetch, jax.tree.map(of_one, params[LAYERS]))
    trained_layer = jax.tree.leaves(only_trained(one_layer))
    # XLA's CPU backend has not all products of 16-bit floats in float32.
    widens_grads = on_gpus() and writes_out(program, layout)
    split = split_layer(model.layers(1)[0], one_layer, x, shards, widens_grads=widens_grads)
    cuts = shards.partition(split.graph, split.values["params"]).cuts if program.masks else {}
    num_parts = _parts_of_head(program, split, cuts, shards.num_shards)
    ends = Ends(model, loss, params[OUTER], x, microbatch, **num_parts)
    program = _skipping(program, ends, split)
    _refuse_permutes(program, ends, split, layout)
    outer = _in_memory(jax.tree.leaves(params[OUTER]), program, outer_specs)
    orders = orders_in_memory(split, cuts, shards.num_shards, masks=program.masks)
    layer = Layer(split, LayerPasses(split, program.masks), of_layers, jax.tree.leaves(x), orders)
    added = jax.eval_shape(of_layers.add, list(map(_wide, trained_layer)))
    layer_sums = [_stacked(grad, layout) for grad in added]
    loss_sums = jax.tree.map(_wide, ends.loss_sums)
    return Stage(
        program=program,
        ends=ends,
        layers=LayerOps(layout, program, layer, leaves, split.cast(leaves)),
        embed=ends.read_by_embed(outer),
        head=_read_by_head(ends, outer, casts=program.masks),
        microbatches=microbatches,
        total_weight=total_weight,
        sums=(layer_sums, _outer_sums(params[OUTER], of_outer), loss_sums),
        zero=of_outer,
    )


def _wide(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, wide_dtype(leaf.dtype))


def _stacked(grad: Any, layout: LayerLayout) -> jax.ShapeDtypeStruct:
    """Returns the shape of the sums of a gradient of all layers of a stage."""
    positions = layout.num_chunks * layout.positions_per_chunk
    return jax.ShapeDtypeStruct((positions, *grad.shape), grad.dtype)


def _outer_sums(outer: PyTree, zero: Mapping[int, Zero]) -> Outer:
    """Returns the shapes of the sums of outer gradients."""
    leaves = jax.tree.leaves(outer)
    return {i: jax.eval_shape(of_grad.add, _wide(leaves[i])) for i, of_grad in zero.items()}


def _parts_of_head(
    program: Program,
    layer: SplitLayer,
    cuts: Mapping[int, Cut],
    num_shards: int,
) -> dict[str, Any]:
    """Returns how many stages may share the head, and how many shards over ``tensor`` the positions have, for ``Ends``."""
    schedule = program.schedule
    # With more chunks than stages the parts in all ticks are more than the heads in some. In a V a stage sends to itself.
    has_few_chunks = schedule.num_chunks < schedule.num_stages
    shares = program.masks and has_few_chunks and schedule.placement == "loop"
    # Under sequence parallelism the positions of a sequence are sharded between layers.
    splits_positions = shares and any(cuts.get(value) == 1 for value in layer.values["y"])
    return {
        "num_stages": schedule.num_stages if shares else 1,
        "num_shards": num_shards if splits_positions else 1,
        "is_forward": schedule.is_forward,
    }


def _skipping(program: Program, ends: Ends, layer: SplitLayer) -> Program:
    """Returns the program, in which idle stages skip what they must not run, if it masks idle ops."""
    if not program.masks:
        return program
    schedule, skips = program.schedule, set(ends.skips)
    plans = plans_of_ops(recomputes=schedule.recomputes, splits_backward=schedule.splits_backward)
    for op, plan in plans.items():
        equations = [node.equation for node in layer.plans[plan].nodes]
        if not is_maskable(equations):
            skips.add(op)
    if not skips:
        return program
    return spmd_program(schedule, masks=True, overlaps=program.overlaps, skips=skips)


def _refuse_permutes(program: Program, ends: Ends, layer: SplitLayer, layout: LayerLayout) -> None:
    """Raises if the model permutes values in an op that stages skip or repeat, each as often as it has work.

    XLA's collective-permute waits for all devices of the program, so a stage would be sent what belongs to another op.
    """
    if program.schedule.num_stages == 1:
        return
    is_whole = layout.is_even and all(segment.masked for segment in program.segments)
    nodes = (node.equation for plan in layer.plans.values() for node in plan.nodes)
    found = ["layer"] * (permutes(nodes) and not (is_whole and program.skips.isdisjoint("FRBW")))
    found += [
        end
        for end in sorted(ends.permutes)
        if not (is_whole and ends.is_masked(end, program, layout))
    ]
    if found:
        raise ValueError(
            "jax.lax.ppermute in a model needs stages that run each op at the same time; got one in "
            f"{', '.join(found)}, in a pipeline whose stages skip idle ops. Use mask_idle_ops=True with schedule 1f1b and as "
            "many layers on each stage, another collective such as jaxpar.context_parallel.gather_sequence, or stage=1."
        )


def _in_memory(outer: list, program: Program, specs: PyTree | None) -> list:
    """Returns the leaves of outer, row-major where a lookup in a branch reads them.

    Otherwise it first copies the complete table of embeddings to that order, in each tick.
    """
    if not program.masks or all(segment.masks("F") for segment in program.segments):
        return outer
    of_each = [PartitionSpec()] * len(outer) if specs is None else jax.tree.leaves(specs)
    pairs = zip(outer, of_each, strict=True)
    return [on_tensor_shards(row_major, leaf, spec) for leaf, spec in pairs]


def _read_by_head(ends: Ends, outer: list, *, casts: bool) -> Outer:
    """Returns what the head reads of outer, cast once: where idle stages mask it, all would cast it in each tick."""
    read = ends.read_by_head(outer)
    if not casts:
        return read
    return {i: leaf.astype(ends.head_dtypes[i]) for i, leaf in read.items()}


def plans_of_ops(
    *, recomputes: bool, splits_backward: bool, has_next: bool = True
) -> dict[str, str]:
    """Returns which of ``SplitLayer.plans`` each kind of op of a schedule runs.

    Args:
        recomputes: Whether the schedule has R.
        splits_backward: Whether it has W.
        has_next: Whether another layer of the chunk reads what one returns that runs again; else XLA leaves that out.
    """
    plans = {"F": "forward"}
    if recomputes:
        plans["R"] = "forward_and_store" if has_next else "store"
    else:
        plans["F"] = "forward_and_store"
    if splits_backward:
        return plans | {"B": "backward_input", "W": "backward_weights"}
    return plans | {"B": "backward"}
