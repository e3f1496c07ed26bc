"""Layers in the order of the devices: a type of their own, so that they cannot be confused with layers in the model's order.

    layers --LayerLayout.pack--> PackedLayers --LayerLayout.unpack--> layers

The layout (jaxpar/pipeline/layout.py) defines which position holds which layer. Functions that need layers in the model's
order call ``check_unpacked``, which finds packed layers anywhere in a tree.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax.tree_util import FlattenedIndexKey
from jaxtyping import PyTree


@dataclass(frozen=True)
class PackedLayers:
    """Layers in the order in which the stages of a pipeline hold them, made by ``LayerLayout.pack``.

    It is a pytree, so ``jax.tree.map``, ``jax.jit``, optimizers and shardings work on it. Its leaves have the paths that they
    have in ``tree``: "layers/w_up", packed or not. The layout is part of the tree structure. It cannot be indexed, so a
    loop over layers in the model's order fails on it.

    Attributes:
        tree: The layers, each leaf ``[num_positions, ...]``.
        layout: The LayerLayout that packed them.
    """

    tree: PyTree
    layout: Any

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(
            f"packed layers are in the order of the devices and cannot be indexed; got [{key!r}] of layers packed for "
            f"{_brief(self.layout)}. {_UNPACK} Or index packed.tree, which is in packed order."
        )


_UNPACK = 'Unpack them: layout.unpack(params["layers"]).'


def is_packed(node: object) -> bool:
    """Returns whether a node of a tree is packed layers."""
    return isinstance(node, PackedLayers)


def open_packed(tree: PyTree) -> PyTree:
    """Returns a tree with PackedLayers replaced by the trees that they hold, in packed order."""
    return jax.tree.map(lambda node: node.tree if is_packed(node) else node, tree, is_leaf=is_packed)


def check_unpacked(tree: PyTree, or_else: str = "") -> None:
    """Raises if there are packed layers in a tree.

    Args:
        tree: Params, or a tree of the same structure.
        or_else: A further remedy for the message.
    """
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_packed):
        if is_packed(node):
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "the top"
            raise TypeError(
                f"layers must be in the model's order here; got layers packed for {_brief(node.layout)} at {where}. "
                f"{_UNPACK}{or_else and ' ' + or_else}"
            )


def _brief(layout: Any) -> str:
    names = ("num_layers", "num_stages", "num_chunks", "layers_per_virtual_stage")
    return ", ".join(f"{name}={getattr(layout, name, None)}" for name in names)


def _flatten_with_keys(packed: PackedLayers) -> tuple[list, tuple]:
    """The children of ``tree`` with their keys; the layout and the outermost node of ``tree`` are static."""
    children, node = jax.tree_util.tree_flatten_with_path(packed.tree, is_leaf=lambda node: node is not packed.tree)
    keyed = [(path[0] if path else FlattenedIndexKey(0), child) for path, child in children]
    return keyed, (packed.layout, node)


def _flatten(packed: PackedLayers) -> tuple[list, tuple]:
    children, node = jax.tree.flatten(packed.tree, is_leaf=lambda node: node is not packed.tree)
    return children, (packed.layout, node)


def _unflatten(static: tuple, children: Any) -> PackedLayers:
    layout, node = static
    return PackedLayers(node.unflatten(children), layout)


jax.tree_util.register_pytree_with_keys(PackedLayers, _flatten_with_keys, _unflatten, _flatten)
