"""Builds what a stage needs in every tick from a model: its ends, its layer split into ops, and flat lists of its params."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import row_major
from jaxpar.backward.partition import cut_of, partition
from jaxpar.backward.split import SplitLayer, split_layer
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.mesh import TENSOR
from jaxpar.pipeline.ends import cut_ends
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import Program
from jaxpar.pipeline.stage import Stage
from jaxpar.shard_map import on_tensor_shards


def build_stage(
    model: LayeredModel,
    loss: Callable,
    program: Program,
    layout: LayerLayout,
    params: PyTree,
    batch: PyTree,
    total_weight: jax.Array,
    scatter_layer: Callable[[PyTree], PyTree],
    layer_specs: PyTree | None,
) -> Stage:
    """Returns the stage of one shard; ``layer_specs`` are the PartitionSpecs over ``tensor`` of its packed layers."""
    outer, outer_tree = jax.tree.flatten(params[OUTER])
    layers, layer_tree = jax.tree.flatten(params[LAYERS])
    one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params[LAYERS])
    microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    layer = split_layer(model.layers(1)[0], one_layer, x)
    specs = [PartitionSpec()] * len(layers) if layer_specs is None else jax.tree.leaves(layer_specs)
    return Stage(
        program=program,
        layout=layout,
        ends=cut_ends(model, loss, params[OUTER], x, microbatch),
        layer=layer,
        outer=outer,
        layers=layers,
        cast_layers=layer.cast(layers),
        outer_tree=outer_tree,
        layer_tree=layer_tree,
        x=jax.tree.leaves(x),
        microbatches=batch,
        total_weight=total_weight,
        scatter_layer=scatter_layer,
        fixes=_orders(layer, specs) if program.masks else {},
    )


def _orders(layer: SplitLayer, specs: list[PartitionSpec]) -> dict[str, list[Callable[[Any], Any]]]:
    """For each value that is stored, what it becomes before it is written: transposed ones, fixed in the order of their dims.

    Otherwise XLA may write a transposed value as it was before, and transpose the whole buffer when it is read; it does so on
    GPUs. XLA's partitioner would gather a value to fix its order, so each shard over ``tensor`` is fixed on its own.
    """
    num_shards = jax.sharding.get_abstract_mesh().shape[TENSOR]
    given = {i: cut_of(spec[1:], TENSOR) for i, spec in zip(layer.values["params"], specs, strict=True)}
    cuts = partition(layer.graph, given, num_shards).cuts

    def order(value: int) -> Callable[[Any], Any]:
        cut = cuts.get(value)
        if not layer.graph.is_transposed(value) or (cut is None and num_shards > 1):
            return lambda array: array
        dims = range(len(layer.graph.avals[value].shape))
        spec = PartitionSpec(*(TENSOR if dim == cut else None for dim in dims))
        return partial(on_tensor_shards, row_major, spec=spec)

    names = ("residuals_b", "residuals_w", "cotangents_w")
    return {name: [order(value) for value in layer.values[name]] for name in names}
