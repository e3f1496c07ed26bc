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
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers
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
    (_, returned), (loss_sum, weight_sum, *sums) = _sums(forward, loss, params, batches)
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
    forward, shapes = (
        model.apply if isinstance(model, LayeredModel) else model,
        jax.eval_shape(lambda batch: batch, batch),
    )
    few, many = of_two_sizes(forward, loss, params, shapes, num_parts, dim=1)
    try:
        (outputs, _), (loss_sum, weight_sum, *_) = _sums(forward, loss, params, (few, many), dim=1)
    except Exception:  # a model of one length alone
        return
    if _disagree(loss_sum, weight_sum):
        loss_is, weight_is = (_described(each).replace("row", "position") for each in (loss_sum, weight_sum))
        raise ValueError(
            "loss_sum and weight_sum must be sums over the positions that the loss is given, since both are added over the "
            f"devices that share a sequence; got loss_sum {loss_is} and weight_sum {weight_is}. Return jnp.sum of the losses "
            "of positions, and jnp.sum of their weights or their number."
        )
    functions = {"loss": (loss, outputs[0], few)}
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
            if given[1:2] == (seq,) != made[1:2] and given[0] == num_rows(args[1]):
                return made[1]
    return None


def _sums(
    forward: Callable, loss: Callable, params: PyTree, batches: tuple[PyTree, PyTree], dim: int = 0
) -> tuple[tuple[PyTree, PyTree], list[Dependence]]:
    """Returns the outputs for both batches beside what the loss returns, and how its sums depend on the dim that differs."""
    ratio = _size(batches[1], dim) / _size(batches[0], dim)
    outputs, found = _outputs(forward, params, batches, ratio)
    (returned, _), of_loss = trace_dependences(loss, (outputs[0], batches[0]), (outputs[1], batches[1]), ratio)
    return (outputs, returned), of_loss([*found, *_split(batches)])


def _split(batches: tuple[PyTree, PyTree]) -> list[Dependence]:
    pairs = zip(*map(jax.tree.leaves, batches), strict=True)
    return [CONSTANT if few.shape == many.shape else ROWS for few, many in pairs]


def _outputs(
    forward: Callable, params: PyTree, batches: tuple[PyTree, PyTree], ratio: float
) -> tuple[tuple[PyTree, PyTree], list[Dependence]]:
    """Returns the shapes of the outputs for both batches, and how these depend on rows."""
    few, many = (jax.eval_shape(forward, params, batch) for batch in batches)
    with_rows = [a.shape != b.shape for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True)]
    if all(with_rows):
        return (few, many), [ROWS] * len(with_rows)
    _, read = trace_dependences(forward, (params, batches[0]), (params, batches[1]), ratio)
    found = read([*[CONSTANT] * len(jax.tree.leaves(params)), *_split(batches)])
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
    forward: Callable, loss: Callable, params: PyTree, batch: PyTree, num_parts: int, dim: int = 0
) -> tuple[PyTree, PyTree]:
    """Returns the shapes of a batch and of one of twice the rows; if the model takes no such batch, of a microbatch and it.

    With ``dim`` 1 positions take the place of rows.
    """
    twice = _resized(batch, 2 * _size(batch, dim), dim)
    try:
        jax.eval_shape(lambda params, batch: loss(forward(params, batch), batch), params, twice)
    except Exception:  # as above
        return _resized(batch, _size(batch, dim) // num_parts, dim), batch
    return batch, twice


def num_rows(batch: PyTree) -> int:
    """Returns the number of rows of a batch."""
    return _size(batch, 0)


def _size(batch: PyTree, dim: int) -> int:
    return next(leaf.shape[dim] for leaf in jax.tree.leaves(batch) if leaf.ndim > dim)


def _resized(batch: PyTree, size: int, dim: int = 0) -> PyTree:
    def resized(leaf: Any) -> jax.ShapeDtypeStruct:
        sizes = (size if at == dim else own for at, own in enumerate(leaf.shape))
        return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)

    return jax.tree.map(resized, batch)


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
