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
from jaxpar.row_dependence.operation import Operation, Shape, groups_of, span_of_shape
from jaxpar.row_dependence.values import (
    NONE,
    ORDERED,
    SOME_ALONE,
    TAKEN,
    TORN,
    WEIGHT_BY_PLACE,
    Kind,
    Place,
    Span,
    Value,
    Values,
    product_of_growths,
)

_OF_ANY_NUMBER = ("reduce_max", "reduce_min", "reduce_and", "reduce_or")  # of copies of one

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
        growth = _reduced_growth(op, value.growth, axes)
        return op.rows_at(given, value.rows.at(places), growth)
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


def _reduced_growth(op: Operation, growth: float | None, axes: Sequence[int]) -> float | None:
    """Returns the growth of what is left of rows of which other dims are reduced, that may be longer for more rows."""
    more = op.growth_of_size(0, axes)
    if more == 1 or op.name in _OF_ANY_NUMBER:
        return _growth_of_one(op, growth, axes)
    return product_of_growths(growth, more) if op.name == "reduce_sum" else None


def _growth_of_one(op: Operation, growth: float | None, axes: Sequence[int]) -> float | None:
    """Returns the growth of what is made of as many elements for more rows."""
    if growth is None or growth == 1:
        return growth
    if op.name == "reduce_prod":
        size, _ = op.sizes_in(0, axes)
        return growth**size
    return 1.0 if op.name in ("argmax", "argmin") else growth


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
    more = op.growth_of_size(0, axes)
    is_once = more == 1 or op.name in _OF_ANY_NUMBER
    of_one = _growth_of_one(op, value.growth, axes)
    growth = of_one if is_once else product_of_growths(of_one, more)
    if (value.place and more != 1) or not (is_once or adds):
        growth = None
    keeps_place = value.place and op.varying_out()
    place = Place.OTHER if keeps_place else Place.NONE
    number = value.number if op.name in (*_OF_ANY_NUMBER, "reduce_sum") else None
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
    others = [axis for axis in axes if axis not in value.rows.dims]
    growth = _reduced_growth(op, value.growth, others)
    return op.rows_at([value], span.at(places), growth)


def _summed(op: Operation, value: Value, *, is_left: bool) -> Value:
    axes = op.params["axes"]
    is_of_all = set(value.rows.dims) <= set(axes)
    counts = {stop - start for start, stop in value.rows.part}
    if op.axis and is_of_all and len(counts) == 1:  # so many of each device
        return op.mixed([value], "a sum over some rows of each device")
    if value.rows.part and is_of_all:
        return Value(
            Kind.UNKNOWN,
            None,
            why=op.told(SOME_ALONE),
        )
    if not is_left:
        return op.mixed([value], "it is no sum over rows")
    others = [axis for axis in axes if axis not in value.rows.dims]
    why = op.told(WEIGHT_BY_PLACE) if value.place else NONE
    left = [dim for dim in value.rows.dims if dim not in axes]
    if left and left != [-1]:  # of one trip alone, a loop over chunks of rows may add them up
        why = why or op.told(TORN)
    return Value(
        Kind.SUM,
        _reduced_growth(op, value.growth, others),
        why=value.why or why,
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
    if value.is_free and op.varying_in() and 0 not in new:
        return _reshaped_copies(op, value)
    if span is None or span.in_loop or 0 in new:
        return value
    is_in_loop = span.first < 0
    within = span._replace(first=0, outer=1) if is_in_loop else span
    made = _span_of_reshaped(within, old, new)
    few = _span_of_reshaped(within, op.in_shapes()[0], op.out_shapes()[0])
    if made is None or _is_other(few, made) or _crosses_repeats(op, within, made):
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


def _reshaped_copies(op: Operation, value: Value) -> Value:
    """Of what depends on no row: elements that differ are those of each row, where they are merged with the dim of rows.

    jnp.tile(table, n) has its elements in each row; jnp.repeat(table, n // 2) has one in each half of the rows.
    """
    dims = op.varying_in()
    groups = groups_of(op)
    if op.axis and len(dims) > 1:  # the whole, of the parts of all
        return value
    few, many = op.in_shapes()
    others = [d for before, _ in groups if set(before) & set(dims) for d in before]
    if all(d in dims or d in value.copies or few[d] == many[d] == 1 for d in others):
        return value
    old, new = (shapes[0] for shapes in (op.in_shapes(), op.out_shapes()))
    made = _span_of_reshaped(span_of_shape(old, dims, op.rows), old, new)
    if len(dims) > 1 or made is None:
        return replace(value, place=Place.OTHER)
    return op.rows_at([value], made, value.growth)


def _is_other(few: Span | None, many: Span) -> bool:
    """Whether rows of few are others than those of many: ``h.reshape(6, len(h))`` of [rows, 6] takes them apart."""
    return few is not None and (few.outer, few.inner) != (many.outer, many.inner)


def _crosses_repeats(op: Operation, span: Span, made: Span) -> bool:
    """Whether some groups of neighbouring rows have the last of one repetition of the rows and the first of the next."""
    if span.outer == 1:
        return False
    size = _in_group(made, op.out_shapes()[0])
    return size > 1 and any(rows % size for rows in (op.rows, round(op.rows * op.ratio)))


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
    if value.is_free:
        return _tiled_copies(op, value)
    if span is None:
        return value
    times = math.prod(repeats[d] for d in span.dims if d >= 0)
    if times > 1 and span.first < span.last:
        return op.unknown(given, op.told("it repeats rows"))
    outer = span.outer * times
    return replace(value, span=span._replace(outer=outer))


def _tiled_copies(op: Operation, value: Value) -> Value:
    few, _ = op.in_shapes()
    longer = [d for d, times in enumerate(op.params["reps"]) if times > 1 and few[d] > 1]
    varying = [d for d in op.varying_out() if d in longer and d not in value.copies]
    if not varying:
        return replace(value, copied=value.copied | _repeated_once(op))
    if len(varying) > 1 or varying != op.varying_out():
        return replace(value, place=Place.OTHER)
    (dim,) = varying
    if dim not in op.varying_in():
        shape, _ = op.out_shapes()
        return op.rows_at([value], span_of_shape(shape, [dim], op.rows), value.growth)
    span = span_of_shape(few, [dim], op.rows)
    return op.rows_at([value], span._replace(outer=op.params["reps"][dim]), value.growth)


def _repeated_once(op: Operation) -> set[int]:
    """Returns the dims of one element, which are then copies of it."""
    few, many = op.in_shapes()
    return {d for d in range(len(few)) if few[d] == many[d] == 1}


def counted(op: Operation, given: Values) -> Value:
    """Of the indices 0, 1, 2, ... along a dim."""
    is_of_rows = op.params["dimension"] in op.varying_out()
    return Value(place=Place.INDEX if is_of_rows else Place.NONE)


# Order ----------------------------------------------------------------------------------------


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
    """Returns the dims along which a window has several elements, or along which some are left out or added."""
    sizes = params["window_dimensions"]
    plain = [1] * len(sizes)
    strides = params.get("window_strides") or plain
    padding = params.get("padding") or [(0, 0)] * len(sizes)
    each = enumerate(zip(sizes, strides, padding, strict=True))
    return [d for d, (size, stride, pad) in each if size > 1 or stride > 1 or any(pad)]


def padded(params: dict[str, Any]) -> list[int]:
    """Returns the dims that are padded."""
    config = params["padding_config"]
    return [d for d, each in enumerate(config) if any(each)]
