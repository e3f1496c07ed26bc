"""The rules of operations that take parts of rows, and of those that join parts and repetitions of them."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from jaxpar.row_dependence.elements import joined
from jaxpar.row_dependence.operation import Operation, span_of_shape
from jaxpar.row_dependence.values import (
    MOVED,
    SOME_OTHERWISE,
    TAKEN,
    Kind,
    Place,
    Span,
    Value,
    Values,
    same_growth,
)


def sliced(op: Operation, given: Values) -> Value:
    """Of a slice from constant indices."""
    value = given[0]
    span = value.span
    cut = op.changed_dims()
    dims = [d for d in span.dims if d in cut] if span else []
    if span is None or not dims:
        return value
    if len(dims) > 1 or "start_indices" not in op.params:
        return op.mixed(given, TAKEN)
    (dim,) = dims
    is_in_groups = dim == span.last > span.first
    if is_in_groups and dim not in op.varying_in():
        old, _ = op.sizes_in(0, dims)
        new, _ = op.out_shapes()
        inner = span.inner * new[dim] / old
        return replace(value, span=span._replace(inner=inner))
    return _sliced_rows(op, value, dim)


def split(op: Operation, given: Values) -> list[Value]:
    """Of parts along a dim, one after another."""
    (value,) = given
    axis = op.params["axis"]
    if value.span is None or axis not in value.span.dims:
        return [value] * op.num_outputs
    few, many = op.both("sizes")
    if value.span.in_loop or value.span.first < value.span.last:
        return [op.mixed(given, TAKEN, at) for at in range(op.num_outputs)]
    made = []
    edges = (sum(few[:at]) for at in range(op.num_outputs + 1))
    edges_of_many = (sum(many[:at]) for at in range(op.num_outputs + 1))
    for starts, stops in pairwise(zip(edges, edges_of_many, strict=True)):
        part = _part_of_rows(op, value, axis, starts, stops)
        made.append(part)
    return made


def _sliced_rows(op: Operation, value: Value, dim: int) -> Value:
    """Of a slice along the rows: whole repetitions of them, every second element of each, or some."""
    span = value.rows
    starts = op.params_of("start_indices", dim)
    stops = op.params_of("limit_indices", dim)
    sizes = op.sizes_in(0, [dim])
    stride = (op.params["strides"] or {dim: 1})[dim]
    if stride > 1:
        left_out = [size - stop for size, stop in zip(sizes, stops, strict=True)]
        is_from_start = starts[0] == starts[1] < stride
        is_to_end = all(left < stride - starts[0] for left in left_out)
        is_uneven = any(size % (stride * span.outer) for size in sizes)
        is_whole = is_from_start and is_to_end and not is_uneven
        if not is_whole or op.parts_groups(stride / span.inner):
            return op.mixed([value], TAKEN)
        inner = span.inner / stride
        return replace(value, span=span._replace(inner=inner))
    return _part_of_rows(op, value, dim, starts, stops)


def _part_of_rows(
    op: Operation,
    value: Value,
    dim: int,
    starts: tuple[int, int],
    stops: tuple[int, int],
) -> Value:
    """Returns what is from start to stop, for few rows and for many."""
    span = value.rows
    sizes = op.sizes_in(0, [dim])
    block = Fraction(sizes[0], span.outer)
    is_whole = starts[0] % block == stops[0] % block == 0
    if is_whole and span.first == span.last and not span.part:
        outer = int((stops[0] - starts[0]) / block)
        return replace(value, span=span._replace(outer=outer))
    counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
    if not op.is_float() and counts[0] == counts[1]:
        return op.mixed([value], TAKEN)
    part = tuple(zip(starts, stops, strict=True))
    return replace(value, span=span._replace(part=part))


def concatenated(op: Operation, given: Values) -> Value:
    """Of arrays one after another: repetitions of rows, or parts of them in their order."""
    axis = op.params["dimension"]
    given = _with_rows_of_copies(op, given, axis)
    spans = [v.span for v in given if v.span]
    along = [span for span in spans if axis in span.dims]
    kind = max(v.kind for v in given)
    if not along or kind is not Kind.ROWS:
        return joined(op, given)
    if len(along) < len(given):
        return op.unknown(given, op.told("it joins rows and other rows"))
    plain = {span._replace(outer=1, part=()) for span in along}
    if len(plain) > 1:
        return op.mixed(given, "it joins rows in another order")
    growth = given[0].growth
    if not all(same_growth(growth, v.growth) for v in given):
        what = "it joins rows and what depends on their number"
        return op.mixed(given, what)
    first = along[0]
    parts = [span.part for span in along]
    if axis > first.first:
        return _joined_in_groups(op, given, along)
    if not any(parts):
        outer = sum(span.outer for span in along)
        whole = first._replace(outer=outer)
        return op.rows_at(given, whole, growth)
    sizes = tuple(shape[axis] for shape in op.out_shapes())
    if not _are_in_order(parts, sizes):
        return op.mixed(given, MOVED)
    made = op.rows_at(given, first._replace(part=()), growth)
    if made.why or _are_shares(op, parts, sizes):
        return made
    why = op.told(SOME_OTHERWISE)
    return replace(made, place=Place.OTHER, why=why)


def _joined_in_groups(op: Operation, given: Values, along: Sequence[Span]) -> Value:
    """Of arrays one after another along a later dim of rows: ``[rows / 2, 2]`` has groups of two rows along dim 1."""
    axis = op.params["dimension"]
    first = along[0]
    is_in_groups = axis == first.last and axis not in op.varying_out()
    if not is_in_groups or first.part:
        return op.unknown(given, op.told(MOVED))
    inner = sum((span.inner for span in along), Fraction(0))
    return op.rows_at(given, first._replace(inner=inner), given[0].growth)


def _with_rows_of_copies(op: Operation, given: Values, axis: int) -> Values:
    """Returns the values that are joined along rows: those that depend on none have elements for each row too."""
    free = [at for at, value in enumerate(given) if value.is_free]
    are_of_rows = all(op.varying_in(at) == [axis] for at in free)
    numbers = {v.number for v in given}
    is_one_number = len(numbers) == 1 and None not in numbers
    if not are_of_rows or is_one_number or axis not in op.varying_out():
        return given
    made = []
    for at, value in enumerate(given):
        of_rows = _rows_of_copies(op, at, value, axis) if value.is_free else value
        made.append(of_rows)
    return made


def _rows_of_copies(op: Operation, at: int, value: Value, axis: int) -> Value:
    few, _ = op.in_shapes(at)
    span = span_of_shape(few, [axis], op.rows)
    return op.rows_at([value], span, value.growth)


def _are_shares(op: Operation, parts: Sequence[tuple], sizes: tuple[int, ...]) -> bool:
    """Whether each part is the same share of few rows and of many, and no part is treated otherwise."""
    few, many = sizes
    stops = [(stop, stop_of_many) for (_, stop), (_, stop_of_many) in parts]
    are_shares = all(stop * many == stop_of_many * few for stop, stop_of_many in stops)
    return are_shares and (op.is_of_library or _are_treated_alike(op))


def _are_treated_alike(op: Operation) -> bool:
    """Whether the parts are the same function of slices of rows, or of copies of one element."""
    axis = op.params["dimension"]

    def has_rows(whole: Any) -> bool:
        value = op.known.get(whole)
        if value is None:
            return False
        dims = value.span.dims if value.span else value.copies
        return axis in dims

    def slice_of_rows(equation: Any) -> Any:
        name = equation.primitive.name
        params = equation.params
        if name not in ("split", "slice") or not has_rows(equation.invars[0]):
            return None
        whole = op.expressions.number(equation.invars[0])
        if name == "split":
            return (whole, ()) if params["axis"] == axis else None
        bounds = params["start_indices"], params["limit_indices"]
        kept = tuple(each[:axis] + each[axis + 1 :] for each in bounds)
        return whole, kept, params["strides"]

    number_of = op.expressions.number
    numbers = {number_of(part, slice_of_rows) for part in op.few.invars}
    return len(numbers) == 1


def _are_in_order(parts: Sequence[tuple], sizes: tuple[int, ...]) -> bool:
    """Whether each part starts where the one before it stops, and together they are all rows."""
    if not all(parts):
        return False
    starts = [tuple(start for start, _ in part) for part in parts]
    stops = [tuple(stop for _, stop in part) for part in parts]
    are_chained = starts[1:] == stops[:-1]
    is_whole = starts[0] == (0, 0) and stops[-1] == sizes
    return are_chained and is_whole
