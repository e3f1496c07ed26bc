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

The layers of uneven stages are padded with zeros. Sums and norms over a leaf ignore the padding, but means over it do not: an
optimizer that takes such means is refused. So is one that draws noise for layers which are packed in another order.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import drawn_shapes, literals
from jaxpar.fields import brief
from jaxpar.layered_model import is_packed
from jaxpar.sharding import path_string

Optimizer = optax.GradientTransformation | optax.MultiSteps


class _Param(NamedTuple):
    path: tuple
    shape: tuple[int, ...]
    sizes: tuple[int, ...]  # of its dims, made distinct
    sharding: NamedSharding


def optimizer_shardings(optimizer: Optimizer, params: PyTree, shardings: PyTree, otherwise: NamedSharding) -> PyTree:
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
    rest = map(jax.tree.leaves, (distinct, shardings))
    named = [
        _Param(path, leaf.shape, distinct.shape, sharding)
        for (path, leaf), distinct, sharding in zip(leaves, *rest, strict=True)
    ]
    by_path = {param.path: param for param in named}

    def sharding_of(path: tuple, leaf: jax.ShapeDtypeStruct, distinct: jax.ShapeDtypeStruct) -> NamedSharding:
        param = _owner(path, by_path) or _only_one_of_its_shape(path, leaf.shape, named)
        return (param and _as_param(param, leaf.shape, distinct.shape)) or otherwise

    return jax.tree_util.tree_map_with_path(sharding_of, state, distinct_state)


def _owner(path: tuple, params: Mapping[tuple, Any]) -> Any:
    """Returns the param whose path is part of ``path``; if there are several, the one with the longest path: "x/w", not "w"."""
    for length in range(len(path), -1, -1):
        for start in range(len(path) - length, -1, -1):
            if (part := path[start : start + length]) in params:
                return params[part]
    return None


def _only_one_of_its_shape(path: tuple, shape: tuple[int, ...], params: Sequence[_Param]) -> _Param | None:
    """Returns the param that a matrix without a param's path belongs to, found by its shape and the end of its path."""
    candidates = [param for param in params if param.shape == shape and len(shape) > 1]
    longest = max((_shared_end(path, param.path) for param in candidates), default=0)
    candidates = [param for param in candidates if _shared_end(path, param.path) == longest]
    if any(not param.sharding.is_equivalent_to(candidates[0].sharding, len(shape)) for param in candidates):
        raise ValueError(
            "a matrix of the optimizer's state must have the path of its param as part of its own; got "
            f"{path_string(path)} of shape {shape}, which {[path_string(param.path) for param in candidates]} have too, and "
            "these are sharded differently. Make the state with jax.tree.map over the params in the optimizer's init."
        )
    return candidates[0] if candidates else None


def _shared_end(path: tuple, of: tuple) -> int:
    """Returns how many of the last steps of a param's path occur in ``path`` one after another."""
    parts = {path[start:end] for end in range(len(path) + 1) for start in range(end + 1)}
    return max(count for count in range(len(of) + 1) if of[len(of) - count :] in parts)


def _as_param(param: _Param, shape: tuple[int, ...], distinct: tuple[int, ...]) -> NamedSharding | None:
    """Returns the sharding of an array that shares dims with a param; None if none of them is sharded.

    Args:
        param: The param.
        shape: The shape of the array.
        distinct: The shape of the array for params whose dims all have different sizes.
    """
    if shape == param.shape:
        return param.sharding
    sizes = list(zip(param.shape, param.sizes, strict=True))
    dims = [sizes.index(size) if sizes.count(size) == 1 else None for size in zip(shape, distinct, strict=False)]
    entries = (*param.sharding.spec, *(None,) * (len(param.shape) - len(param.sharding.spec)))
    # An axis shards one dim only. Copies of a param are stacked in front, so the last of several candidate dims is taken.
    spec = [entries[dim] if dim is not None and dim not in dims[at + 1 :] else None for at, dim in enumerate(dims)]
    return NamedSharding(param.sharding.mesh, PartitionSpec(*spec)) if any(spec) else None


