"""The checks of what a loss returns and of what travels between layers, since rows are split into microbatches and replicas.

Both sums of a loss are added over microbatches and replicas:

    jnp.sum(errors), jnp.float32(len(errors))    a sum over rows and their number: accepted
    jnp.mean(errors), 1.0                        both divided by the number of rows, so their ratio is the same: accepted
    jnp.sum(errors), 1.0                         the ratio would be divided by the number of microbatches: refused
    jnp.mean(errors), jnp.float32(len(errors))   it would be multiplied by that: refused

A leaf of ``x`` without rows is another in each microbatch, if it is made of rows:

    x = {"h": [rows, ...], "rate": []}    rate, of params, keys or numbers, is the same in each microbatch: accepted
    x = {"h": [rows, ...], "aux": []}     aux, a mean over rows, is one of the rows of a microbatch: refused
                                          aux, a sum over rows, is added up by a loss that adds it: accepted

Where ``context`` splits sequences, both sums are added over the parts of positions too.

``row_dependence.py`` finds how values depend on rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar._compat import equations
from jaxpar.fields import arg
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers, output_shapes
from jaxpar.row_dependence import CONSTANT, ROWS, Dependence, Kind, trace_dependences

_SAME = "the same for any number of rows"
_OF_ROWS = ("a sum over rows", "a mean over rows")


def check_loss(loss: Callable, outputs: PyTree, batch: PyTree, *, has_aux: bool | None) -> None:
    """Raises unless ``loss`` returns two real scalars, and with ``has_aux`` a dict of further ones; None takes arrays too."""
    found = []
    jax.eval_shape(lambda *given: found.append(jax.tree.map(_abstract, loss(*given))), outputs, batch)
    (given,) = found
    count = len(given) if isinstance(given, tuple) else 1
    if count not in ((2, 3) if has_aux is None else (2 + has_aux,)) or (count == 2 and isinstance(given[1], dict)):
        form = "(loss_sum, weight_sum, sums) with has_aux=True" if has_aux else "(loss_sum, weight_sum)"
        remedy = _remedy(given, count, has_aux)
        raise TypeError(f"loss must return the tuple {form}; got {jax.tree.map(_Told, given)}. {remedy}")
    for name, value in zip(("loss_sum", "weight_sum"), given[:2], strict=True):
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape != () or not jnp.issubdtype(dtype, jnp.floating):
            remedy = f"Sum it: jnp.sum({name})." if shape else f"Cast it: jnp.float32({name})."
            raise ValueError(f"loss must return floating-point scalars; got {name} {dtype}{list(shape)}. {remedy}")
    if count == 3:
        _check_sums(given[2], are_scalars=bool(has_aux))


def _remedy(given: PyTree, count: int, has_aux: bool | None) -> str:
    """What a loss should return in place of ``given``."""
    if count == 2 and isinstance(given[1], dict):
        sums = ", ".join(f'"{name}": {name}_sum' for name in given[1])
        return (
            f"Write: return loss_sum, weight_sum, {{{sums}}}, each a sum over the rows that loss is given, not a mean, and "
            "pass has_aux=True to value_and_grad."
        )
    if count == 3 and not has_aux:
        return "Pass has_aux=True to value_and_grad for the sums of the third, a dict, or leave it out."
    if count == 2:
        return "Return a dict of further sums too, or leave has_aux out."
    return (
        "Return the sum of the losses of the rows that it is given, one microbatch, and what to divide it by, such as the "
        "number of these rows."
    )


def _check_sums(sums: PyTree, *, are_scalars: bool) -> None:
    if not isinstance(sums, dict) or not all(isinstance(name, str) for name in sums):
        raise TypeError(
            "with has_aux=True the third value of loss must be a dict of sums by name; got "
            f'{jax.tree.map(_Told, sums)}. Write such as {{"accuracy": jnp.sum(is_right)}}.'
        )
    for name, value in sums.items() if are_scalars else ():
        if getattr(value, "shape", ()) != ():
            raise ValueError(
                f"each sum of a loss must be a scalar; got {name!r} {_Told(value)}. Sum it over the rows: jnp.sum({name}); "
                "give the numbers of several classes a name each."
            )
        dtype = getattr(value, "dtype", None)
        is_real = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, bool))
        if not is_real:
            raise TypeError(
                f"each sum of a loss must be a float, an integer or a boolean; got {name!r} {jax.tree.map(_Told, value)}. "
                "Leave it out, or return its numbers, each by a name of its own."
            )


def _abstract(leaf: Any) -> Any:
    """The shape and dtype of an array or a number; other leaves are unchanged."""
    is_number = isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "dtype")
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) if is_number else leaf


class _Told(str):
    """A leaf as messages print it: float32[32]."""

    def __new__(cls, leaf: Any) -> "_Told":
        is_array = isinstance(leaf, jax.ShapeDtypeStruct)
        return super().__new__(cls, f"{leaf.dtype}{list(leaf.shape)}" if is_array else repr(leaf))

    __repr__ = str.__str__


def check_rows(model: LayeredModel | Callable, loss: Callable, params: PyTree, batch: PyTree, num_parts: int) -> None:
    """Raises if the loss or a metric would depend on how the rows are split, because it is no sum over rows.

    Refused is what is known to be wrong. A loss whose dependence on the rows is not known, such as one with a product of two
    means, is taken, unless its weight does not grow with the rows. So is a leaf of ``x`` that does not reach the loss. What a
    function computes from several rows and keeps to itself, or puts into each row, is not checked.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with a dict of further sums.
        params: Arrays or ShapeDtypeStructs.
        batch: Likewise.
        num_parts: The number of microbatches of all replicas; with one nothing is split and nothing is refused.
    """
    if num_parts == 1:
        return
    batches = of_two_sizes(model, loss, params, _shapes(batch), num_parts)
    returned, _, (loss_sum, weight_sum, *sums) = _read(model, loss, params, batches)
    wrong = frozenset().union(*(each.wrong for each in (loss_sum, weight_sum, *sums)))
    if of_x := sorted(name for name in wrong if name.startswith("x")):
        raise ValueError(
            "a leaf of x without rows must not make the loss depend on how the rows of a batch are split into microbatches and "
            f"replicas; got {', '.join(of_x)}, which reaches the loss and is computed from the rows, or is added to a "
            "sum over them. Give it a number for each row, of shape [rows], and sum it in the loss."
        )
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


def check_positions(
    model: LayeredModel | Callable, loss: Callable, params: PyTree, batch: PyTree, num_parts: int
) -> None:
    """Raises if the loss would depend on how sequences are split: it is no sum over positions, or it pairs neighbours.

    Raises too for a dict without ``positions``: it has not been through ``shard_batch``, so its tokens are on other devices
    than ``context_parallel.places`` says.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with a dict of further sums.
        params: Arrays or ShapeDtypeStructs.
        batch: Likewise.
        num_parts: The number of parts of a sequence; with one nothing is refused, nor is a model of one length alone.
    """
    if num_parts == 1:
        return
    if isinstance(batch, dict) and "positions" not in batch:
        raise ValueError(
            f"a batch whose sequences are split must have positions; got {arg(context=num_parts)} and none. Make it with "
            "jaxpar.shard_batch, which adds them."
        )
    few, many = of_two_sizes(model, loss, params, _shapes(batch), num_parts, dim=1)
    try:
        _, outputs, (loss_sum, weight_sum, *_) = _read(_forward(model), loss, params, (few, many), dim=1)
    except Exception:  # a model of one length alone
        return
    if _disagree(loss_sum, weight_sum):
        loss_is, weight_is = (_described(each).replace("row", "position") for each in (loss_sum, weight_sum))
        raise ValueError(
            "loss_sum and weight_sum must be sums over the positions that the loss is given, since both are added over the "
            f"devices that share a sequence; got loss_sum {loss_is} and weight_sum {weight_is}. Return jnp.sum of the losses "
            "of positions, and jnp.sum of their weights or their number."
        )
    functions = {"loss": (loss, outputs, few)}
    functions |= {"embed": (model.embed, params[OUTER], few)} if isinstance(model, LayeredModel) else {}
    for name, (function, *args) in functions.items():
        if size := _cut_positions(function, args, _size(few, 1)):
            raise ValueError(
                f"{name} must treat each position on its own, since a device has some of a sequence; got a slice of {size} of "
                f"{_size(few, 1)} positions. Shift targets before jaxpar.shard_batch, and give positions that do not count a "
                "weight of 0."
            )


def _cut_positions(function: Callable, args: list, seq: int) -> int | None:
    """Returns the size of a slice that a function takes of dim 1 of an array ``[rows, seq, ...]``; None if it takes none."""
    for equation in equations(jax.make_jaxpr(function)(*args)):
        if equation.primitive.name in ("slice", "dynamic_slice"):
            given, made = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            if given[1:2] == (seq,) != made[1:2] and given[0] == _size(args[1], 0):
                return made[1]
    return None


def _forward(model: LayeredModel | Callable) -> Callable[[PyTree, PyTree], PyTree]:
    return model.apply if isinstance(model, LayeredModel) else model


def _shapes(batch: PyTree) -> PyTree:
    return jax.eval_shape(lambda batch: batch, batch)


def _read(
    model: LayeredModel | Callable, loss: Callable, params: PyTree, batches: tuple[PyTree, PyTree], dim: int = 0
) -> tuple[PyTree, PyTree, list[Dependence]]:
    """Returns what the loss and the model return for the first batch, and how the loss depends on the dim that differs.

    Leaves without rows, of ``x`` and of the outputs, have names, so that their way to the loss is known.
    """
    traced = partial(trace_dependences, ratio=_size(batches[1], dim) / _size(batches[0], dim))
    pairs = zip(*map(jax.tree.leaves, batches), strict=True)
    rows = found = [CONSTANT if few.shape == many.shape else ROWS for few, many in pairs]
    x = batches
    for name, function, own, count in _parts(model, params):
        x, read = traced(function, (own, x[0]), (own, x[1]))
        of_own = [CONSTANT] * len(jax.tree.leaves(own))
        for _ in range(count):
            before, found = found, _named(name, x, found, lambda found, read=read, own=of_own: read([*own, *found]))
            if found == before:
                break
    (returned, _), of_loss = traced(loss, (x[0], batches[0]), (x[1], batches[1]))
    return returned, x[0], of_loss([*found, *rows])


def _parts(model: LayeredModel | Callable, params: PyTree) -> Iterator[tuple[str, Callable, PyTree, int]]:
    """Yields the functions that make up the model: the name of what each returns, its params, and how often it is applied."""
    if not isinstance(model, LayeredModel):
        yield "outputs", model, params, 1
        return
    outer, layers, count = params[OUTER], params[LAYERS], num_layers(params)
    yield "x", model.embed, outer, 1
    if is_stacked(params):
        first = jax.eval_shape(lambda layers: jax.tree.map(lambda p: p[0], layers), layers)
        yield "x", model.layers(1)[0], first, count
    else:
        yield from (("x", *each, 1) for each in zip(model.layers(count), layers, strict=True))
    yield "outputs", model.head, outer, 1


def _named(
    name: str,
    made: tuple[PyTree, PyTree],
    given: list[Dependence],
    read: Callable[[list[Dependence]], list[Dependence]],
) -> list[Dependence]:
    """Returns the dependences of what a part returns, with the names of leaves without rows."""
    leaves = list(zip(jax.tree_util.tree_leaves_with_path(made[0]), jax.tree.leaves(made[1]), strict=True))
    if all(few.shape != many.shape for (_, few), many in leaves):
        # Rows alone: each is taken to depend on its own row, and on what else is known to be wrong.
        is_wrong = any(each.constants or each.sums or each.wrong for each in given)
        return [replace(ROWS, wrong=each.wrong) for each in read(given)] if is_wrong else [ROWS] * len(leaves)
    of = lambda path, leaf: frozenset({f"{name}{jax.tree_util.keystr(path)} of shape {leaf.shape}"})
    return [
        _of_leaf(of(path, few), each, is_output=name == "outputs") if few.shape == many.shape else each
        for ((path, few), many), each in zip(leaves, read(given), strict=True)
    ]


def _of_leaf(name: frozenset[str], found: Dependence, *, is_output: bool) -> Dependence:
    """Returns the dependence of what reads a leaf without rows."""
    if found.is_constant or is_output:
        return replace(found, constants=found.constants | name) if found.kind is Kind.CONSTANT else found
    if found.kind is Kind.SUM and found.degree == 0:
        return replace(found, sums=name)
    return replace(found, kind=Kind.OTHER, sums=frozenset(), wrong=found.wrong | name)


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


def of_two_sizes(
    model: LayeredModel | Callable, loss: Callable, params: PyTree, batch: PyTree, num_parts: int, dim: int = 0
) -> tuple[PyTree, PyTree]:
    """Returns the shapes of a batch and of one of twice the rows; if the model takes no such batch, of a microbatch and it.

    With ``dim`` 1 positions take the place of rows.
    """
    twice = _resized(batch, 2 * _size(batch, dim), dim)
    try:
        jax.eval_shape(loss, output_shapes(model, params, twice), twice)
    except Exception:  # any error that a model raises for another number of rows than its own
        return _resized(batch, _size(batch, dim) // num_parts, dim), batch
    return batch, twice


def _size(batch: PyTree, dim: int) -> int:
    return next(leaf.shape[dim] for leaf in jax.tree.leaves(batch) if leaf.ndim > dim)


def _resized(batch: PyTree, size: int, dim: int = 0) -> PyTree:
    def resized(leaf: Any) -> jax.ShapeDtypeStruct:
        sizes = (size if at == dim else own for at, own in enumerate(leaf.shape))
        return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)

    return jax.tree.map(resized, batch)
