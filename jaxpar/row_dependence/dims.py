"""The rules of operations that reduce dims, move them, or take and join parts of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from jaxpar.row_dependence.elements import (
    elementwise,
    joined,
)
from jaxpar.row_dependence.operation import Operation, Shape
from jaxpar.row_dependence.values import (
    Kind,
    Place,
    Span,
    Value,
    Values,
)

# Reductions -----------------------------------------------------------------------------------


def reduced(op: Operation, given: Values) -> Value:
    """Of a sum, a maximum or a product over dims, and of the index of a maximum."""
    value, axes = given[0], op.params["axes"]
    if value.kind is not Kind.ROWS:
        return _reduced_without_rows(op, value, axes)
    assert value.span is not None, "rows have a span"
    left = [d for d in value.span.dims if d not in axes]
    if len(left) == len(value.span.dims):
        return op.rows_at(
            given,
            value.span.at(_renumbered(left, axes)),
            value.growth,
        )
    leads = left == list(value.span.dims)[: len(left)]
    if leads and left and _varies(op, left[0]):
        return _reduced_groups(op, value, left)
    if op.name == "reduce_sum":
        return _summed(op, value, is_left=leads)
    is_bound = op.name in ("reduce_max", "reduce_min")
    if not left and (is_bound or not op.is_float()):
        return op.mixed(given, "a maximum over rows", is_bound=is_bound)
    return op.mixed(given, "it is no sum over rows")


def _renumbered(dims: Sequence[int], removed: Sequence[int]) -> list[int]:
    return [d - sum(axis < d for axis in removed) for d in dims]


def _varies(op: Operation, dim: int) -> bool:
    """Whether a dim, or the loop around, is longer for more rows."""
    return op.trips_vary if dim < 0 else dim in op.varying_in()


def _reduced_without_rows(op: Operation, value: Value, axes: Sequence[int]) -> Value:
    adds = op.name == "reduce_sum"
    if not adds and value.kind is Kind.SUM:
        return elementwise(op, [value])
    more = op.growth_of_size(0, axes) if adds else 1.0
    is_known = value.growth is not None and (not value.place or more == 1)
    number = value.number
    if number and adds:
        few, many = (math.prod(shape[d] for d in axes) for shape in op.in_shapes())
        number = number[0] * few, number[1] * many
    return replace(
        value,
        growth=(value.growth or 0) * more if is_known else None,
        place=Place.OTHER if value.place and op.varying_out() else Place.NONE,
        number=number,
    )


def _reduced_groups(op: Operation, value: Value, left: list[int]) -> Value:
    """Of groups of neighbouring rows, each of which becomes one."""
    assert value.span is not None, "rows have a span"
    axes, (few, _) = op.params["axes"], op.in_shapes()
    size = math.prod(few[d] for d in value.span.dims if d in axes)
    span = value.span._replace(inner=value.span.inner / size)
    return op.rows_at(
        [value],
        span.at(_renumbered(left, axes)),
        value.growth,
    )


def _summed(op: Operation, value: Value, *, is_left: bool) -> Value:
    assert value.span is not None, "rows have a span"
    if value.span.part and set(value.span.dims) <= set(op.params["axes"]):
        return Value(
            Kind.UNKNOWN,
            None,
            why=op.told("a sum over some rows"),
        )
    if not is_left:
        return op.mixed([value], "it is no sum over rows")
    return Value(
        Kind.SUM,
        value.growth,
        why=value.why,
        assumed=value.assumed,
    )


# Other shapes ---------------------------------------------------------------------------------


def broadcast(op: Operation, given: Values) -> Value:
    """Of copies along new dims."""
    value = given[0]
    if value.span is None:
        return value
    dims = op.params["broadcast_dimensions"]
    return op.rows_at(given, value.span.moved(dims), value.growth)


def transposed(op: Operation, given: Values) -> Value:
    """Of dims in another order."""
    value = given[0]
    if value.span is None:
        return value
    order = list(op.params["permutation"])
    places = [order.index(d) for d in range(len(order))]
    return op.rows_at(given, value.span.moved(places), value.growth)


def reshaped(op: Operation, given: Values) -> Value:
    """Of the same elements in another shape."""
    value, (_, old), (_, new) = (
        given[0],
        op.in_shapes(),
        op.out_shapes(),
    )
    span = value.span
    if span is None or span.in_loop or 0 in new:
        return value
    within = span if span.first >= 0 else span._replace(first=0, outer=1)
    made = _span_of_reshaped(within, old, new)
    if made is None:
        return op.mixed(given, "it reads some rows of all")
    if within is span:
        return replace(value, span=made)
    if made.first > 0:
        return op.unknown(given, op.told("a loop over rows reshapes them"))
    return replace(
        value,
        span=made._replace(first=-1, outer=span.outer),
    )


def _span_of_reshaped(span: Span, old: Shape, new: Shape) -> Span | None:
    """Returns where rows are in another shape: what is before and after them must be made of whole dims."""
    before = math.prod(old[: span.first]) * span.outer
    after = math.prod(old[span.last + 1 :]) * span.inner
    befores = [math.prod(new[:d]) for d in range(len(new))]
    afters = [math.prod(new[d + 1 :]) for d in range(len(new))]
    firsts = [d for d, size in enumerate(befores) if before % size == 0]
    lasts = [d for d, size in enumerate(afters) if _divides(size, after)]
    if not firsts or not lasts:
        return None
    fitting = [first for first in firsts if first <= lasts[0]]
    first, last = (fitting[-1], lasts[0]) if fitting else (firsts[-1], firsts[-1])
    return Span(
        first,
        last,
        before // befores[first],
        after / afters[last],
        span.part,
    )


def _divides(size: int, whole: Fraction) -> bool:
    return (whole / size).denominator == whole.denominator


def stacked(op: Operation, given: Values) -> Value:
    """Of a new dim, along which there are values."""
    made, axis = joined(op, given), op.params["axis"]
    if made.span is None:
        return made
    places = [d + (d >= axis) for d in range(made.span.last + 1)]
    return replace(made, span=made.span.moved(places))


def unstacked(op: Operation, given: Values) -> list[Value]:
    """Of the slices along a dim, each without it."""
    value, axis = given[0], op.params["axis"]
    if value.span is None:
        return [value] * op.num_outputs
    if axis in value.span.dims:
        return [op.mixed(given, "it takes some rows", at) for at in range(op.num_outputs)]
    span = value.span.at(_renumbered(value.span.dims, [axis]))
    return [op.rows_at(given, span, value.growth)] * op.num_outputs


def tiled(op: Operation, given: Values) -> Value:
    """Of copies one after another."""
    value, repeats = given[0], op.params["reps"]
    if value.span is None:
        return value
    times = math.prod(repeats[d] for d in value.span.dims if d >= 0)
    if times > 1 and value.span.first < value.span.last:
        return op.unknown(given, op.told("it repeats rows"))
    return replace(
        value,
        span=value.span._replace(outer=value.span.outer * times),
    )


def counted(op: Operation, given: Values) -> Value:
    """Of the indices 0, 1, 2, ... along a dim."""
    is_of_rows = op.params["dimension"] in op.varying_out()
    return Value(place=Place.INDEX if is_of_rows else Place.NONE)


# Parts ----------------------------------------------------------------------------------------


def sliced(op: Operation, given: Values) -> Value:
    """Of a slice from constant indices."""
    value, span = given[0], given[0].span
    pairs = [zip(*shapes, strict=True) for shapes in zip(op.in_shapes(), op.out_shapes(), strict=True)]
    cut = {d for pair in pairs for d, (old, new) in enumerate(pair) if old != new}
    dims = [d for d in span.dims if d in cut] if span else []
    if span is None or not dims:
        return value
    if len(dims) > 1 or "start_indices" not in op.params:
        return op.mixed(given, "it takes some rows")
    (dim,) = dims
    if dim == span.last > span.first and dim not in op.varying_in():
        (few, _), (made, _) = (
            op.in_shapes(),
            op.out_shapes(),
        )  # groups of neighbouring rows
        return replace(
            value,
            span=span._replace(inner=span.inner * made[dim] / few[dim]),
        )
    return _sliced_rows(op, value, span, dim)


def _sliced_rows(op: Operation, value: Value, span: Span, dim: int) -> Value:
    """Of a slice along the rows: whole repetitions of them, every second element of each, or some."""
    sizes = [shape[dim] for shape in op.in_shapes()]
    starts = [e.params["start_indices"][dim] for e in (op.few, op.many)]
    stops = [e.params["limit_indices"][dim] for e in (op.few, op.many)]
    stride = (op.params["strides"] or {dim: 1})[dim]
    if stride > 1:
        is_even = starts[0] == starts[1] < stride and not any(size % stride for size in sizes)
        inner = span._replace(inner=span.inner / stride)
        return replace(value, span=inner) if is_even else op.mixed([value], "it takes some rows")
    block = Fraction(sizes[0], span.outer)
    is_whole = starts[0] % block == stops[0] % block == 0
    if is_whole and span.first == span.last and not span.part:
        return replace(
            value,
            span=span._replace(outer=int((stops[0] - starts[0]) / block)),
        )
    if not op.is_float() and stops[0] - starts[0] == stops[1] - starts[1]:
        return op.mixed([value], "it takes some rows")
    return replace(
        value,
        span=span._replace(part=tuple(zip(starts, stops, strict=True))),
    )


def concatenated(op: Operation, given: Values) -> Value:
    """Of arrays one after another: repetitions of rows, or parts of them in their order."""
    axis, spans = (
        op.params["dimension"],
        [v.span for v in given],
    )
    along = [span for span in spans if span and axis in span.dims]
    if not along or max(v.kind for v in given) is not Kind.ROWS:
        return joined(op, given)
    if len(along) < len(given):
        return op.unknown(given, op.told("it joins rows and other rows"))
    if len({span._replace(outer=1, part=()) for span in along}) > 1:
        return op.mixed(given, "it joins rows in another order")
    if not any(span.part for span in along):
        total = sum(span.outer for span in along)
        return op.rows_at(
            given,
            along[0]._replace(outer=total),
            given[0].growth,
        )
    sizes = tuple(shape[axis] for shape in op.out_shapes())
    if not _are_in_order([span.part for span in along], sizes):
        return op.mixed(given, "it moves rows")
    return op.rows_at(given, along[0]._replace(part=()))


def _are_in_order(parts: Sequence[tuple], sizes: tuple[int, ...]) -> bool:
    """Whether each part starts where the one before it stops, and together they are all rows."""
    if not all(parts):
        return False
    starts = [tuple(start for start, _ in part) for part in parts]
    stops = [tuple(stop for _, stop in part) for part in parts]
    return starts == [(0, 0), *stops[:-1]] and stops[-1] == sizes


def along(
    dims_of: Callable[[dict[str, Any]], Sequence[int]],
    *,
    adds: bool = False,
) -> Callable[[Operation, Values], list[Value]]:
    """Returns the rule of an operation that mixes elements along some dims, and along others treats each on its own.

    Args:
        dims_of: The dims, from the parameters of the operation.
        adds: Whether it returns elements, or sums of some.
    """

    def rule(op: Operation, given: Values) -> list[Value]:
        ndim = max((v.aval.ndim for v in op.few.invars), default=0)
        dims = {d % max(ndim, 1) for d in dims_of(op.params)}
        mixes = any(v.span and dims & set(v.span.dims) for v in given)
        return [one(op, given, at, mixes=mixes) for at in range(op.num_outputs)]

    def one(
        op: Operation,
        given: Values,
        at: int,
        *,
        mixes: bool,
    ) -> Value:
        if mixes:
            return op.mixed(given, "it orders or adds up rows", at)
        return joined(op, given, at) if adds else elementwise(op, given, at)

    return rule


def windows(params: dict[str, Any]) -> list[int]:
    """Returns the dims along which a window has several elements."""
    return [d for d, size in enumerate(params["window_dimensions"]) if size > 1]


def padded(params: dict[str, Any]) -> list[int]:
    """Returns the dims that are padded."""
    return [d for d, each in enumerate(params["padding_config"]) if any(each)]
