"""The rules of products of matrices, of convolutions, and of reads and writes at indices."""

from dataclasses import replace
from typing import Any

from jaxpar.row_dependence.dims import sliced
from jaxpar.row_dependence.elements import (
    elementwise,
    joined,
)
from jaxpar.row_dependence.operation import (
    Operation,
    span_of_shape,
)
from jaxpar.row_dependence.values import (
    ZERO,
    Kind,
    Place,
    Span,
    Value,
    Values,
    first_assumed,
    first_why,
    product_of_growths,
)

ADDS = ("scatter-add", "scatter-sub")
Dims = list[int | None]

# Products -------------------------------------------------------------------------------------


def multiplied_matrices(op: Operation, given: Values) -> Value:
    """Of a product of matrices, with any dims contracted and any batched."""
    if any(v.is_zero for v in given):
        return ZERO
    growth = product_of_growths(given[0].growth, given[1].growth)
    loops = {v.span for v in given if v.in_loop}
    if loops and all(v.is_free or v.span in loops for v in given) and len(loops) == 1:
        return op.rows_at(given, loops.pop(), growth)
    if loops or max(v.kind for v in given) > Kind.ROWS:
        return _product_with_sums(op, given, growth)
    rows = [at for at, v in enumerate(given) if v.kind is Kind.ROWS]
    if not rows:
        place = Place.OTHER if any(v.place for v in given) and op.varying_out() else Place.NONE
        return Value(
            growth=_contracted_growth(op, growth),
            place=place,
        )
    return _product_of_rows(op, given, rows, growth)


def _contracted_growth(op: Operation, growth: float | None) -> float | None:
    contracted = op.params["dimension_numbers"][0][0]
    return None if growth is None else growth * op.growth_of_size(0, contracted)


def _product_with_sums(op: Operation, given: Values, growth: float | None) -> Value:
    kinds = {v.kind for v in given}
    if kinds == {Kind.FREE, Kind.SUM} and not any(v.place for v in given):
        (of_rows,) = (v for v in given if not v.is_free)
        return replace(
            of_rows,
            growth=_contracted_growth(op, growth),
            is_running=False,
        )
    if max(kinds) is Kind.ROWS:
        return op.unknown(
            given,
            op.told("a loop over rows multiplies them by others"),
        )
    return elementwise(op, given)


def _product_of_rows(
    op: Operation,
    given: Values,
    rows: list[int],
    growth: float | None,
) -> Value:
    contracted = op.params["dimension_numbers"][0]
    spans = [_span(given[at]) for at in rows]
    summed = [at for at in rows if set(_span(given[at]).dims) <= set(contracted[at])]
    if summed:
        return _sum_of_products(op, given, rows, summed, growth)
    if any(set(_span(given[at]).dims) & set(contracted[at]) for at in rows):
        return op.unknown(given, op.told("it adds up some dims of rows"))
    moved = {span.moved(_out_dims(op, at)) for at, span in zip(rows, spans, strict=True)}
    if len(moved) > 1:
        return op.mixed(given, "it multiplies rows by other rows")
    return op.rows_at(given, moved.pop(), growth)


def _sum_of_products(
    op: Operation,
    given: Values,
    rows: list[int],
    summed: list[int],
    growth: float | None,
) -> Value:
    """Of a product that adds up the rows."""
    contracted = op.params["dimension_numbers"][0]
    pairs = {tuple(contracted[at].index(d) for d in _span(given[at]).dims) for at in summed}
    if len(summed) < len(rows) or len(pairs) > 1:
        return op.mixed(given, "it multiplies rows by other rows")
    why = first_why(given)
    if not why and any(v.place for v in given):
        why = op.told("each row has a weight by its place")
    return Value(
        Kind.SUM,
        growth,
        why=why,
        assumed=first_assumed(given),
    )


def _out_dims(op: Operation, at: int) -> Dims:
    """Returns where each dim of an operand is in the result; None: nowhere."""
    contracted, batched = op.params["dimension_numbers"]
    num_free = [v.aval.ndim - len(c) - len(b) for v, c, b in zip(op.few.invars, contracted, batched, strict=True)]
    following = len(batched[0]) + (num_free[0] if at else 0)
    places: Dims = []
    for dim in range(op.few.invars[at].aval.ndim):
        if dim in batched[at]:
            places.append(batched[at].index(dim))
        elif dim in contracted[at]:
            places.append(None)
        else:
            places.append(following)
            following += 1
    return places


def _span(value: Value) -> Span:
    assert value.span is not None, "rows have a span"
    return value.span


def solved_triangle(op: Operation, given: Values) -> Value:
    """Of the solution of a triangular system: that of each right side is its own."""
    matrix, sides = given
    ndim = op.few.invars[1].aval.ndim
    mixed = ndim - 2 if op.params["left_side"] else ndim - 1
    is_batched = matrix.is_free or _span(matrix).last < ndim - 2
    if is_batched and not (sides.span and mixed in sides.span.dims):
        return elementwise(op, given)
    return op.mixed(given, "it solves for several rows together")


def convolved(op: Operation, given: Values) -> Value:
    """Of a convolution: rows are its batch."""
    x, kernel = given
    numbers = op.params["dimension_numbers"]
    batch = numbers.lhs_spec[0]
    of_batch = x.span is not None and x.span.first == x.span.last == batch
    growth = product_of_growths(x.growth, kernel.growth)
    if not of_batch or not kernel.is_free or op.params["batch_group_count"] > 1 or growth is None:
        return op.unknown(given, op.told("a convolution along rows"))
    return op.rows_at(given, _span(x).at([numbers.out_spec[0]]), growth)


