"""Numbers that an optimizer keeps in its state, such as those of ``optax.inject_hyperparams``, after a resume.

    saved    init writes learning_rate=0.1 into the state, and each update passes it on
    now      init would write 0.2, but the state of a resume is the saved one: it goes on with 0.1

A number that updates change, such as a count or a scale, is none of these: it differs from its initial value in any case.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar._compat import forwarded
from jaxpar.sharding import fetch, path_string
from jaxpar.step.optimizer_state import call_update

SHOWN = 4


def kept_numbers(optimizer: Any, params: PyTree, opt_state: PyTree) -> dict[str, tuple[Any, Any]]:
    """Returns the numbers of a saved state that every update keeps, and that differ from the initial ones, by path.

    Args:
        optimizer: An optax optimizer.
        params: Arrays or ShapeDtypeStructs.
        opt_state: The saved state, on the mesh; every process must call this.

    Returns:
        Pairs of the saved number and the one that a new run would begin with; none where the optimizer cannot be traced alone.
    """
    try:
        kept = _kept(optimizer, params)
        initial = _initial(optimizer, params, kept)
    except Exception:  # of any kind: an optimizer is a function of the user
        return {}
    saved = fetch(_at_paths(opt_state, initial))
    differ = {}
    for path, now in initial.items():
        if path in saved and not np.array_equal(saved[path], now, equal_nan=True):
            differ[path] = saved[path], now
    return differ


def describe(kept: dict[str, tuple[Any, Any]], opt_state: PyTree) -> str:
    """Returns what to say of the numbers that a resume goes on with, and how to go on with the new ones."""
    pairs = list(kept.items())
    names = [_name(path_string(path)) for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)]
    are_apart = all(names.count(_name(path)) == 1 for path in kept)
    shown = _name if are_apart else lambda path: path
    told = [f"{shown(path)}={saved!s} as saved, not {now!s}" for path, (saved, now) in pairs]
    more = f", and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return (
        "a resume goes on with the saved state of the optimizer, in which optax.inject_hyperparams keeps its numbers: "
        f"{', '.join(told[:SHOWN])}{more}. To use the new ones, write after `state = run.begin()`: "
        f"{_by_name(pairs) if are_apart else _by_path(pairs)}"
    )


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _by_name(pairs: Sequence[tuple[str, tuple[Any, Any]]]) -> str:
    new = ", ".join(f"{_name(path)}=jnp.{now.dtype}({now!s})" for path, (_, now) in pairs)
    return f"state = dataclasses.replace(state, opt_state=optax.tree.set(state.opt_state, {new}))"


def _by_path(pairs: Sequence[tuple[str, tuple[Any, Any]]]) -> str:
    """Returns the line that sets numbers of which several have one name, as those of groups of params have."""
    new = ", ".join(f'"{path}": jnp.{now.dtype}({now!s})' for path, (_, now) in pairs)
    return (
        f"new = {{{new}}}; state = dataclasses.replace(state, opt_state=jax.tree_util.tree_map_with_path("
        "lambda path, x: new.get(jaxpar.sharding.path_string(path), x), state.opt_state))"
    )


def _at_paths(tree: PyTree, paths: Collection[str]) -> dict[str, Any]:
    """Returns the leaves at some paths of a tree."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_string(path)
        if name in paths:
            found[name] = leaf
    return found


def _kept(optimizer: Any, params: PyTree) -> list[str]:
    """Returns the paths of the single numbers of an optimizer's state that its update passes on unchanged."""
    state = jax.eval_shape(optimizer.init, params)
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)

    def update(flat: list[Any], params: PyTree) -> list[Any]:
        own = jax.tree.unflatten(structure, flat)
        value_fn: Callable = lambda params: jnp.zeros(())
        further = {"value": jnp.zeros(()), "grad": params, "value_fn": value_fn}
        _, after = call_update(optimizer.update, params, own, params, **further)
        return jax.tree.leaves(after)

    traced = jax.make_jaxpr(update)([leaf for _, leaf in leaves], params)
    kept = []
    for number, (origin, (path, leaf)) in enumerate(zip(forwarded(traced), leaves, strict=True)):
        is_number = leaf.size == 1 and jnp.issubdtype(leaf.dtype, jnp.number)
        if is_number and origin == number:
            kept.append(path_string(path))
    return kept


def _initial(optimizer: Any, params: PyTree, paths: list[str]) -> dict[str, np.ndarray]:
    """Returns the numbers at some paths of the initial state, for params of zeros, which the compiled program leaves out."""

    @jax.jit
    def numbers() -> dict[str, jax.Array]:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        return _at_paths(optimizer.init(zeros), paths)

    return jax.tree.map(np.asarray, numbers()) if paths else {}
