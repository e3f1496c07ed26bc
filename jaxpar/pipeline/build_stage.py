"""Builds what a stage needs in every tick from a model: its ends, its layer split into ops, and flat lists of its params."""

from collections.abc import Callable

import jax
from jaxtyping import PyTree

from jaxpar.backward.split import split_layer
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.pipeline.ends import cut_ends
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import Program
from jaxpar.pipeline.stage import Stage


def build_stage(
    model: LayeredModel,
    loss: Callable,
    program: Program,
    layout: LayerLayout,
    params: PyTree,
    batch: PyTree,
    total_weight: jax.Array,
    scatter_layer: Callable[[PyTree], PyTree],
) -> Stage:
    """Returns the stage of one shard."""
    outer, outer_tree = jax.tree.flatten(params[OUTER])
    layers, layer_tree = jax.tree.flatten(params[LAYERS])
    one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params[LAYERS])
    microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    layer = split_layer(model.layers(1)[0], one_layer, x)
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
    )
