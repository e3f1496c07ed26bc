"""How many bytes a pipeline step needs on a device beyond its arguments, told from shapes before anything is compiled."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxpar.backward.min_cut import peak_bytes
from jaxpar.backward.partition import Partition, cut_of, partition, shard_shape
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

    ``inbox``, ``residuals_b``, ``residuals_w`` and ``cotangents_w`` are those of ``program.py``; ``cast_layers`` are the params
    that ops use in another dtype than their own; ``layer_grads`` and ``outer_grads`` are sums of gradients; ``one_layer`` is
    what is live while an op works on a layer.

    Args:
        model: The model.
        program: The compiled schedule.
        layout: Where layers live.
        params: The model's params in canonical order, or ShapeDtypeStructs.
        microbatch: One replica's rows of one microbatch, likewise.
        shardings: The params' NamedShardings, where a ``tensor`` axis cuts them.
    """
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params[LAYERS])
    split = split_layer(model.layers(1)[0], one_layer, x)
    tensor = 1 if shardings is None else jax.tree.leaves(shardings)[0].mesh.shape[TENSOR]
    cuts = jax.tree.map(lambda p: None, params) if shardings is None else jax.tree.map(_tensor_cut, shardings)
    of_layer = {
        i: None if cut is None else cut - 1
        for i, cut in zip(split.values["params"], _leaves(cuts[LAYERS]), strict=True)
    }
    layer = partition(split.graph, of_layer, tensor)
    outer = [
        shard_shape(leaf, cut, tensor)
        for leaf, cut in zip(jax.tree.leaves(params[OUTER]), _leaves(cuts[OUTER]), strict=True)
    ]
    own = [
        shard_shape(leaf, of_layer[i], tensor)
        for leaf, i in zip(jax.tree.leaves(one_layer), split.values["params"], strict=True)
    ]
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
    """Returns what ``buffer_bytes`` does, but for outer's gradients, from a layer that is traced already.

    Args:
        split: The layer, cut in F, B and W.
        layer: The same as a device runs it.
        slots: The slots of each buffer.
        splits_backward: Whether B and W are ops of their own.
        layout: Where layers live.
        x: What goes from stage to stage.
        params: The params of one layer on a device, in their own dtypes.
        one_layer: What lives while an op works on a layer, where it is known.
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
    """Sums of arrays, in float32 at least."""
    return [jax.ShapeDtypeStruct(a.shape, wide_dtype(a.dtype)) for a in arrays]


def _leaves(cuts: PyTree) -> list[int | None]:
    return jax.tree.leaves(cuts, is_leaf=lambda cut: cut is None)


def _tensor_cut(sharding: NamedSharding) -> int | None:
    return cut_of(sharding.spec, TENSOR)
