"""Checks that a loss returns sums over the rows that it is given, since they are added over microbatches and replicas.

jnp.sum(errors), jnp.float32(len(errors))    a sum over rows and their number: taken
jnp.mean(errors), 1.0                        both divided by the number of rows, so their ratio is the same: taken
jnp.sum(errors), 1.0                         the ratio would be divided by the number of microbatches: refused
jnp.mean(errors), jnp.float32(len(errors))   it would be multiplied by that: refused
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar.row_dependence.kinds import CONSTANT, ROWS, Dependence, Kind
from jaxpar.row_dependence.leaves_of_x import num_rows, of_two_sizes
from jaxpar.row_dependence.reader import trace_dependences

_SAME = "the same for any number of rows"
_OF_ROWS = ("a sum over rows", "a mean over rows")


def check_sums_of_loss(forward: Callable, loss: Callable, params: PyTree, batch: PyTree, num_parts: int) -> None:
    """Raises if the loss or a metric would depend on how the rows are split, because it is no sum over rows.

    Refused is what is known to be wrong. A loss whose dependence on the rows is not known, such as one with a product of two
    means, is taken, unless its weight does not grow with the rows.

    Args:
        forward: ``forward(params, batch) -> outputs``.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with a dict of further sums.
        params: Arrays or ShapeDtypeStructs.
        batch: Likewise.
        num_parts: The number of microbatches of all replicas; with one nothing is split and nothing is refused.
    """
    if num_parts == 1:
        return
    batches = of_two_sizes(forward, loss, params, jax.eval_shape(lambda batch: batch, batch), num_parts)
    ratio = num_rows(batches[1]) / num_rows(batches[0])
    outputs, found = _outputs(forward, params, batches, ratio)
    (returned, _), of_loss = trace_dependences(loss, (outputs[0], batches[0]), (outputs[1], batches[1]), ratio)
    loss_sum, weight_sum, *sums = of_loss([*found, *[ROWS] * len(jax.tree.leaves(batches[0]))])
    if loss_sum.wrong:
        raise ValueError(
            "an output without rows must not be added once to a sum over rows, since each microbatch of each replica would add "
            f"it; got {', '.join(sorted(loss_sum.wrong))}. Give it a number for each row, of shape [rows], and sum it in the "
            "loss."
        )
    if _disagree(loss_sum, weight_sum) or (loss_sum.kind is Kind.OTHER and _described(weight_sum) is _SAME):
        raise ValueError(
            "loss_sum and weight_sum must be sums over the rows that the loss is given, since both are added over microbatches "
            f"and replicas; got loss_sum {_described(loss_sum)} and weight_sum {_described(weight_sum)}. Return jnp.sum of the "
            "losses, and jnp.sum of their weights or the number of these rows, such as jnp.float32(len(outputs))."
        )
    names = returned[2] if sums else ()
    for name, each in zip(sorted(names), sums, strict=True):  # as JAX orders the leaves of a dict
        if _disagree(each, weight_sum):
            raise ValueError(
                "each sum of a loss must be one over the rows that the loss is given, since it is added over microbatches and "
                f"replicas, and divided by weight_sum; got {name!r}, {_described(each)}, and weight_sum, "
                f"{_described(weight_sum)}. Return jnp.sum of it over the rows, or leave it out."
            )


def _outputs(
    forward: Callable, params: PyTree, batches: tuple[PyTree, PyTree], ratio: float
) -> tuple[tuple[PyTree, PyTree], list[Dependence]]:
    """Returns the shapes of the outputs for both batches, and how these depend on rows."""
    few, many = (jax.eval_shape(forward, params, batch) for batch in batches)
    with_rows = [a.shape != b.shape for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True)]
    if all(with_rows):
        return (few, many), [ROWS] * len(with_rows)
    _, read = trace_dependences(forward, (params, batches[0]), (params, batches[1]), ratio)
    found = read([*[CONSTANT] * len(jax.tree.leaves(params)), *[ROWS] * len(jax.tree.leaves(batches[0]))])
    leaves = jax.tree_util.tree_leaves_with_path(few)
    named = lambda path, leaf, each: replace(each, constants=frozenset({_name(path, leaf)}))
    return (few, many), [
        named(path, leaf, each) if each.kind is Kind.CONSTANT and not has_rows else each
        for (path, leaf), each, has_rows in zip(leaves, found, with_rows, strict=True)
    ]


def _name(path: Any, leaf: Any) -> str:
    return f"outputs{jax.tree_util.keystr(path)} of shape {leaf.shape}"


def _power(found: Dependence) -> int | None:
    """Returns the power of the number of rows by which a sum over rows is multiplied, -1 for a mean; None: not known."""
    if found.degree is None or found.kind not in (Kind.CONSTANT, Kind.SUM):
        return None
    return found.degree - (found.kind is Kind.CONSTANT)


def _disagree(a: Dependence, b: Dependence) -> bool:
    """Returns whether two values are known to grow differently with the number of rows."""
    powers = {_power(a), _power(b)}
    return len(powers) == 2 and None not in powers


def _described(found: Dependence) -> str:
    known = ("a multiple of the number of rows", _SAME) if found.kind is Kind.CONSTANT else _OF_ROWS
    power = _power(found)
    return known[-power] if power in (0, -1) else "no sum over rows"
