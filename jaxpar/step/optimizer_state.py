"""Shardings of an optimizer's state: an array that belongs to a param is sharded like the param, for any optimizer.

    a param     layers/w                     [layers, in, out]      P(stage, data, tensor)
    Adam        mu/layers/w                  [layers, in, out]      P(stage, data, tensor)
    Adafactor   v_row/layers/w               [layers, in]           P(stage, data)
                v_col/layers/w               [layers, out]          P(stage, tensor)
    L-BFGS      diff_params_memory/layers/w  [10, layers, in, out]  P(None, stage, data, tensor)
    all         count                        []                     P()

An array belongs to the param whose path is part of its own path, so masked and frozen params, which have no arrays in the
state, need no special handling. It is sharded along the dims that it shares with the param. If several dims of a param have the
same size, the shared ones are found from the state for other params, whose sizes have the same order but are all different.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.fields import brief
from jaxpar.sharding import path_string

Optimizer = optax.GradientTransformation | optax.MultiSteps


Shape = tuple[int, ...]


class _Param(NamedTuple):
    path: tuple
    shape: Shape
    sizes: Shape  # of its dims, made distinct
    sharding: NamedSharding


def optimizer_shardings(
    optimizer: Optimizer,
    params: PyTree,
    shardings: PyTree,
    otherwise: NamedSharding,
) -> PyTree:
    """Returns a sharding for each array of the optimizer's state. Nothing is compiled or run.

    Args:
        optimizer: An optax optimizer.
        params: Arrays or ShapeDtypeStructs.
        shardings: A NamedSharding for each param, including its ZeRO shards.
        otherwise: The sharding of arrays that belong to no param or share none of its sharded dims: counts, hyperparameters,
            and arrays of all params together (``optax.flatten``).

    Raises:
        ValueError: A matrix has the path of no param, and the shape of several params with different shardings.
    """
    state = jax.eval_shape(optimizer.init, params)
    distinct, distinct_state = _with_distinct_sizes(optimizer, params, state)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = [leaf.shape for leaf in jax.tree.leaves(distinct)]
    by_path: dict[tuple, _Param] = {}
    for (path, leaf), own, sharding in zip(leaves, sizes, jax.tree.leaves(shardings), strict=True):
        by_path[path] = _Param(path, leaf.shape, own, sharding)

    def sharding_of(path: tuple, leaf: Any, distinct: Any) -> NamedSharding:
        param = owner_of(path, by_path)
        if param is None:
            param = _only_one_of_its_shape(path, leaf.shape, list(by_path.values()))
        if param is None:
            return otherwise
        return _as_param(param, leaf.shape, distinct.shape) or otherwise

    return jax.tree_util.tree_map_with_path(sharding_of, state, distinct_state)


def owner_of(path: tuple, params: Mapping[tuple, Any]) -> Any:
    """Returns the param whose path is part of ``path``; if there are several, the one with the longest path: "x/w", not "w"."""
    for length in range(len(path), -1, -1):
        for start in range(len(path) - length, -1, -1):
            part = path[start : start + length]
            if part in params:
                return params[part]
    return None


def _only_one_of_its_shape(path: tuple, shape: Shape, params: Sequence[_Param]) -> _Param | None:
    """Returns the param that a matrix without a param's path belongs to, found by its shape and the end of its path."""
    shared = {}
    for param in params:
        if param.shape == shape and len(shape) > 1:
            shared[param.path] = _shared_end(path, param.path)
    if not shared:
        return None
    longest = max(shared.values())
    first, *others = (param for param in params if shared.get(param.path) == longest)
    if all(other.sharding.is_equivalent_to(first.sharding, len(shape)) for other in others):
        return first
    names = [path_string(param.path) for param in (first, *others)]
    raise ValueError(
        "a matrix of the optimizer's state must have the path of its param as part of its own; got "
        f"{path_string(path)} of shape {shape}, which {names} have too, and these are sharded differently. Make the state "
        "with jax.tree.map over the params in the optimizer's init."
    )


def _shared_end(path: tuple, of: tuple) -> int:
    """Returns how many of the last steps of a param's path occur in ``path`` one after another."""
    for count in range(len(of), 0, -1):
        end = of[len(of) - count :]
        starts = range(len(path) - count + 1)
        if any(path[start : start + count] == end for start in starts):
            return count
    return 0


def _as_param(param: _Param, shape: Shape, distinct: Shape) -> NamedSharding | None:
    """Returns the sharding of an array that shares dims with a param; None if none of them is sharded.

    A dim of the array is the one of the param that has its size, and its size where all sizes differ:

                    its own    where all differ    sharding
        the param   [4, 4]     [4, 5]              P(stage, data)
        the array   [4]        [5]                 P(data), as its dim is the second one of the param

    Args:
        param: The param.
        shape: The shape of the array.
        distinct: The shape of the array for params whose dims all have different sizes.
    """
    if shape == param.shape:
        return param.sharding
    sizes = list(zip(param.shape, param.sizes, strict=True))
    spec = param.sharding.spec
    entries = (*spec, *(None,) * (len(sizes) - len(spec)))
    taken, own = set(), []
    # An axis shards one dim only. Copies of a param are stacked in front, so the last of several candidate dims is taken.
    for size in reversed(list(zip(shape, distinct, strict=False))):
        entry = None
        if sizes.count(size) == 1 and size not in taken:
            taken.add(size)
            entry = entries[sizes.index(size)]
        own.insert(0, entry)
    if not any(own):
        return None
    return NamedSharding(param.sharding.mesh, PartitionSpec(*own))


