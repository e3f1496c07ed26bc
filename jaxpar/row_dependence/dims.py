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
    MOVED,
    ORDERED,
    SOME_OTHERWISE,
    TAKEN,
    Kind,
    Place,
    Span,
    Value,
    Values,
    product_of_growths,
    same_growth,
)

# Reductions -----------------------------------------------------------------------------------


def reduced(op: Operation, given: Values) -> Value:
    """Of a sum, a maximum or a product over dims, and of the index of a maximum."""
    value = given[0]
    axes = op.params["axes"]
    if value.kind is not Kind.ROWS:
        return _reduced_without_rows(op, value, axes)
    dims = list(value.rows.dims)
    left = [d for d in dims if d not in axes]
    if left == dims:
        places = _renumbered(left, axes)
        return op.rows_at(given, value.rows.at(places), value.growth)
    leads = left == dims[: len(left)]
    if leads and left and _varies(op, left[0]):
        return _reduced_groups(op, value, left)
    if op.name == "reduce_sum":
        return _summed(op, value, is_left=leads)
    is_bound = op.name in ("reduce_max", "reduce_min")
    is_of_all = not left
    if is_of_all and (is_bound or not op.is_float()):
        return op.mixed(given, "a maximum over rows", is_bound=is_bound)
    return op.mixed(given, "it is no sum over rows")


def _renumbered(dims: Sequence[int], removed: Sequence[int]) -> list[int]:
    """Returns where dims are when others are removed."""
    before = lambda d: sum(axis < d for axis in removed)
    return [d - before(d) for d in dims]


def _varies(op: Operation, dim: int) -> bool:
    """Whether a dim, or the loop around, is longer for more rows."""
    if dim < 0:
        return op.trips_vary
    return dim in op.varying_in()


def _reduced_without_rows(op: Operation, value: Value, axes: Sequence[int]) -> Value:
    adds = op.name == "reduce_sum"
    if not adds and value.kind is Kind.SUM:
        return elementwise(op, [value])
    more = op.growth_of_size(0, axes) if adds else 1.0
    growth = product_of_growths(value.growth, more)
    if value.place and more != 1:
        growth = None
    keeps_place = value.place and op.varying_out()
    place = Place.OTHER if keeps_place else Place.NONE
    number = value.number
    if number and adds:
        few, many = op.sizes_in(0, axes)
        number = number[0] * few, number[1] * many
    return replace(value, growth=growth, place=place, number=number)


def _reduced_groups(op: Operation, value: Value, left: list[int]) -> Value:
    """Of groups of neighbouring rows, each of which becomes one."""
    axes = op.params["axes"]
    removed = [d for d in value.rows.dims if d in axes]
    size, _ = op.sizes_in(0, removed)
    inner = value.rows.inner / size
    span = value.rows._replace(inner=inner)
    places = _renumbered(left, axes)
    return op.rows_at([value], span.at(places), value.growth)


def _summed(op: Operation, value: Value, *, is_left: bool) -> Value:
    is_of_all = set(value.rows.dims) <= set(op.params["axes"])
    counts = {stop - start for start, stop in value.rows.part}
    if op.axis and is_of_all and len(counts) == 1:  # so many of each device
        return op.mixed([value], "a sum over some rows of each device")
    if value.rows.part and is_of_all:
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
    places = [order.index(d) for d in sorted(order)]
    return op.rows_at(given, value.span.moved(places), value.growth)


def reshaped(op: Operation, given: Values) -> Value:
    """Of the same elements in another shape."""
    value = given[0]
    span = value.span
    _, old = op.in_shapes()
    _, new = op.out_shapes()
    if span is None and not op.varying_out():  # the whole, of the parts of all
        return replace(value, place=Place.NONE)
    if span is None or span.in_loop or 0 in new:
        return value
    is_in_loop = span.first < 0
    within = span._replace(first=0, outer=1) if is_in_loop else span
    made = _span_of_reshaped(within, old, new)
    if made is None:
        return op.mixed(given, "it reads some rows of all")
    if op.parts_groups(_in_group(made, op.out_shapes()[0])):
        of = "a sequence" if op.axis else "a batch"
        return op.mixed(given, f"it groups rows of two parts of {of}")
    if not is_in_loop:
        return replace(value, span=made)
    if made.first > 0:
        return op.unknown(given, op.told("a loop over rows reshapes them"))
    around = made._replace(first=-1, outer=span.outer)
    return replace(value, span=around)


def _in_group(span: Span, shape: Shape) -> Fraction:
    """Returns how many neighbouring rows each entry of the first dim of rows has."""
    return _size(shape[span.first + 1 : span.last + 1]) / span.inner


def _span_of_reshaped(span: Span, old: Shape, new: Shape) -> Span | None:
    """Returns where rows are in another shape: what is before and after them must be made of whole dims."""
    before = _size(old[: span.first]) * span.outer
    after = _size(old[span.last + 1 :]) * span.inner
    dims = range(len(new))
    befores = [_size(new[:d]) for d in dims]
    afters = [_size(new[d + 1 :]) for d in dims]
    firsts = [d for d in dims if before % befores[d] == 0]
    lasts = [d for d in dims if _divides(afters[d], after)]
    if not firsts or not lasts:
        return None
    last = lasts[0]
    fitting = [first for first in firsts if first <= last]
    if not fitting:
        last = firsts[-1]
    first = (fitting or firsts)[-1]
    outer = before // befores[first]
    inner = after / afters[last]
    return Span(first, last, outer, inner, span.part)


