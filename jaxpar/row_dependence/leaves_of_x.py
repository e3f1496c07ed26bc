"""Checks the leaves of ``x``, which travels between layers, that have no rows: each microbatch has its own.

x = {"h": [rows, ...], "rate": []}    rate, of params, keys or numbers, is the same in each microbatch: taken
x = {"h": [rows, ...], "aux": []}     aux, a mean over rows, is one of the rows of a microbatch: refused
                                      aux, a sum over rows, is added up by a loss that adds it: taken
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers
from jaxpar.row_dependence.kinds import CONSTANT, ROWS, Dependence, Kind
from jaxpar.row_dependence.reader import trace_dependences


def check_leaves_of_x(
    model: LayeredModel | Callable, loss: Callable, params: PyTree, batch: PyTree, num_parts: int
) -> None:
    """Raises if the loss would depend on how the rows are split, because of a leaf of ``x`` without rows.

    With one part, one microbatch on one replica, nothing is split and nothing is refused. A leaf that does not reach the loss
    is taken. What a function computes from several rows and keeps to itself, or puts into each row, is not checked.

    Args:
        model: The model; a plain callable has no ``x``.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``.
        params: Arrays or ShapeDtypeStructs.
        batch: Likewise.
        num_parts: The number of microbatches of all replicas.
    """
    if num_parts == 1 or not isinstance(model, LayeredModel):
        return
    shapes = jax.eval_shape(lambda batch: batch, batch)
    if is_stacked(params) and _has_rows_alone(partial(model.embed, params[OUTER]), shapes):
        return
    found = _wrong_leaves(model, loss, params, of_two_sizes(model.apply, loss, params, shapes, num_parts))
    if found:
        raise ValueError(
            "a leaf of x without rows must not make the loss depend on how the rows of a batch are split into microbatches and "
            f"replicas; got {', '.join(sorted(found))}, which reaches the loss and is computed from the rows, or is added to a "
            "sum over them. Give it a number for each row, of shape [rows], and sum it in the loss."
        )


def _has_rows_alone(embed: Callable[[PyTree], PyTree], batch: PyTree) -> bool:
    """Returns whether each leaf of ``x`` has rows, which is known if the embedding takes twice the rows."""
    try:
        few, many = (
            jax.tree.leaves(jax.eval_shape(embed, each)) for each in (batch, _resized(batch, 2 * num_rows(batch)))
        )
    except Exception:  # any error that a model raises for another number of rows than its own
        return False
    return all(a.shape != b.shape for a, b in zip(few, many, strict=True))


def of_two_sizes(
    forward: Callable, loss: Callable, params: PyTree, batch: PyTree, num_parts: int
) -> tuple[PyTree, PyTree]:
    """Returns the shapes of a batch and of one of twice the rows; if the model takes no such batch, of a microbatch and it."""
    twice = _resized(batch, 2 * num_rows(batch))
    try:
        jax.eval_shape(lambda params, batch: loss(forward(params, batch), batch), params, twice)
    except Exception:  # as above
        return _resized(batch, num_rows(batch) // num_parts), batch
    return batch, twice


def num_rows(batch: PyTree) -> int:
    """Returns the number of rows of a batch."""
    return jax.tree.leaves(batch)[0].shape[0]


def _resized(batch: PyTree, num_rows: int) -> PyTree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((num_rows, *a.shape[1:]), a.dtype), batch)


def _wrong_leaves(
    model: LayeredModel, loss: Callable, params: PyTree, batches: tuple[PyTree, PyTree]
) -> frozenset[str]:
    """Returns the leaves of ``x`` on which the loss must not depend, from a batch of fewer and one of more rows."""
    rows = [ROWS] * len(jax.tree.leaves(batches[0]))
    traced = partial(trace_dependences, ratio=num_rows(batches[1]) / num_rows(batches[0]))

    def applied(
        function: Callable, params: PyTree, given: tuple[PyTree, PyTree]
    ) -> tuple[tuple[PyTree, PyTree], Callable]:
        made, read = traced(function, (params, given[0]), (params, given[1]))
        return made, lambda found: read([*[CONSTANT] * len(jax.tree.leaves(params)), *found])

    x, read = applied(model.embed, params[OUTER], batches)
    found = _named(x, read(rows))
    for layer, layer_params, count in _layers(model, params):
        x, read = applied(layer, layer_params, x)
        for _ in range(count):
            before, found = found, _named(x, read(found))
            if found == before:
                break
    outputs, read = applied(model.head, params[OUTER], x)
    _, of_loss = traced(loss, (outputs[0], batches[0]), (outputs[1], batches[1]))
    return frozenset().union(*(each.wrong for each in of_loss([*read(found), *rows])))


def _layers(model: LayeredModel, params: PyTree) -> Iterator[tuple[Callable, PyTree, int]]:
    """Yields each layer that differs from others, its params, and how often it is applied."""
    layers, count = params[LAYERS], num_layers(params)
    if is_stacked(params):
        (layer,) = model.layers(1)
        yield layer, jax.eval_shape(lambda layers: jax.tree.map(lambda p: p[0], layers), layers), count
    else:
        for layer, layer_params in zip(model.layers(count), layers, strict=True):
            yield layer, layer_params, 1


def _named(x: tuple[PyTree, PyTree], found: list[Dependence]) -> list[Dependence]:
    leaves = zip(jax.tree_util.tree_leaves_with_path(x[0]), jax.tree.leaves(x[1]), found, strict=True)
    return [_of_leaf(path, a, each) if a.shape == b.shape else each for (path, a), b, each in leaves]


def _of_leaf(path: Any, leaf: Any, found: Dependence) -> Dependence:
    """Returns the dependence of what reads a leaf without rows."""
    name = frozenset({f"x{jax.tree_util.keystr(path)} of shape {leaf.shape}"})
    if found.is_constant:
        return replace(found, constants=name) if found.kind is Kind.CONSTANT else found
    if found.kind is Kind.SUM and found.degree == 0:
        return replace(found, sums=name)
    return replace(found, kind=Kind.OTHER, sums=frozenset(), wrong=found.wrong | name)
