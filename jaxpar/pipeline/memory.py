"""The bytes that a pipeline step needs on a device beyond its arguments, estimated from shapes before compilation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar.backward.min_cut import peak_bytes
from jaxpar.backward.partition import ParamShards, Partition, cut_of, shard_shape
from jaxpar.backward.split import SplitLayer, split_layer
from jaxpar.dtypes import num_bytes, wide_dtype
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.mesh import TENSOR
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import Program


def buffer_bytes(
    model: LayeredModel,
    program: Program,
    layout: LayerLayout,
    params: PyTree,
    microbatch: PyTree,
    *,
    shardings: PyTree | None = None,
) -> dict[str, int]:
    """Returns the bytes of each buffer of the compiled step on one device, by name.

    ``inbox``, ``residuals_b``, ``residuals_w`` and ``cotangents_w`` are those of ``program.py``; ``cast_layers`` holds the
    params that ops use in another dtype than their own; ``layer_grads`` and ``outer_grads`` hold sums of gradients;
    ``one_layer`` is the peak of live values while an op runs one layer.

    Args:
        model: The model.
        program: The compiled schedule.
        layout: Which stage and chunk holds which layers.
        params: The model's params in canonical order, or ShapeDtypeStructs.
        microbatch: One microbatch of one replica, likewise.
        shardings: The NamedShardings of the params, if they are sharded over ``tensor``.
    """
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params[LAYERS])
    tensor = 1 if shardings is None else jax.tree.leaves(shardings)[0].mesh.shape[TENSOR]
    specs = (
        jax.tree.map(lambda _: PartitionSpec(), params)
        if shardings is None
        else jax.tree.map(lambda s: s.spec, shardings)
    )
    shards = ParamShards.of_layers(jax.tree.leaves(specs[LAYERS]), tensor)
    split = split_layer(model.layers(1)[0], one_layer, x, shards)
    layer = shards.partition(split.graph, split.values["params"])
    outer = [
        shard_shape(leaf, cut_of(spec, TENSOR), tensor)
        for leaf, spec in zip(jax.tree.leaves(params[OUTER]), jax.tree.leaves(specs[OUTER]), strict=True)
    ]
    own = [shard_shape(leaf, cut, tensor) for leaf, cut in zip(jax.tree.leaves(one_layer), shards.cuts, strict=True)]
    splits, leaves = program.schedule.splits_backward, jax.tree.leaves(x)
    return buffers_of(split, layer, program.num_slots, splits, layout, leaves, own) | {
        "outer_grads": num_bytes(_totals(outer))
    }


def buffers_of(
    split: SplitLayer,
    layer: Partition,
    slots: Mapping[str, int],
    splits_backward: bool,
    layout: LayerLayout,
    x: Sequence[Any],
    params: Sequence[Any],
    one_layer: int | None = None,
) -> dict[str, int]:
    """Returns the result of ``buffer_bytes`` without ``outer_grads``, from a layer that is already traced.

    Args:
        split: The layer, split into F, B and W.
        layer: The partition of its graph on one device.
        slots: The number of slots of each buffer.
        splits_backward: Whether B and W are separate ops.
        layout: Which stage and chunk holds which layers.
        x: The arrays that are sent between stages.
        params: The params of one layer on a device, in their own dtypes.
        one_layer: The bytes of ``one_layer``, if known.
    """
    positions = layout.positions_per_chunk
    backward = ["backward_input", "backward_weights"] if splits_backward else ["backward"]
    ring = lambda name: slots[name] * positions * num_bytes(layer.shapes(split.values[name]))
    in_use = layer.shapes(split.values["params"])
    cast = [new for old, new in zip(params, in_use, strict=True) if new.dtype != old.dtype]
    return {
        "inbox": (slots["inbox"] + 1) * num_bytes(x),
        **{name: ring(name) for name in ("residuals_b", "residuals_w", "cotangents_w")},
        "cast_layers": layout.num_chunks * positions * num_bytes(cast),
        "layer_grads": layout.num_chunks * positions * num_bytes(_totals(params)),
        "one_layer": one_layer
        or max(peak_bytes(layer.graph, *split.plans[plan]) for plan in ("forward_and_store", *backward)),
    }


def _totals(arrays: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of sums of arrays, in float32 or wider."""
    return [jax.ShapeDtypeStruct(a.shape, wide_dtype(a.dtype)) for a in arrays]