def _size(shape: Shape) -> int:
    return math.prod(shape)


def _divides(size: int, whole: Fraction) -> bool:
    part = whole / size
    return part.denominator == whole.denominator


def stacked(op: Operation, given: Values) -> Value:
    """Of a new dim, along which there are values."""
    made = joined(op, given)
    axis = op.params["axis"]
    if made.span is None:
        return made
    dims = range(made.span.last + 1)
    places = [d if d < axis else d + 1 for d in dims]
    return replace(made, span=made.span.moved(places))


def unstacked(op: Operation, given: Values) -> list[Value]:
    """Of the slices along a dim, each without it."""
    value = given[0]
    axis = op.params["axis"]
    if value.span is None:
        return [value] * op.num_outputs
    if axis in value.span.dims:
        made = op.mixed(given, TAKEN)
        return [made] * op.num_outputs
    places = _renumbered(value.span.dims, [axis])
    made = op.rows_at(given, value.span.at(places), value.growth)
    return [made] * op.num_outputs


def tiled(op: Operation, given: Values) -> Value:
    """Of copies one after another."""
    value = given[0]
    span = value.span
    repeats = op.params["reps"]
    if span is None:
        return value
    times = math.prod(repeats[d] for d in span.dims if d >= 0)
    if times > 1 and span.first < span.last:
        return op.unknown(given, op.told("it repeats rows"))
    outer = span.outer * times
    return replace(value, span=span._replace(outer=outer))


def counted(op: Operation, given: Values) -> Value:
    """Of the indices 0, 1, 2, ... along a dim."""
    is_of_rows = op.params["dimension"] in op.varying_out()
    return Value(place=Place.INDEX if is_of_rows else Place.NONE)


# Parts ----------------------------------------------------------------------------------------


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


def _sliced_rows(op: Operation, value: Value, dim: int) -> Value:
    """Of a slice along the rows: whole repetitions of them, every second element of each, or some."""
    span = value.rows
    starts = op.params_of("start_indices", dim)
    stops = op.params_of("limit_indices", dim)
    sizes = op.sizes_in(0, [dim])
    stride = (op.params["strides"] or {dim: 1})[dim]
    if stride > 1:
        is_from_start = starts[0] == starts[1] < stride
        is_uneven = any(size % stride for size in sizes)
        if not is_from_start or is_uneven or op.parts_groups(stride / span.inner):
            return op.mixed([value], TAKEN)
        return replace(value, span=span._replace(inner=span.inner / stride))
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
    if not any(parts):
        outer = sum(span.outer for span in along)
        whole = first._replace(outer=outer)
        return op.rows_at(given, whole, growth)
    sizes = tuple(shape[axis] for shape in op.out_shapes())
    if not _are_in_order(parts, sizes):
        return op.mixed(given, MOVED)
    made = op.rows_at(given, first._replace(part=()), growth)
    if made.why or _are_shares(parts, sizes):
        return made
    why = op.told(SOME_OTHERWISE)
    return replace(made, place=Place.OTHER, why=why)


def _are_shares(parts: Sequence[tuple], sizes: tuple[int, ...]) -> bool:
    """Whether each part is the same share of few rows and of many."""
    few, many = sizes
    stops = [(stop, stop_of_many) for (_, stop), (_, stop_of_many) in parts]
    return all(stop * many == stop_of_many * few for stop, stop_of_many in stops)


def _are_in_order(parts: Sequence[tuple], sizes: tuple[int, ...]) -> bool:
    """Whether each part starts where the one before it stops, and together they are all rows."""
    if not all(parts):
        return False
    starts = [tuple(start for start, _ in part) for part in parts]
    stops = [tuple(stop for _, stop in part) for part in parts]
    are_chained = starts[1:] == stops[:-1]
    is_whole = starts[0] == (0, 0) and stops[-1] == sizes
    return are_chained and is_whole


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
        ndim = max(op.ndim_in(at) for at in range(len(given)))
        dims = {d % ndim for d in dims_of(op.params)}
        spans = [v.span for v in given if v.span]
        mixes = any(dims & set(span.dims) for span in spans)
        results = range(op.num_outputs)
        return [one(op, given, at, mixes=mixes) for at in results]

    def one(
        op: Operation,
        given: Values,
        at: int,
        *,
        mixes: bool,
    ) -> Value:
        if mixes:
            return op.mixed(given, ORDERED, at)
        if adds:
            return joined(op, given, at)
        return elementwise(op, given, at)

    return rule


def windows(params: dict[str, Any]) -> list[int]:
    """Returns the dims along which a window has several elements."""
    sizes = params["window_dimensions"]
    return [d for d, size in enumerate(sizes) if size > 1]


def padded(params: dict[str, Any]) -> list[int]:
    """Returns the dims that are padded."""
    config = params["padding_config"]
    return [d for d, each in enumerate(config) if any(each)]
