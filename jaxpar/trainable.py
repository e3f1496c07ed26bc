"""Which params are trained, chosen by the paths of their leaves.

    jaxpar.value_and_grad(model, loss, mesh, trainable=("layers/**/lora_a", "layers/**/lora_b"))

The others are frozen (``frozen.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar.frozen import Frozen, only_trained, unfreeze
from jaxpar.layered_model import LayeredModel
from jaxpar.sharding import path_matches, path_string

Trainable = Sequence[str] | None


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
    unused = [pattern for pattern in trainable if not any(path_matches(path, pattern) for path in paths)]
    if unused or not trainable:
        raise ValueError(
            f"each pattern of trainable must match a parameter; got {unused[0] if unused else 'no pattern'!r}, where the "
            f"parameters are {paths}. Correct it (* is one step of the path, ** any number), or leave trainable out to train "
            "all."
        )
    is_trained = [any(path_matches(path, pattern) for pattern in trainable) for path in paths]
    return treedef.unflatten(leaf if own else Frozen(leaf) for (_, leaf), own in zip(leaves, is_trained, strict=True))


def trained_part(params: PyTree, trainable: Trainable) -> PyTree:
    """Returns params with None in place of those that are not trained."""
    return only_trained(freeze(params, trainable))


def accept_frozen(model: LayeredModel | Callable, trainable: Trainable) -> LayeredModel | Callable:
    """Returns the model as a function of params of which some are ``Frozen``."""
    if trainable is None:
        return model
    if isinstance(model, LayeredModel):
        embed, layer, head = _unfreezing(model.embed), model.wrap_layers(_unfreezing).layer, _unfreezing(model.head)
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
    if isinstance(trainable, str) or not all(isinstance(pattern, str) for pattern in trainable):
        raise TypeError(
            f'trainable must be a sequence of patterns of paths; got {trainable!r}. Write trainable=("layers/**/lora_a",), say.'
        )
