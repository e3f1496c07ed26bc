"""Builds what a stage needs in every tick from a model: its ends, its layer split into ops, and flat lists of its params."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import row_major
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.split import SplitLayer, split_layer
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.mesh import TENSOR
from jaxpar.pipeline.embed_and_head import cut_ends
from jaxpar.pipeline.layer_grads import LayerGrads
from jaxpar.pipeline.layer_loop import LayerLoop
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.masks import is_maskable
from jaxpar.pipeline.program import Program, spmd_program
from jaxpar.pipeline.stage import Stage
from jaxpar.shard_map import on_tensor_shards
from jaxpar.trainable import only_trained, trained_indices


def build_stage(
    model: LayeredModel,
    loss: Callable,
    program: Program,
    layout: LayerLayout,
    params: PyTree,
    *,
    microbatches: PyTree,
    total_weight: jax.Array,
    gather_layer: Callable[[PyTree], PyTree] = lambda params: params,
    scatter_layer: Callable[[PyTree], PyTree] = lambda grads: grads,
    reduce_layers: Callable[[PyTree], PyTree] = lambda grads: grads,
    adds_late: bool = False,
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
        gather_layer: Applied to the params of one layer, cast if the layer only casts them, before each use (ZeRO 3).
        scatter_layer: Applied to the gradients of one layer before they are added (ZeRO 2 and 3 shard them).
        reduce_layers: Reduces the complete gradients of some layers over the replicas, in a segment that ``reduces``.
        adds_late: Whether masked ticks apply ``scatter_layer`` to a layer's gradients while they compute those of the next one.
        layer_shards: How the params of a layer are sharded over ``tensor``, by default replicated.
        outer_specs: The PartitionSpecs over ``tensor`` of outer, by default replicated.
    """
    layers, params_tree = jax.tree.flatten(params[LAYERS])
    shards_of_one = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params[LAYERS])
    one_layer = jax.eval_shape(gather_layer, shards_of_one)
    own_layer, layer_tree = jax.tree.flatten(only_trained(one_layer))
    microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), microbatches)
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    shards = layer_shards or ParamShards((None,) * len(layers), jax.sharding.get_abstract_mesh().shape[TENSOR])
    layer = split_layer(model.layers(1)[0], one_layer, x, shards)
    ends = cut_ends(model, loss, params[OUTER], x, microbatch)
    if program.masks and (skips := ends.skips | _skips(layer, program)):
        program = spmd_program(program.schedule, masks=True, overlaps=program.overlaps, skips=skips)
    outer, outer_tree = jax.tree.flatten(params[OUTER])
    specs = [PartitionSpec()] * len(outer) if outer_specs is None else jax.tree.leaves(outer_specs)
    if program.masks and not all(segment.masks("F") for segment in program.segments):
        # Otherwise a lookup in a branch first copies the complete table of embeddings to row-major order, in each tick.
        outer = [on_tensor_shards(row_major, *each) for each in zip(outer, specs, strict=True)]
    gather = lambda leaves: jax.tree.leaves(gather_layer(jax.tree.unflatten(params_tree, leaves)))
    layer_loop = LayerLoop(layout, layer.cast(layers), gather, program.masks)
    on_leaves = lambda function: lambda leaves: jax.tree.leaves(function(jax.tree.unflatten(layer_tree, leaves)))
    cut_grads = on_leaves(scatter_layer)
    return Stage(
        program=program,
        layout=layout,
        ends=ends,
        layer=layer,
        outer=outer,
        trained_outer=[leaf if i in trained_indices(params[OUTER]) else None for i, leaf in enumerate(outer)],
        trained_layer=own_layer,
        outer_tree=outer_tree,
        layer_tree=layer_tree,
        x=jax.tree.leaves(x),
        microbatches=microbatches,
        total_weight=total_weight,
        cut_grads=cut_grads,
        layers=layer_loop,
        layer_grads=LayerGrads(layer_loop, cut_grads, on_leaves(reduce_layers), adds_late),
        in_order=_in_order(layer, shards if program.masks else None),
    )


def _skips(layer: SplitLayer, program: Program) -> set[str]:
    """The kinds of op that an idle stage must skip, for what a layer does in them."""
    stores = {("R" if program.schedule.recomputes else "F"): "forward_and_store"}
    plans = {"F": "forward"} | stores | {"B": "backward"}
    if program.schedule.splits_backward:
        plans |= {"B": "backward_input", "W": "backward_weights"}
    return {kind for kind, plan in plans.items() if not is_maskable(node.equation for node in layer.plans[plan].nodes)}


def _in_order(layer: SplitLayer, shards: ParamShards | None) -> dict[str, list[Callable[[Any], Any]]]:
    """Returns, for each buffer, one function per stored value, which makes a transposed value row-major in memory.

    Otherwise XLA may write a transposed value as it was before, or read it as a product wants it, and transpose the whole
    buffer for that; it does so on GPUs. XLA's partitioner would gather a value to fix its order, so each shard over ``tensor``
    is fixed on its own.

    Args:
        layer: The layer.
        shards: How its params are sharded over ``tensor``; None where XLA may choose the order.
    """
    names = ("residuals_b", "residuals_w", "cotangents_w")
    if shards is None:
        return {name: [lambda array: array] * len(layer.values[name]) for name in names}
    cuts = shards.partition(layer.graph, layer.values["params"]).cuts

    def order(value: int) -> Callable[[Any], Any]:
        cut = cuts.get(value)
        if not layer.graph.is_transposed(value) or (cut is None and shards.num_shards > 1):
            return lambda array: array
        dims = range(len(layer.graph.avals[value].shape))
        spec = PartitionSpec(*(TENSOR if dim == cut else None for dim in dims))
        return partial(on_tensor_shards, row_major, spec=spec)

    return {name: [order(value) for value in layer.values[name]] for name in names}