def _with_distinct_sizes(
    optimizer: Optimizer,
    params: PyTree,
    state: PyTree,
) -> tuple[PyTree, PyTree]:
    """Returns shapes of params whose dims all have different sizes, and their state; both unchanged if it has no such state."""

    def with_distinct(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(_distinct_sizes(leaf.shape), leaf.dtype)

    distinct = jax.tree.map(with_distinct, params)
    try:
        distinct_state = jax.eval_shape(optimizer.init, distinct)
    except (
        Exception
    ):  # any error that an optimizer raises for shapes that are not those of its model
        return params, state
    if jax.tree.structure(distinct_state) != jax.tree.structure(state):
        return params, state
    return distinct, distinct_state


def _distinct_sizes(shape: Shape) -> Shape:
    """Returns sizes that are all different and in the order of those of ``shape``; equal ones keep their order."""
    distinct, last = list(shape), -1
    ascending = sorted(range(len(shape)), key=shape.__getitem__)
    for dim in ascending:
        last = max(shape[dim], last + 1)
        distinct[dim] = last
    return tuple(distinct)


def call_update(
    update: Callable,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    **more: Any,
) -> tuple[PyTree, PyTree]:
    """Returns the result of an optimizer's update, called with those keyword arguments that it accepts."""
    parameters = inspect.signature(update).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return update(grads, opt_state, params, **more)
    accepted = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    more = {name: value for name, value in more.items() if name in accepted}
    return update(grads, opt_state, params, **more)


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError for what is no optimizer, such as the function that makes one."""
    functions = (getattr(optimizer, name, None) for name in ("init", "update"))
    if not all(map(callable, functions)):
        raise TypeError(
            f"optimizer must be an optax optimizer; got {brief(repr(optimizer))}. Make one: optax.adam(learning_rate), say."
        )


def check_state(optimizer: Optimizer, params: PyTree, opt_state: PyTree) -> None:
    """Raises unless a state is one of the optimizer for these params.

    Raises:
        TypeError: The optimizer takes pairs of params.
        ValueError: The state is of another optimizer, or of other params.
    """
    own = jax.eval_shape(optimizer.init, params)
    is_lookahead = lambda part: isinstance(part, optax.LookaheadState)
    parts = jax.tree.leaves(own, is_leaf=is_lookahead)
    if any(map(is_lookahead, parts)):
        raise TypeError(
            "an optimizer must take params as they are, a tree of arrays; got optax.lookahead, which takes pairs of them. "
            "Leave it out."
        )
    if list(by_path(opt_state)) != list(by_path(own)):
        raise ValueError(
            f"a step's optimizer must be that of its state; got one with {_described(own)}, and a state with "
            f"{_described(opt_state)}. Give init_state and make_train_step the same optimizer and trainable params."
        )


def by_path(tree: PyTree) -> dict[tuple, Any]:
    """Returns the leaves of a tree by their paths."""
    return dict(jax.tree_util.tree_leaves_with_path(tree))


def _described(opt_state: PyTree) -> str:
    """Returns the parts of a state as text: "ScaleByAdamState of 9 arrays"."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: hasattr(part, "_fields"))
    names = dict.fromkeys(type(part).__name__ for part in parts)
    count = len(jax.tree.leaves(opt_state))
    return f"{', '.join(names) or 'no state'} of {count} arrays"


def first_update(
    optimizer: Optimizer, params: PyTree, grads: PyTree | None = None
) -> tuple[PyTree, PyTree]:
    """Returns what an optimizer's init and update make of gradients; None: of the params in their place."""
    grads = params if grads is None else grads

    def value_fn(params: PyTree) -> jax.Array:
        sums = [jnp.sum(jnp.real(leaf)) for leaf in jax.tree.leaves(params)]
        return jnp.sum(jnp.asarray(sums))

    further = {"value": value_fn(params), "grad": grads, "value_fn": value_fn}
    return call_update(optimizer.update, grads, optimizer.init(params), params, **further)


def value_fn_of(
    value_and_grad: Callable[[PyTree], tuple[PyTree, PyTree]],
) -> Callable[[PyTree], jax.Array]:
    """Returns the loss as a function of the params, whose derivative is the gradients of ``value_and_grad``.

    Args:
        value_and_grad: ``params -> (loss, gradients)``, or with metrics ``params -> ((loss, metrics), gradients)``.
    """

    def loss_and_grads(params: PyTree) -> tuple[jax.Array, PyTree]:
        value, grads = value_and_grad(params)
        loss = value[0] if isinstance(value, tuple) else value
        return loss, grads

    value_fn = jax.custom_jvp(lambda params: loss_and_grads(params)[0])

    @value_fn.defjvp
    def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[jax.Array, jax.Array]:
        value, grads = loss_and_grads(*primals)
        product = lambda grad, tangent: jnp.real(jnp.sum(grad * tangent)).astype(value.dtype)
        along = jax.tree.map(product, grads, *tangents)
        return value, sum(jax.tree.leaves(along), jnp.zeros_like(value))

    return value_fn


def no_value_fn(params: PyTree) -> jax.Array:
    """Raises: the programs of ``executor="mpmd"`` cannot be evaluated inside the program of the update."""
    raise ValueError(
        "an optimizer that searches along a line must evaluate the loss inside the step, which then must be one program; got "
        'executor="mpmd". Use executor="spmd", or an optimizer without a line search (optax.lbfgs(linesearch=None)).'
    )
