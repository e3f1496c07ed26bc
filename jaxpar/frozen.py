"""Frozen params: a pytree node around each leaf that is not trained, so that no gradient is computed for it.

    params  {"w": Frozen(array), "lora_a": array}    as value_and_grad holds them
    model   {"w": array,         "lora_a": array}    as the model gets them (unfreeze)
    grads   {"w": None,          "lora_a": array}    None has no leaves, so sums and optimizers skip it (only_trained)

``trainable.py`` chooses the leaves by their paths. All functions but ``is_frozen`` take trees.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import GetAttrKey
from jaxtyping import PyTree


@dataclass(frozen=True)
class Frozen:
    """A leaf that is not trained, or a property of such a leaf: its PartitionSpec or dtype.

    Attributes:
        value: The leaf.
    """

    value: PyTree


jax.tree_util.register_pytree_with_keys(
    Frozen,
    lambda frozen: (((GetAttrKey("value"), frozen.value),), None),
    lambda _, children: Frozen(*children),
    lambda frozen: ((frozen.value,), None),
)


def is_frozen(node: object) -> bool:
    """Returns whether a node of a tree is frozen."""
    return isinstance(node, Frozen)


def unfreeze(tree: PyTree) -> PyTree:
    """Returns a tree with the leaves themselves in place of frozen ones."""
    return jax.tree.map(lambda node: node.value if is_frozen(node) else node, tree, is_leaf=is_frozen)


def only_trained(tree: PyTree) -> PyTree:
    """Returns a tree with None in place of frozen leaves."""
    return jax.tree.map(lambda node: None if is_frozen(node) else node, tree, is_leaf=is_frozen)


def with_trained(tree: PyTree, own: PyTree) -> PyTree:
    """Returns a tree with other leaves in place of those that are trained.

    Args:
        tree: A tree with frozen leaves.
        own: Leaves for the trained positions, in a tree like ``only_trained(tree)``.
    """
    leaves = iter(jax.tree.leaves(own))
    return jax.tree.map(lambda node: node if is_frozen(node) else next(leaves), tree, is_leaf=is_frozen)


def trained_indices(tree: PyTree) -> list[int]:
    """Returns the indices of the trained leaves of a tree, in flattening order.

    >>> trained_indices({"a": Frozen(1.0), "b": 2.0, "c": 3.0})
    [1, 2]
    """
    return [i for i, node in enumerate(jax.tree.leaves(tree, is_leaf=is_frozen)) if not is_frozen(node)]


def where_grads(grads: PyTree, tree: PyTree) -> PyTree:
    """Returns ``tree`` with None wherever ``grads`` has None.

    Args:
        grads: Gradients.
        tree: A tree with a leaf for each param, frozen or not.
    """
    return jax.tree.map(lambda grad, leaf: None if grad is None else leaf, grads, tree, is_leaf=_is_none)


def update_trained(params: PyTree, new: PyTree) -> PyTree:
    """Returns ``params`` with each leaf of ``new`` that is not None in its place."""
    return jax.tree.map(lambda one, old: old if one is None else one, new, params, is_leaf=_is_none)


def _is_none(node: Any) -> bool:
    return node is None
