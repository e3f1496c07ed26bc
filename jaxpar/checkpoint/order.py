"""Layers from packed to canonical order and back: a checkpoint knows no stages and no chunks.

What is packed are the leaves under "layers" of the params and, in the optimizer's state, of each tree that is like the params.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS
from jaxpar.pipeline import LayerLayout
from jaxpar.sharding import path_string
from jaxpar.train import TrainState


def to_canonical(state: TrainState, layout: LayerLayout | None) -> TrainState:
    """Returns a state whose layers lie in the model's order, without padding."""
    if layout is None or layout.is_canonical:
        return state
    packed = _packed_leaves(state, layout)
    shardings = jax.tree.map(lambda leaf, is_packed: _canonical_sharding(leaf, layout, is_packed), state, packed)
    unpack = lambda leaf, is_packed: layout.unpack(leaf) if is_packed else leaf
    return jax.jit(lambda state: jax.tree.map(unpack, state, packed), out_shardings=shardings)(state)


def from_canonical(state: TrainState, target: TrainState, layout: LayerLayout | None) -> TrainState:
    """Returns a state as ``target`` is: its layers packed, its dtypes, its shardings."""
    same = lambda leaf, want: leaf.dtype == want.dtype
    if (layout is None or layout.is_canonical) and all(jax.tree.leaves(jax.tree.map(same, state, target))):
        return state
    packed = _packed_leaves(target, layout)

    def pack(leaf: jax.Array, want: Any, is_packed: bool) -> jax.Array:
        return (layout.pack(leaf) if layout is not None and is_packed else leaf).astype(want.dtype)

    shardings = jax.tree.map(lambda want: want.sharding, target)
    return jax.jit(lambda state: jax.tree.map(pack, state, target, packed), out_shardings=shardings)(state)


def target_in_canonical_order(target: TrainState, mesh: Mesh, layout: LayerLayout | None) -> TrainState:
    """Returns ShapeDtypeStructs for a state to restore, in canonical order.

    Raises:
        TypeError: A leaf has no NamedSharding.
        ValueError: A leaf lies on another mesh.
    """
    jax.tree_util.tree_map_with_path(lambda path, leaf: _check_on_mesh(path, leaf, mesh), target)
    packed = _packed_leaves(target, layout)

    def abstract(leaf: Any, is_packed: bool) -> jax.ShapeDtypeStruct:
        shape = (layout.num_layers, *leaf.shape[1:]) if layout is not None and is_packed else leaf.shape
        sharding = leaf.sharding if layout is None else _canonical_sharding(leaf, layout, is_packed)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(abstract, target, packed)


def _check_on_mesh(path: tuple, leaf: PyTree, mesh: Mesh) -> None:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"every leaf of a restore's target must have a NamedSharding; got {type(sharding).__name__} for "
            f"{path_string(path)}. Take a state from jaxpar.init_state, or ShapeDtypeStructs with sharding=."
        )
    if sharding.mesh != mesh:
        raise ValueError(
            f"a restore's target must lie on the manager's mesh, {dict(mesh.shape)}; got "
            f"{dict(sharding.mesh.shape)} for {path_string(path)}. Make both with one mesh."
        )


def _canonical_sharding(leaf: Any, layout: LayerLayout, is_packed: bool) -> NamedSharding:
    """Returns a leaf's sharding in canonical order: that of its packed form, if the layers can be shared out as evenly."""
    entries = (*leaf.sharding.spec, *(None,) * (leaf.ndim - len(leaf.sharding.spec)))
    if not is_packed or entries[0] is None:
        return leaf.sharding
    axes = (entries[0],) if isinstance(entries[0], str) else entries[0]
    parts = math.prod(leaf.sharding.mesh.shape[axis] for axis in axes)
    first = entries[0] if layout.num_layers % parts == 0 else None
    return NamedSharding(leaf.sharding.mesh, PartitionSpec(first, *entries[1:]))


def _packed_leaves(state: TrainState, layout: LayerLayout | None) -> PyTree:
    """Returns for each leaf whether its leading dim is that of packed layers."""
    if layout is None or layout.is_canonical:
        return jax.tree.map(lambda _: False, state)
    shapes = {_under_layers(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}

    def is_packed(path: tuple, leaf: Any) -> bool:
        name = _under_layers(path)
        if name is None or math.prod(leaf.shape) <= 1:
            return False
        if leaf.shape != shapes.get(name) or leaf.shape[0] != layout.num_places:
            raise ValueError(
                f"what is kept of a packed layer must have the shape of its param, [{layout.num_places}, ...]; got "
                f"{list(leaf.shape)} for {path_string(path)}. Use an optimizer that keeps moments of that shape, or leave the "
                "layers in the model's order."
            )
        return True

    fields = {each.name: getattr(state, each.name) for each in dataclasses.fields(state)}
    return TrainState(**jax.tree_util.tree_map_with_path(is_packed, fields))


def _under_layers(path: tuple) -> str | None:
    """Returns the path from "layers" on; None for what is not under it."""
    names = [getattr(step, "key", None) for step in path]
    return path_string(path[names.index(LAYERS) :]) if LAYERS in names else None
