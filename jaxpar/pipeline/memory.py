"""How many bytes a pipeline step needs on a device beyond its arguments, told from shapes before anything is compiled."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.pipeline.buffers import to_raw
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import Program
from jaxpar.pipeline.split import split_layer


def buffer_bytes(
    model: LayeredModel, program: Program, layout: LayerLayout, params: PyTree, microbatch: PyTree
) -> dict[str, int]:
    """Returns the bytes of each buffer of the compiled step on one device, by name, for ``tensor=1``.

    ``inbox``, ``stored_b``, ``stored_w`` and ``kept`` are those of ``program.py``; ``cast_layers`` are the params that ops use
    in another dtype than theirs; ``layer_grads`` and ``outer_grads`` add gradients up; ``one_layer`` is what lives while an
    op works on a layer.

    Args:
        model: The model.
        program: The compiled schedule.
        layout: Where layers live.
        params: The model's params in canonical order, or ShapeDtypeStructs.
        microbatch: One replica's rows of one microbatch, likewise.
    """
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params[LAYERS])
    split = split_layer(model.layers(1)[0], one_layer, x)
    slots, places = program.num_slots, layout.places_per_chunk
    backward = ["backward_input", "backward_weights"] if program.schedule.splits_backward else ["backward"]
    functions = ["forward_and_store", *backward]
    totals = lambda tree: [jax.ShapeDtypeStruct(p.shape, jnp.promote_types(p.dtype, jnp.float32)) for p in tree]
    own = jax.tree.leaves(one_layer)
    cast = [new for old, new in zip(own, jax.eval_shape(split.cast, own), strict=True) if new.dtype != old.dtype]
    return {
        "inbox": (slots["inbox"] + 1) * _num_bytes(jax.tree.leaves(x)),
        "stored_b": slots["stored_b"] * places * _num_bytes(split.stored_b),
        "stored_w": slots["stored_w"] * places * _num_bytes(split.stored_w),
        "kept": slots["kept"] * places * _num_bytes(split.kept),
        "cast_layers": layout.num_chunks * places * _num_bytes(cast),
        "layer_grads": layout.num_chunks * places * _num_bytes(totals(own)),
        "outer_grads": _num_bytes(totals(jax.tree.leaves(params[OUTER]))),
        "one_layer": max(split.working_bytes[function] for function in functions),
    }


def _num_bytes(arrays: Iterable[Any]) -> int:
    raw: Callable = lambda a: jax.eval_shape(to_raw, jax.ShapeDtypeStruct(a.shape, a.dtype))
    return sum(r.size * r.dtype.itemsize for r in map(raw, arrays))
