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
optimizer that takes such means is refused. So is one that draws noise for layers which are packed in another order, or numbers,
takes, moves or sorts them.
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
from jaxpar.row_dependence import Kind, Reader, Span, Value, traced
from jaxpar.row_dependence.values import REORDERED
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
        param = _owner(path, by_path)
        if param is None:
            param = _only_one_of_its_shape(path, leaf.shape, list(by_path.values()))
        if param is None:
            return otherwise
        return _as_param(param, leaf.shape, distinct.shape) or otherwise

    return jax.tree_util.tree_map_with_path(sharding_of, state, distinct_state)


def _owner(path: tuple, params: Mapping[tuple, Any]) -> Any:
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
    if list(_by_path(opt_state)) != list(_by_path(own)):
        raise ValueError(
            f"a step's optimizer must be that of its state; got one with {_described(own)}, and a state with "
            f"{_described(opt_state)}. Give init_state and make_train_step the same optimizer and trainable params."
        )


def _by_path(tree: PyTree) -> dict[tuple, Any]:
    return dict(jax.tree_util.tree_leaves_with_path(tree))


def _described(opt_state: PyTree) -> str:
    """Returns the parts of a state as text: "ScaleByAdamState of 9 arrays"."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: hasattr(part, "_fields"))
    names = dict.fromkeys(type(part).__name__ for part in parts)
    count = len(jax.tree.leaves(opt_state))
    return f"{', '.join(names) or 'no state'} of {count} arrays"


def check_packed(optimizer: Optimizer, params: PyTree) -> None:
    """Raises for an optimizer that would update packed layers otherwise than layers in the model's order.

    Random numbers drawn for a leaf have the order of the leaf. Means over padded layers count the padding. The shape of such a
    draw, and the number by which a mean divides, change with the number of positions, so one position fewer is also traced.
    """
    nodes = jax.tree.leaves(params, is_leaf=is_packed)
    layouts = [node.layout for node in nodes if is_packed(node)]
    if not layouts:
        return
    layout = layouts[0]
    shorter = _with_positions(params, lambda count: count - 1)
    trace = jax.make_jaxpr(partial(first_update, optimizer))
    update, of_shorter = trace(params), trace(shorter)
    if drawn_shapes(update) != drawn_shapes(of_shorter):
        raise ValueError(
            "an optimizer that draws random numbers for the layers needs them in the model's order, in which one device draws; "
            f"got draws for layers packed for num_stages={layout.num_stages}, num_chunks={layout.num_chunks}, "
            f"layers_per_virtual_stage={layout.layers_per_virtual_stage}. Do not pack them and leave out layout=, with as many "
            "layers on each stage (with chunks they then move between stages in each step), or use an optimizer without noise."
        )
    values = _read_of_layers(optimizer, params, shorter, layout)
    _refuse_places(values, layout)
    if layout.num_positions == layout.num_layers:
        return
    if _floats(update) != _floats(of_shorter):
        got = f"{layout.num_layers} layers in {layout.num_positions} positions"
        factored = ""
        if found := _state_over_layers(optimizer, params, shorter):
            got += f", and {found} over them"
            factored = f"min_dim_size_to_factor={layout.num_positions + 1}, "
        raise ValueError(
            "an optimizer that takes means over the layers, as optax.adafactor does, would count the padding of uneven stages; "
            f"got {got}. Spread the layers evenly, or use an optimizer without such means "
            f"(optax.adafactor(rate, {factored}clipping_threshold=None, multiply_by_parameter_scale=False))."
        )
    _refuse_counts(values, layout)


def _read_of_layers(
    optimizer: Optimizer, params: PyTree, shorter: PyTree, layout: Any
) -> list[Value]:
    """Returns how what an optimizer makes depends on the positions of packed layers; nothing where it takes no other number."""
    count = layout.num_positions
    pairs = zip(jax.tree.leaves(shorter), jax.tree.leaves(params), strict=True)
    given = [Value() if a.shape == b.shape else Value(Kind.ROWS, span=Span(0, 0)) for a, b in pairs]
    try:
        jaxprs, _ = traced(partial(first_update, optimizer), (shorter,), (params,))
        return Reader(count - 1, count / (count - 1)).read(*jaxprs, given)
    except Exception:  # of any kind: another program, where an optimizer is made for so many layers
        return []


def _refuse_counts(found: Sequence[Value], layout: Any) -> None:
    """Raises for an optimizer whose updates depend on the number of positions, or on the least number in them: padding is 0."""
    is_counted = lambda value: value.growth not in (1.0, None)
    if any(is_counted(value) or value.why.operation == "reduce_min" for value in found):
        raise ValueError(
            "an optimizer that counts the layers, or takes the least number of them, would count the padding of uneven stages; "
            f"got {layout.num_layers} layers in {layout.num_positions} positions. Spread the layers evenly."
        )


def _refuse_places(found: Sequence[Value], layout: Any) -> None:
    """Raises for an optimizer that numbers, takes, moves or sorts the layers along their dim, as layer-wise decay does."""
    whys = [value.why for value in found if value.place or value.why.what in REORDERED]
    if whys:
        why = max(whys)
        line = why.operation and f"{why.operation} at {why.line}"
        raise ValueError(
            "an optimizer must treat packed layers alike, or by sums over all of them, which are not in the model's order; got "
            f"one that numbers, takes, moves or sorts them{line and ': ' + line}, and layers packed for "
            f"num_stages={layout.num_stages}, num_chunks={layout.num_chunks}, "
            f"layers_per_virtual_stage={layout.layers_per_virtual_stage}. Do not pack them and leave out layout=, with as many "
            "layers on each stage."
        )


def _floats(jaxpr: Any) -> list[str]:
    is_float = lambda value: jnp.issubdtype(jnp.result_type(value), jnp.inexact)
    return [str(value) for value in literals(jaxpr) if is_float(value)]


def _with_positions(params: PyTree, number: Callable[[int], int]) -> PyTree:
    """Returns the shapes of params whose packed layers have another number of positions."""

    def of_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
        positions, *rest = leaf.shape
        return jax.ShapeDtypeStruct((number(positions), *rest), leaf.dtype)

    def of_node(node: Any) -> Any:
        if not is_packed(node):
            return node
        return replace(node, tree=jax.tree.map(of_leaf, node.tree))

    return jax.tree.map(of_node, params, is_leaf=is_packed)


def _state_over_layers(optimizer: Optimizer, params: PyTree, shorter: PyTree) -> str:
    """Returns the path and shape of an array of the state that belongs to packed layers and has no dim of them; "" for none."""
    few = _by_path(shorter)
    packed = {
        path: leaf for path, leaf in _by_path(params).items() if few[path].shape != leaf.shape
    }
    state, of_shorter = (
        _by_path(jax.eval_shape(optimizer.init, each)) for each in (params, shorter)
    )
    for path, leaf in state.items():
        if leaf.size <= 1 or not _owner(path, packed):
            continue
        fewer = of_shorter[path].shape if path in of_shorter else ()
        sizes = zip(leaf.shape, fewer, strict=False)
        if not any(size == less + 1 for size, less in sizes):
            return f"{path_string(path)} of shape {leaf.shape} with means"
    return ""


def first_update(optimizer: Optimizer, params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what an optimizer's init and update make of gradients, those of a sum, that are as large as the params."""

    def value_fn(params: PyTree) -> jax.Array:
        sums = [jnp.sum(jnp.real(leaf)) for leaf in jax.tree.leaves(params)]
        return jnp.sum(jnp.asarray(sums))

    further = {"value": value_fn(params), "grad": params, "value_fn": value_fn}
    return call_update(optimizer.update, params, optimizer.init(params), params, **further)


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
