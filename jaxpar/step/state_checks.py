"""Whether a state is on one mesh, and sharded as the step that updates it computes its gradients: by ZeRO, or whole."""

from collections.abc import Iterator
from typing import Any, TypeGuard

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxpar.fields import arg
from jaxpar.layered_model import path_string
from jaxpar.mesh import OF_ZERO, entry_axes
from jaxpar.sharding import replicated
from jaxpar.step.optimizer_state import Optimizer, optimizer_shardings
from jaxpar.step.settings import Parallel
from jaxpar.trainable import trained_part
from jaxpar.zero import shardings_at_rest


def check_on_one_mesh(state: PyTree) -> None:
    """Raises ValueError for a state whose arrays are on several sets of devices."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    devices = {
        path_string(path): leaf.sharding.device_set
        for path, leaf in leaves
        if isinstance(getattr(leaf, "sharding", None), jax.sharding.Sharding)
    }
    most = max(devices.values(), key=len, default=set())
    if apart := [path for path, found in devices.items() if found != most]:
        raise ValueError(
            f"the arrays of a state must be on one mesh; got {apart[0]} on {len(devices[apart[0]])} of {len(most)} devices. "
            "Make the first state with jaxpar.init_state; with params that are there already, by "
            "init_state(lambda key: params, key, optimizer, parallel). Put a number that replaces another where that is, by "
            "jax.device_put(number, other.sharding)."
        )


SAME = "Give init_state, or the restore of a Run, and value_and_grad the same jaxpar.Parallel, with the mesh and the shardings."


def check_as_gradients(parallel: Parallel, params: PyTree) -> None:
    """Raises ValueError for params that are split over an axis where the gradients of their step are not, or the reverse.

    A step would gather them, or keep them whole, in the memory of each device.

    Args:
        parallel: That of ``value_and_grad``.
        params: The params of the state: arrays or ShapeDtypeStructs.
    """
    wanted = dict(_split_by_path(parallel.shardings, parallel))
    for path, axes in _split_by_path(params, parallel):
        known = wanted.get(path, set()) if parallel.shardings is not None else axes - {*OF_ZERO}
        gathered = axes & {*OF_ZERO} - known if parallel.zero < 3 else set()
        if gathered:
            given = (
                "no shardings"
                if parallel.shardings is None
                else f"{arg(zero=parallel.zero)} and shardings"
            )
            raise ValueError(
                f"a state must be sharded as the gradients of its step are; got {path} over {', '.join(sorted(gathered))} in "
                f"the state, and {given} for value_and_grad, by which each replica has it whole in a step. {SAME}"
            )
        if whole := known - axes - {*OF_ZERO}:
            raise ValueError(
                f"a state must be sharded as the gradients of its step are; got {path} over {', '.join(sorted(whole))} in the "
                f"shardings of value_and_grad, and whole over it in the state. {SAME}"
            )


def _split_by_path(tree: PyTree, parallel: Parallel) -> Iterator[tuple[str, set[str]]]:
    """Yields the path of each array, or NamedSharding, that has a NamedSharding, and the axes over which that splits it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sharding = leaf if _is_named(leaf) else getattr(leaf, "sharding", None)
        if _is_named(sharding):
            named = {axis for entry in sharding.spec for axis in entry_axes(entry)}
            yield (
                path_string(path),
                {axis for axis in named if parallel.mesh.shape.get(axis, 1) > 1},
            )


def check_zero(parallel: Parallel, optimizer: Optimizer, params: PyTree, opt_state: PyTree) -> None:
    """Raises ValueError for a state with arrays that are whole on each replica where the ZeRO level shards them.

    Args:
        parallel: That of ``value_and_grad``.
        optimizer: The optimizer.
        params: The params of the state: arrays or ShapeDtypeStructs.
        opt_state: The optimizer's state, likewise.
    """
    zero = parallel.zero
    own = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), params)
    if not zero or not all(map(_is_named, jax.tree.leaves(own, is_leaf=lambda x: x is None))):
        return
    at_rest = jax.tree.map(
        lambda sharding, sharded: sharding if _names_zero(sharding) else sharded,
        own,
        shardings_at_rest(params, own),
    )
    trained = lambda tree: trained_part(tree, parallel.trainable)
    otherwise = NamedSharding(jax.tree.leaves(own)[0].mesh, replicated())
    of_state = optimizer_shardings(optimizer, trained(params), trained(at_rest), otherwise)
    if jax.tree.structure(of_state) != jax.tree.structure(opt_state):
        return  # of another optimizer, as the step says when it is traced
    whole = [*_left_whole(opt_state, of_state)]
    if zero == 3:
        whole = [*_left_whole(params, at_rest), *whole]
    if whole:
        raise ValueError(
            f"a state must be sharded as the gradients of its step are; got {arg(zero=zero)} for value_and_grad, and a state "
            f"whose {whole[0]} is whole on each replica. Give init_state, or the restore of a Run, and value_and_grad the same "
            "jaxpar.Parallel."
        )


def _left_whole(arrays: PyTree, shardings: PyTree) -> Iterator[str]:
    """Yields the paths of arrays that ZeRO does not shard, where their shardings say so."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(arrays), jax.tree.leaves(shardings), strict=True
    )
    for (path, array), sharding in pairs:
        own = getattr(array, "sharding", None)
        if _names_zero(sharding) and _is_named(own) and not _names_zero(own):
            yield path_string(path)


def _is_named(sharding: Any) -> TypeGuard[NamedSharding]:
    return isinstance(sharding, NamedSharding)


def _names_zero(sharding: NamedSharding) -> bool:
    return any(axis in OF_ZERO for entry in sharding.spec for axis in entry_axes(entry))