def by_batch(op: Operation, given: Values) -> list[Value]:
    """Of a kernel whose first dim is a batch, such as cuDNN's attention."""
    spans = {v.span for v in given if v.span}
    is_batch = spans == {Span(0, 0)} and all(v.kind <= Kind.ROWS for v in given)
    if not is_batch:
        return [elementwise(op, given, at) for at in range(op.num_outputs)]
    return [op.rows_at(given, Span(0, 0)) for _ in range(op.num_outputs)]


# Indices --------------------------------------------------------------------------------------


def gathered(op: Operation, given: Values) -> Value:
    """Of slices of an array, one at each index."""
    x, index = given[:2]
    if x.is_free and index.kind is Kind.ROWS:
        return op.rows_at(given, _span_of_index(op, index), x.growth)
    if x.kind is Kind.SUM and index.is_free and not index.place:
        return x
    if x.kind is not Kind.ROWS or index.kind > Kind.ROWS or _span(x).first < 0:
        return elementwise(op, given)
    numbers, dims = (
        op.params["dimension_numbers"],
        set(_span(x).dims),
    )
    if dims & set(numbers.start_index_map) and op.params["slice_sizes"][_span(x).first] == 1:
        return _gathered_rows(op, x, index)
    if dims <= set(numbers.operand_batching_dims):
        return _gathered_in_rows(op, x, index)
    if index.kind is Kind.ROWS:
        return op.unknown(given, op.told("rows choose of rows"))
    return op.rows_at(given, _span_of_slices(op, _span(x)), x.growth)


def _of_index(op: Operation) -> list[int]:
    """Returns the dims of the result that are those of the indices."""
    ndim = op.few.outvars[0].aval.ndim
    return [d for d in range(ndim) if d not in op.params["dimension_numbers"].offset_dims]


def _span_of_index(op: Operation, index: Value) -> Span | None:
    """Returns where the rows of indices are in the result."""
    dims = _of_index(op)
    return index.span.moved(dims) if index.span and index.span.last < len(dims) else None


def _gathered_rows(op: Operation, x: Value, index: Value) -> Value:
    """Of rows at indices: each row at its own index is what it was."""
    span = _span(x)
    if index.place is Place.INDEX and span == Span(span.first, span.first):
        return replace(
            op.unknown([replace(x, span=None)]),
            why=x.why or index.why,
        )
    if index.is_free:
        return op.mixed([x, index], "it reads one row")
    return op.unknown([x, index], op.told("it moves rows"))


def _gathered_in_rows(op: Operation, x: Value, index: Value) -> Value:
    """Of elements of each row, at indices of the same row."""
    numbers, dims = (
        op.params["dimension_numbers"],
        _of_index(op),
    )
    pairs = zip(
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
        strict=True,
    )
    of_dim = {operand: dims[start] for operand, start in pairs}
    span = _span(x).at([of_dim[d] for d in _span(x).dims])
    if _span_of_index(op, index) not in (None, span):
        return op.mixed([x, index], "it pairs rows with other rows")
    return op.rows_at([x, index], span, x.growth)


def _span_of_slices(op: Operation, span: Span) -> Span | None:
    """Returns where rows are in slices that have all of them."""
    numbers = op.params["dimension_numbers"]
    gone = (
        *numbers.collapsed_slice_dims,
        *numbers.operand_batching_dims,
    )
    kept = [d for d in range(op.few.invars[0].aval.ndim) if d not in gone]
    if not set(span.dims) <= set(kept):
        return None
    return span.at([numbers.offset_dims[kept.index(d)] for d in span.dims])


def scattered(op: Operation, given: Values) -> Value:
    """Of an array with slices written at indices, or added there."""
    x, index, updates = given
    if index.kind > Kind.ROWS or all(v.is_free for v in given):
        return elementwise(op, given)
    dims = op.varying_out()
    if not dims:
        return _scattered_without_rows(op, x, index, updates)
    by_index = set(dims) & set(op.params["dimension_numbers"].scatter_dims_to_operand_dims)
    if by_index and index.place is not Place.INDEX:
        return op.unknown(given, op.told("it puts rows in another order"))
    span = x.span or span_of_shape(op.out_shapes()[0], dims, op.rows)
    if updates.kind < Kind.SUM:
        others = [x, updates, index] if index.why else [x, updates]
        return op.rows_at(others, span)
    return joined(op, [x, updates])


def _scattered_without_rows(op: Operation, x: Value, index: Value, updates: Value) -> Value:
    adds = op.name in ADDS
    if Kind.ROWS not in (index.kind, updates.kind):
        return joined(op, [x, updates], adds=adds)
    if not adds or updates.kind > Kind.ROWS:
        return op.mixed(
            [x, index, updates],
            "it keeps what the last of some rows writes",
        )
    total = Value(
        Kind.SUM,
        updates.growth,
        why=updates.why or index.why,
    )
    return joined(op, [x, total], adds=True)


def sliced_at(op: Operation, given: Values) -> Value:
    """Of a slice from indices that are values."""
    x, *indices = given
    if not all(v.is_free for v in indices):
        return elementwise(
            op,
            [x, *(replace(v, growth=1.0) for v in indices)],
        )
    made = sliced(op, [x])
    if made.kind is x.kind or all(v.number for v in indices):
        return made
    return op.unknown(given, op.told("it takes some rows"))


def updated_at(op: Operation, given: Values) -> Value:
    """Of an array with a slice written from indices that are values."""
    x, update, *indices = given
    (few, _), (few_update, _) = (
        op.in_shapes(0),
        op.in_shapes(1),
    )
    dims: Any = update.span.dims if update.span else ()
    if not all(d < 0 or few[d] == few_update[d] for d in dims):
        return op.mixed(given, "it writes some rows")
    return joined(
        op,
        [x, update, *(v for v in indices if not v.is_free)],
    )
