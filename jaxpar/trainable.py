"""Which params are trained, chosen by the paths of their leaves; the others are frozen.

    jaxpar.value_and_grad(model, loss, mesh, trainable=("layers/**/lora_a", "layers/**/lora_b"))

A frozen leaf is a pytree node of its own, so that no gradient is computed for it:

    params  {"w": Frozen(array), "lora_a": array}    as value_and_grad holds them (freeze)
    model   {"w": array,         "lora_a": array}    as the model gets them (unfreeze)
    grads   {"w": None,          "lora_a": array}    None has no leaves, so sums and optimizers skip it (only_trained)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar._compat import EMPTY_ARRAYS_CRASH
from jaxpar.layered_model import LayeredModel
from jaxpar.sharding import path_matches, path_string

Trainable = Sequence[str] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """A leaf that is not trained, or a property of such a leaf: its PartitionSpec or dtype.

    Attributes:
        value: The leaf.
    """

    value: PyTree


def is_frozen(node: object) -> bool:
    """Returns whether a node of a tree is frozen."""
    return isinstance(node, Frozen)


def unfreeze(tree: PyTree) -> PyTree:
    """Returns a tree with the leaves themselves in place of frozen ones."""
    return jax.tree.map(
        lambda node: node.value if is_frozen(node) else node, tree, is_leaf=is_frozen
    )


def only_trained(tree: PyTree) -> PyTree:
    """Returns a tree with None in place of frozen leaves."""
    return jax.tree.map(lambda node: None if is_frozen(node) else node, tree, is_leaf=is_frozen)


def with_trained(tree: PyTree, trained: PyTree) -> PyTree:
    """Returns a tree with other leaves in place of those that are trained.

    Args:
        tree: A tree with frozen leaves.
        trained: Leaves for the trained positions, in a tree like ``only_trained(tree)``.
    """
    leaves = iter(jax.tree.leaves(trained))
    return jax.tree.map(
        lambda node: node if is_frozen(node) else next(leaves), tree, is_leaf=is_frozen
    )


def trained_indices(tree: PyTree) -> list[int]:
    """Returns the indices of the trained leaves of a tree, in flattening order.

    >>> trained_indices({"a": Frozen(1.0), "b": 2.0, "c": 3.0})
    [1, 2]
    """
    return [
        i for i, node in enumerate(jax.tree.leaves(tree, is_leaf=is_frozen)) if not is_frozen(node)
    ]


def where_grads(grads: PyTree, tree: PyTree) -> PyTree:
    """Returns ``tree`` with None wherever ``grads`` has None.

    Args:
        grads: Gradients.
        tree: A tree with a leaf for each param, frozen or not.
    """
    return jax.tree.map(
        lambda grad, leaf: None if grad is None else leaf, grads, tree, is_leaf=_is_none
    )


def update_trained(params: PyTree, new: PyTree) -> PyTree:
    """Returns ``params`` with each leaf of ``new`` that is not None in its place."""
    return jax.tree.map(lambda one, old: old if one is None else one, new, params, is_leaf=_is_none)


def _is_none(node: Any) -> bool:
    return node is None


def freeze(tree: PyTree, trainable: Trainable) -> PyTree:
    """Returns ``tree`` with every leaf frozen that no pattern matches.

    Args:
        tree: Params, or a tree of their structure.
        trainable: Patterns of paths, as in ``shardings_from_paths``; None: all leaves are trained.

    Raises:
        ValueError: ``trainable`` is empty, or a pattern matches no leaf.
    """
    if trainable is None:
        return tree
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path_string(path) for path, _ in leaves]
    unused = [
        pattern for pattern in trainable if not any(path_matches(path, pattern) for path in paths)
    ]
    if unused or not trainable:
        raise ValueError(
            f"each pattern of trainable must match a parameter; got {unused[0] if unused else 'no pattern'!r}, where the "
            f"parameters are {paths}. Correct it (* is one step of the path, ** any number), or leave trainable out to train "
            "all."
        )
    is_trained = [any(path_matches(path, pattern) for pattern in trainable) for path in paths]
    return treedef.unflatten(
        leaf if trains else Frozen(leaf)
        for (_, leaf), trains in zip(leaves, is_trained, strict=True)
    )


def trained_part(params: PyTree, trainable: Trainable) -> PyTree:
    """Returns params with None in place of those that are not trained."""
    return only_trained(freeze(params, trainable))


def accept_frozen(model: LayeredModel | Callable, trainable: Trainable) -> LayeredModel | Callable:
    """Returns the model as a function of params of which some are ``Frozen``."""
    if trainable is None:
        return model
    if isinstance(model, LayeredModel):
        embed, layer, head = (
            _unfreezing(model.embed),
            model.wrap_layers(_unfreezing).layer,
            _unfreezing(model.head),
        )
        return LayeredModel(embed, layer, head)
    return _unfreezing(model)


def _unfreezing(function: Callable[[PyTree, Any], PyTree]) -> Callable[[PyTree, Any], PyTree]:
    return lambda params, x: function(unfreeze(params), x)


def check_trainable(trainable: Any) -> None:
    """Raises unless ``trainable`` is None or a sequence of strings.

    Raises:
        TypeError: It is a string, or an item is not one.
    """
    if trainable is None:
        return
    is_sequence = isinstance(trainable, Sequence) and not isinstance(trainable, str)
    if not is_sequence or not all(isinstance(pattern, str) for pattern in trainable):
        raise TypeError(
            f'trainable must be a sequence of patterns of paths; got {trainable!r}. Write trainable=("layers/**/lora_a",), say.'
        )


def _how_to_train(params: PyTree) -> str:
    """Returns for a message how the trained params that have a gradient are named in the settings; "" without any."""
    wanted, others = [], []
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_frozen):
        trains = not is_frozen(node) and jnp.issubdtype(jnp.result_type(node), jnp.inexact)
        (wanted if trains else others).append(path_string(path).split("/"))
    patterns = dict.fromkeys(_pattern(path, others) for path in wanted)
    if not patterns:
        return ""
    return (
        f": jaxpar.Parallel(mesh, shardings, trainable={list(patterns)}), or value_and_grad and init_state with the same "
        "trainable= where these are given a mesh"
    )


def _pattern(path: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Returns the shortest pattern of the paths that begin as ``path`` does, of which none is of ``others``."""
    for count in range(1, len(path)):
        if all(other[:count] != path[:count] for other in others):
            return "/".join([*path[:count], "**"])
    return "/".join(path)


def check_params(params: PyTree) -> None:
    """Raises for params that have no gradient and are not frozen, or that XLA cannot compile."""
    empty = []
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_frozen):
        leaf = node.value if is_frozen(node) else node
        if not is_frozen(node) and not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                "params must be floating-point or complex arrays, since each is given a gradient; got "
                f"{path_string(path)} of dtype {jnp.result_type(leaf)}. Leave it out of trainable=, "
                f"which then names the others{_how_to_train(params)}. Or put one for each row into the batch, or close over it."
            )
        if jnp.size(leaf) == 0:
            empty.append(f"{path_string(path)} of shape {jnp.shape(leaf)}")
    if EMPTY_ARRAYS_CRASH and empty:
        raise ValueError(
            f"XLA as of JAX 0.11 crashes on sums of arrays without elements inside shard_map; got {', '.join(empty)} with JAX "
            f"{jax.__version__}. Leave {'it' if len(empty) == 1 else 'them'} out of the params, or use JAX 0.10."
        )
