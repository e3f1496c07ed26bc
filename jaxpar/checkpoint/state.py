"""What a checkpoint holds of a state: layers in canonical order, and PRNG keys as numbers.

Packed layers are PackedLayers, in the params and in each tree of the optimizer state that has the structure of the params. A
checkpoint has no stages and no chunks, so it holds the trees inside them, unpacked.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.checkpoint.manifest import PrngKey
from jaxpar.dtypes import is_key
from jaxpar.layered_model import is_packed, open_packed
from jaxpar.mesh import entry_axes, shown_sizes
from jaxpar.pipeline import LayerLayout
from jaxpar.sharding import path_string, replicated
from jaxpar.step.optimizer_state import owner_of
from jaxpar.train import TrainState

Layouts = list[LayerLayout | None]
Shape = tuple[int, ...]
OPT_STATE = (jax.tree_util.GetAttrKey("opt_state"),)


def check_canonical(state: TrainState) -> None:
    """Raises ValueError for a state, or its shapes, whose packed layers have no canonical order, so that it cannot be saved."""
    _layouts(state)


def to_canonical(state: TrainState) -> TrainState:
    """Returns a state with its layers in canonical order, without padding."""
    layouts = _layouts(state)
    if not any(layouts):
        return open_packed(state)
    leaves, tree = jax.tree.flatten(open_packed(state))
    unpack = lambda leaves: [
        leaf if layout is None else layout.in_canonical_order(leaf)
        for leaf, layout in zip(leaves, layouts, strict=True)
    ]
    shardings = [
        _canonical_sharding(leaf, layout) for leaf, layout in zip(leaves, layouts, strict=True)
    ]
    return tree.unflatten(jax.jit(unpack, out_shardings=shardings)(leaves))


def from_canonical(state: TrainState, target: TrainState) -> TrainState:
    """Returns a state with the packed layers, dtypes and shardings of ``target``."""
    (wanted, tree), layouts = jax.tree.flatten(target), _layouts(target)
    leaves = jax.tree.leaves(state)
    if not any(layouts) and all(
        leaf.dtype == want.dtype for leaf, want in zip(leaves, wanted, strict=True)
    ):
        return tree.unflatten(leaves)
    pack = lambda leaves: [
        (leaf if layout is None else layout.in_packed_order(leaf)).astype(want.dtype)
        for leaf, want, layout in zip(leaves, wanted, layouts, strict=True)
    ]
    return tree.unflatten(jax.jit(pack, out_shardings=[want.sharding for want in wanted])(leaves))


def canonical_target(target: TrainState, mesh: Mesh) -> TrainState:
    """Returns ShapeDtypeStructs for a state to restore, in canonical order.

    Raises:
        TypeError: A leaf has no NamedSharding.
        ValueError: A leaf is on another mesh.
    """
    jax.tree_util.tree_map_with_path(lambda path, leaf: _check_on_mesh(path, leaf, mesh), target)

    def abstract(leaf: Any, layout: LayerLayout | None) -> jax.ShapeDtypeStruct:
        shape = leaf.shape if layout is None else (layout.num_layers, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_canonical_sharding(leaf, layout))

    leaves, tree = jax.tree.flatten(open_packed(target))
    return tree.unflatten(map(abstract, leaves, _layouts(target)))


def _check_on_mesh(path: tuple, leaf: Any, mesh: Mesh) -> None:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"every leaf of a restore's target must have a NamedSharding; got {type(sharding).__name__} for "
            f"{path_string(path)}. Take a state from jaxpar.init_state, or ShapeDtypeStructs with sharding=."
        )
    if sharding.mesh != mesh:
        raise ValueError(
            f"a restore's target must be on the manager's mesh, {shown_sizes(mesh.shape)}; got "
            f"{shown_sizes(sharding.mesh.shape)} for {path_string(path)}. Make both with one mesh."
        )


def _canonical_sharding(leaf: Any, layout: LayerLayout | None) -> NamedSharding:
    """Returns a leaf's sharding in canonical order: as in packed order, but not over layers that do not divide evenly."""
    if layout is None or (entries := _entries(leaf))[0] is None:
        return leaf.sharding
    parts = math.prod(leaf.sharding.mesh.shape[axis] for axis in entry_axes(entries[0]))
    first = entries[0] if layout.num_layers % parts == 0 else None
    return NamedSharding(leaf.sharding.mesh, PartitionSpec(first, *entries[1:]))


def _entries(leaf: Any) -> tuple[Any, ...]:
    """Returns the entries of a leaf's PartitionSpec, one for each dim."""
    return (*leaf.sharding.spec, *(None,) * (leaf.ndim - len(leaf.sharding.spec)))


