"""The checks of optimizers for packed layers, which are not in the model's order and are padded with zeros.

An optimizer that treats each layer on its own, or by sums over all of them, makes the same of packed layers. One that numbers,
takes, moves or sorts layers, counts them or carries something from one to the next does not; nor one that takes means over
them, which count the padding, or draws noise for them, which has their order. Both kinds are read from the optimizer's update
(``row_dependence``), with layers in place of rows. What is read as neither is tried with small arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxpar._compat import drawn_shapes, literals
from jaxpar.dtypes import is_float
from jaxpar.layered_model import is_packed
from jaxpar.row_dependence import Kind, Reader, Span, Value, traced
from jaxpar.row_dependence.values import REORDERED
from jaxpar.sharding import path_string
from jaxpar.step.optimizer_state import Optimizer, by_path, call_update, first_update, owner_of

MOST = 3  # numbers in each dim of the arrays that are tried, but that of the layers
ALIKE = 1e-3  # updates that differ by less, relative to the largest number, are the same but for rounding


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
    try:
        update, of_shorter = trace(params), trace(shorter)
    except Exception as error:  # of any kind: a function of the user
        error.add_note(
            f"An optimizer is given {layout.num_positions} positions of {layout.num_layers} layers, {_packed_by(layout)} Or "
            "let it treat them by jax.tree.map, whatever their number is."
        )
        raise
    if drawn_shapes(update) != drawn_shapes(of_shorter):
        raise ValueError(
            "an optimizer that draws random numbers for the layers needs them in the model's order, in which one device draws; "
            f"got draws for layers packed for num_stages={layout.num_stages}, num_chunks={layout.num_chunks}, "
            f"layers_per_virtual_stage={layout.layers_per_virtual_stage}. Do not pack them and leave out layout=, with as many "
            "layers on each stage (with chunks they then move between stages in each step), or use an optimizer without noise."
        )
    values = _read_of_layers(optimizer, params, shorter, layout)
    _refuse_places(values, layout)
    if layout.num_positions > layout.num_layers:
        _refuse_means(optimizer, params, shorter, layout, update, of_shorter)
        _refuse_counts(values, layout)
    is_proved = lambda value: value.kind in (Kind.FREE, Kind.ROWS) and not value.why
    if not values or not all(map(is_proved, values)):
        _refuse_other_numbers(optimizer, params, layout)


def _refuse_means(
    optimizer: Optimizer, params: PyTree, shorter: PyTree, layout: Any, update: Any, of_shorter: Any
) -> None:
    """Raises for an optimizer that divides by numbers which depend on the number of positions."""
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
            f"one that numbers, takes, moves or sorts them{line and ': ' + line}, and {_packed_by(layout)}"
        )


def _packed_by(layout: Any) -> str:
    """Returns how layers are packed, and what to do without."""
    return (
        f"layers packed for num_stages={layout.num_stages}, num_chunks={layout.num_chunks}, "
        f"layers_per_virtual_stage={layout.layers_per_virtual_stage}. Do not pack them and leave out layout=, with as many "
        "layers on each stage."
    )


def _refuse_other_numbers(optimizer: Optimizer, params: PyTree, layout: Any) -> None:
    """Raises for an optimizer that makes other numbers of small packed layers than of the same ones in the model's order."""
    rng = np.random.default_rng(0)
    try:
        given = _drawn(rng, params), _drawn(rng, params)
        with jax.ensure_compile_time_eval():  # under a trace, too
            apart = float(jax.jit(partial(_distance, optimizer))(*given))
    except Exception:  # of any kind: a function of the user, which may want larger arrays
        return
    if not apart <= ALIKE:  # nor is it NaN
        raise ValueError(
            "an optimizer must treat packed layers alike, or by sums over all of them, since they are not in the model's order "
            f"and have zeros between them; got updates that are up to {apart:.1%} from those of layers in order, and "
            f"{_packed_by(layout)}"
        )


def _drawn(rng: np.random.Generator, params: PyTree) -> PyTree:
    """Returns small arrays in place of the params, whose packed layers are in the model's order, with their layouts."""

    def draw(leaf: Any, *leading: int) -> np.ndarray:
        shape = *leading, *(min(size, MOST) for size in leaf.shape[len(leading) :])
        drawn = rng.normal(size=shape)
        return drawn.astype(np.float32 if is_float(leaf) else leaf.dtype)

    def of_node(node: Any) -> Any:
        if not is_packed(node):
            return draw(node)
        return replace(
            node, tree=jax.tree.map(lambda leaf: draw(leaf, node.layout.num_layers), node.tree)
        )

    return jax.tree.map(of_node, params, is_leaf=is_packed)


def _distance(optimizer: Optimizer, params: PyTree, grads: PyTree) -> jax.Array:
    """Returns how far updates of packed layers are from those of the same layers in order, relative to the largest number."""
    of_nodes = lambda change, tree: jax.tree.map(
        lambda node: change(node) if is_packed(node) else node, tree, is_leaf=is_packed
    )
    in_order = partial(of_nodes, lambda node: node.tree)
    packed = partial(of_nodes, lambda node: node.layout.pack(node.tree))
    unpacked = partial(of_nodes, lambda node: node.layout.unpack(node))
    expected = _two_updates(optimizer, in_order(params), in_order(grads))
    found = unpacked(_two_updates(optimizer, packed(params), packed(grads)))
    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(_apart, found, expected))))


def _two_updates(optimizer: Optimizer, params: PyTree, grads: PyTree) -> PyTree:
    """Returns the second update of params by the same gradients, which depends on the state that the first one made."""
    state, updates = optimizer.init(params), grads
    value_fn = lambda params: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    for _ in range(2):
        further = {"value": value_fn(params), "grad": grads, "value_fn": value_fn}
        updates, state = call_update(optimizer.update, grads, state, params, **further)
        params = optax.apply_updates(params, updates)
    return updates


def _apart(found: jax.Array, expected: jax.Array) -> jax.Array:
    difference = jnp.max(jnp.abs(jnp.nan_to_num(found) - jnp.nan_to_num(expected)), initial=0.0)
    return difference / jnp.maximum(jnp.max(jnp.abs(jnp.nan_to_num(expected)), initial=0.0), 1e-30)


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
    few = by_path(shorter)
    packed = {path: leaf for path, leaf in by_path(params).items() if few[path].shape != leaf.shape}
    state, of_shorter = (
        by_path(jax.eval_shape(optimizer.init, each)) for each in (params, shorter)
    )
    for path, leaf in state.items():
        if leaf.size <= 1 or not owner_of(path, packed):
            continue
        fewer = of_shorter[path].shape if path in of_shorter else ()
        sizes = zip(leaf.shape, fewer, strict=False)
        if not any(size == less + 1 for size, less in sizes):
            return f"{path_string(path)} of shape {leaf.shape} with means"
    return ""