def _with_distinct_sizes(optimizer: Optimizer, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns shapes of params whose dims all have different sizes, and their state; both unchanged if it has no such state."""
    distinct = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(_distinct_sizes(leaf.shape), leaf.dtype), params)
    try:
        distinct_state = jax.eval_shape(optimizer.init, distinct)
    except Exception:  # any error that an optimizer raises for shapes that are not those of its model
        return params, state
    is_like = jax.tree.structure(distinct_state) == jax.tree.structure(state)
    return (distinct, distinct_state) if is_like else (params, state)


def _distinct_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes that are all different and in the order of those of ``shape``; equal ones keep their order."""
    distinct, last = list(shape), -1
    for dim in sorted(range(len(shape)), key=shape.__getitem__):
        distinct[dim] = last = max(shape[dim], last + 1)
    return tuple(distinct)


def call_update(
    update: Callable, grads: PyTree, opt_state: PyTree, params: PyTree, **more: Any
) -> tuple[PyTree, PyTree]:
    """Returns the result of an optimizer's update, called with those keyword arguments that it accepts."""
    parameters = inspect.signature(update).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        more = {
            each.name: more[each.name] for each in parameters if each.kind is each.KEYWORD_ONLY and each.name in more
        }
    return update(grads, opt_state, params, **more)


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError for what is no optimizer, such as the function that makes one."""
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
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
    parts = jax.tree.leaves(own, is_leaf=lambda part: isinstance(part, optax.LookaheadState))
    if any(isinstance(part, optax.LookaheadState) for part in parts):
        raise TypeError(
            "an optimizer must take params as they are, a tree of arrays; got optax.lookahead, which takes pairs of them. "
            "Leave it out."
        )
    paths = lambda state: [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    if paths(opt_state) != paths(own):
        raise ValueError(
            f"a step's optimizer must be that of its state; got one with {_described(own)}, and a state with "
            f"{_described(opt_state)}. Give init_state and make_train_step the same optimizer and trainable params."
        )


def _described(opt_state: PyTree) -> str:
    """Returns the parts of a state as text: "ScaleByAdamState of 9 arrays"."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: hasattr(part, "_fields"))
    named = dict.fromkeys(type(part).__name__ for part in parts)
    return f"{', '.join(named) or 'no state'} of {len(jax.tree.leaves(opt_state))} arrays"


def check_packed(optimizer: Optimizer, params: PyTree) -> None:
    """Raises for an optimizer that would update packed layers otherwise than layers in the model's order.

    Random numbers drawn for a leaf have the order of the leaf. Means over padded layers count the padding. The shape of such a
    draw, and the number by which a mean divides, change with the number of positions, so one position fewer is also traced.
    """
    layouts = [node.layout for node in jax.tree.leaves(params, is_leaf=is_packed) if is_packed(node)]
    if not layouts:
        return
    layout, shorter = layouts[0], _with_one_position_fewer(params)
    update, of_shorter = (jax.make_jaxpr(partial(first_update, optimizer))(each) for each in (params, shorter))
    if drawn_shapes(update) != drawn_shapes(of_shorter):
        raise ValueError(
            "an optimizer that draws random numbers for the layers needs them in the model's order, in which one device draws; "
            f"got draws for layers packed for num_stages={layout.num_stages}, num_chunks={layout.num_chunks}, "
            f"layers_per_virtual_stage={layout.layers_per_virtual_stage}. Do not pack them and leave out layout=, with as many "
            "layers on each stage (with chunks they then move between stages in each step), or use an optimizer without noise."
        )
    if layout.num_positions == layout.num_layers:
        return
    if _floats(update) != _floats(of_shorter):
        got, factored = f"{layout.num_layers} layers in {layout.num_positions} positions", ""
        if found := _state_over_layers(optimizer, params, shorter):
            got, factored = f"{got}, and {found} over them", f"min_dim_size_to_factor={layout.num_positions + 1}, "
        raise ValueError(
            "an optimizer that takes means over the layers, as optax.adafactor does, would count the padding of uneven stages; "
            f"got {got}. Spread the layers evenly, or use an optimizer without such means "
            f"(optax.adafactor(rate, {factored}clipping_threshold=None, multiply_by_parameter_scale=False))."
        )


def _floats(jaxpr: Any) -> list[str]:
    return [str(value) for value in literals(jaxpr) if jnp.issubdtype(jnp.result_type(value), jnp.inexact)]


def _with_one_position_fewer(params: PyTree) -> PyTree:
    shorter = lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] - 1, *leaf.shape[1:]), leaf.dtype)
    of = lambda node: replace(node, tree=jax.tree.map(shorter, node.tree)) if is_packed(node) else node
    return jax.tree.map(of, params, is_leaf=is_packed)


def _state_over_layers(optimizer: Optimizer, params: PyTree, shorter: PyTree) -> str:
    """Returns the path and shape of an array of the state that belongs to packed layers and has no dim of them; "" for none."""
    packed, few = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (params, shorter))
    packed = {path: leaf for path, leaf in packed.items() if few[path].shape != leaf.shape}
    alone = dict(jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, shorter)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, params)):
        fewer = alone[path].shape if path in alone else ()
        if (
            leaf.size > 1
            and _owner(path, packed)
            and not any(a == b + 1 for a, b in zip(leaf.shape, fewer, strict=False))
        ):
            return f"{path_string(path)} of shape {leaf.shape} with means"
    return ""


def first_update(optimizer: Optimizer, params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what an optimizer's init and update make of gradients, those of a sum, that are as large as the params."""
    value_fn = lambda params: jnp.sum(jnp.asarray([jnp.sum(jnp.real(leaf)) for leaf in jax.tree.leaves(params)]))
    further = {"value": value_fn(params), "grad": params, "value_fn": value_fn}
    return call_update(optimizer.update, params, optimizer.init(params), params, **further)


def value_fn_of(value_and_grad: Callable[[PyTree], tuple[PyTree, PyTree]]) -> Callable[[PyTree], jax.Array]:
    """Returns the loss as a function of the params, whose derivative is the gradients of ``value_and_grad``.

    Args:
        value_and_grad: ``params -> (loss, gradients)``, or with metrics ``params -> ((loss, metrics), gradients)``.
    """

    def loss_and_grads(params: PyTree) -> tuple[jax.Array, PyTree]:
        value, grads = value_and_grad(params)
        return value[0] if isinstance(value, tuple) else value, grads

    value_fn = jax.custom_jvp(lambda params: loss_and_grads(params)[0])

    @value_fn.defjvp
    def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[jax.Array, jax.Array]:
        value, grads = loss_and_grads(*primals)
        along = jax.tree.map(lambda g, t: jnp.real(jnp.sum(g * t)).astype(value.dtype), grads, *tangents)
        return value, sum(jax.tree.leaves(along), jnp.zeros_like(value))

    return value_fn


def no_value_fn(params: PyTree) -> jax.Array:
    """Raises: the programs of ``executor="mpmd"`` cannot be evaluated inside the program of the update."""
    raise ValueError(
        "an optimizer that searches along a line must evaluate the loss inside the step, which then must be one program; got "
        'executor="mpmd". Use executor="spmd", or an optimizer without a line search (optax.lbfgs(linesearch=None)).'
    )