def _layouts(state: TrainState) -> Layouts:
    """Returns the layout of each leaf's leading dim, None if that is not a dim of packed layers."""
    shapes: dict[str, set[Shape]] = {}
    for node in filter(is_packed, jax.tree.leaves(state.params, is_leaf=is_packed)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(node):
            shapes.setdefault(path_string(path), set()).add(leaf.shape)
    packed = [node.layout for node in jax.tree.leaves(state, is_leaf=is_packed) if is_packed(node)]
    outer = {
        path: leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params, is_leaf=is_packed)
        if not is_packed(leaf)
    }
    layouts: Layouts = []
    for where, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_packed):
        if is_packed(node):
            layouts += [
                _layout_of(
                    leaf,
                    node.layout,
                    shapes.get(path_string(path), set()),
                    path_string((*where, *path)),
                )
                for path, leaf in jax.tree_util.tree_leaves_with_path(node)
            ]
        else:
            if packed and where[:1] == OPT_STATE and owner_of(where, outer) is None:
                _check_not_of_layers(node, packed[0], path_string(where))
            layouts.append(None)
    return layouts


def _check_not_of_layers(leaf: Any, layout: LayerLayout, where: str) -> None:
    """Raises ValueError for optimizer state in a tree of its own that may be of packed layers, in their order."""
    if leaf.size < layout.num_positions:
        return
    raise ValueError(
        f"optimizer state beside packed layers must have the tree of the params, for a checkpoint to hold it in the model's "
        f"order; got {list(leaf.shape)} for {where}, of no param. Make it by jax.tree.map over the params, so without "
        "optax.flatten, or leave the layers unpacked, as many on each stage."
    )


def _layout_of(
    leaf: Any, layout: LayerLayout, shapes: set[Shape], where: str
) -> LayerLayout | None:
    """Returns the layout of a leaf under PackedLayers; None for a placeholder, such as an unused factored moment."""
    if math.prod(leaf.shape) <= 1:
        return None
    if leaf.shape[0] == layout.num_positions and any(
        _is_of_layers(leaf.shape, of) for of in shapes
    ):
        return layout
    raise ValueError(
        f"optimizer state of packed layers must be of each layer, [{layout.num_positions}, ...], for a checkpoint to hold "
        f"it in the model's order; got {list(leaf.shape)} for {where}. Use an optimizer whose state is of each layer, as "
        "that of optax.adamw is, or leave the layers unpacked, as many on each stage."
    )


def _is_of_layers(shape: Shape, param: Shape) -> bool:
    """Whether a shape is that of a param, or without some of the dims after that of the layers, as factored moments are."""
    others = param[1:]
    return shape == param or (_are_some_of(shape[1:], others) and not _are_some_of(shape, others))


def _are_some_of(shape: Shape, dims: Shape) -> bool:
    """Whether the sizes of a shape are some of these dims, in their order."""
    left = iter(dims)
    return all(size in left for size in shape)


# -- PRNG keys ----------------------------------------------------------------------------------------------------------


def as_numbers(tree: PyTree) -> PyTree:
    """Returns a tree of arrays or ShapeDtypeStructs with each PRNG key replaced by its key data, uint32 ``[..., words]``."""
    return jax.tree.map(lambda leaf: _numbers(leaf) if is_key(leaf) else leaf, tree)


def as_keys(tree: PyTree, like: PyTree) -> PyTree:
    """Returns a tree of arrays with key data replaced by PRNG keys where ``like`` has keys."""

    def wrap(leaf: jax.Array, want: Any) -> jax.Array:
        if not is_key(want):
            return leaf
        keys = jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(jnp.empty((), want.dtype)))
        return jax.device_put(keys, want.sharding)

    return jax.tree.map(wrap, tree, like)


def _numbers(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    shape = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leaf.sharding)


def plain_key(key: jax.Array) -> PrngKey:
    """Returns a PRNG key as plain data."""
    if not is_key(key):
        raise TypeError(
            f"key must be a PRNG key; got {key.dtype}. Make it with jax.random.key(seed)."
        )
    return PrngKey(
        str(jax.random.key_impl(key)), tuple(map(int, np.ravel(jax.random.key_data(key))))
    )


# -- numbers of a user's ------------------------------------------------------------------------------------------------


def on_mesh(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns a tree whose arrays are on the mesh: what a script has put into the state is replicated.

    Such as ``state.opt_state.hyperparams["learning_rate"] = jnp.asarray(1e-3)``. Every process must call it.
    """
    whole = NamedSharding(mesh, replicated())

    def placed(leaf: Any) -> Any:
        is_on_mesh = isinstance(getattr(leaf, "sharding", None), NamedSharding)
        return leaf if is_on_mesh else jax.device_put(np.asarray(leaf), whole)

    return jax.tree.map(placed, tree)
