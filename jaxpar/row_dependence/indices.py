"""The rules of reads and writes at indices."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from jaxpar.row_dependence.elements import (
    elementwise,
    joined,
    with_growth,
)
from jaxpar.row_dependence.operation import (
    Operation,
    span_of_shape,
)
from jaxpar.row_dependence.parts import sliced
from jaxpar.row_dependence.values import (
    CARRIED,
    MOVED,
    NONE,
    PUT_IN_ORDER,
    SOME_ALONE,
    SOME_OTHERWISE,
    TAKEN,
    WEIGHT_BY_PLACE,
    Kind,
    Place,
    Span,
    Value,
    Values,
    same_growth,
)

ADDS = ("scatter-add", "scatter-sub")


def gathered(op: Operation, given: Values) -> Value:
    """Of slices of an array, one at each index."""
    x, index = given[:2]
    if x.is_free and index.kind is Kind.ROWS:
        return _gathered_by_rows(op, x, index)
    if x.kind is Kind.SUM and index.is_free and not index.place:
        return x
    if x.kind is not Kind.ROWS or index.kind > Kind.ROWS or x.rows.first < 0:
        return elementwise(op, given)
    numbers = op.params["dimension_numbers"]
    dims = set(x.rows.dims)
    sizes, sizes_of_many = op.both("slice_sizes")
    size = max(sizes[x.rows.first], sizes_of_many[x.rows.first])
    whole, whole_of_many = op.in_shapes(0)
    if size == 1 and dims & set(numbers.start_index_map):
        return _gathered_rows(op, x, index)
    if dims <= set(numbers.operand_batching_dims):
        return _gathered_in_rows(op, x, index)
    if index.kind is Kind.ROWS:
        return op.unknown(given, op.told("rows choose of rows"))
    if any(sizes[d] != whole[d] or sizes_of_many[d] != whole_of_many[d] for d in dims):
        return op.unknown(given, op.told(TAKEN))
    span = _span_of_slices(op, x.rows)
    return op.rows_at(given, span, x.growth)


def _gathered_by_rows(op: Operation, x: Value, index: Value) -> Value:
    """Of elements of what depends on no row, at indices of rows."""
    if index.growth != 1:
        what = "each row depends on the number of rows"
        return op.mixed([x, index], what, is_sure=op.is_float())
    made = op.rows_at([x, index], _span_of_index(op, index), x.growth)
    batch = op.params["dimension_numbers"].operand_batching_dims
    is_by_part = index.rows.first < index.rows.last and not x.copies.issuperset(batch)
    if made.why or not is_by_part:
        return made
    return replace(made, place=Place.OTHER, why=op.told(SOME_OTHERWISE))


def _of_index(op: Operation) -> list[int]:
    """Returns the dims of the result that are those of the indices."""
    ndim = op.few.outvars[0].aval.ndim
    of_slices = op.params["dimension_numbers"].offset_dims
    return [d for d in range(ndim) if d not in of_slices]


def _span_of_index(op: Operation, index: Value) -> Span | None:
    """Returns where the rows of indices are in the result."""
    dims = _of_index(op)
    if index.span is None or index.span.last >= len(dims):
        return None
    return index.span.moved(dims)


def _gathered_rows(op: Operation, x: Value, index: Value) -> Value:
    """Of rows at indices: each row at its own index is what it was."""
    span = x.rows
    is_plain = span == Span(span.first, span.first)
    if is_plain and index.place is Place.INDEX and _has_each(op, [span.first]):
        made = op.unknown([replace(x, span=None)])
        return replace(made, why=x.why or index.why)
    if index.is_free:
        what = "it reads rows at other places" if index.place else "it reads one row"
        return op.mixed([x, index], what)
    return op.unknown([x, index], op.told(MOVED))


def _has_each(op: Operation, dims: Sequence[int]) -> bool:
    """Whether there are as many indices as the operand has rows, along these dims."""
    return op.sizes_in(1, op.varying_in(1)) == op.sizes_in(0, dims)


def _gathered_in_rows(op: Operation, x: Value, index: Value) -> Value:
    """Of elements of each row, at indices of the same row."""
    numbers = op.params["dimension_numbers"]
    operand = list(numbers.operand_batching_dims)
    starts = numbers.start_indices_batching_dims
    dims = _of_index(op)
    places = [dims[starts[operand.index(d)]] for d in x.rows.dims]
    span = x.rows.at(places)
    if _span_of_index(op, index) not in (None, span):
        return op.mixed([x, index], "it pairs rows with other rows")
    made = op.rows_at([x, index], span, x.growth)
    of_index = {at for at, dim in enumerate(dims) if dim in op.leading_dims(made.rows)}
    if made.why or index.kind is Kind.ROWS or index.copies.issuperset(of_index):
        return made
    return replace(made, place=Place.OTHER, why=op.told(SOME_OTHERWISE))


def _span_of_slices(op: Operation, span: Span) -> Span | None:
    """Returns where rows are in slices that have all of them."""
    numbers = op.params["dimension_numbers"]
    gone = {
        *numbers.collapsed_slice_dims,
        *numbers.operand_batching_dims,
    }
    kept = [d for d in range(op.ndim_in(0)) if d not in gone]
    if gone & set(span.dims):
        return None
    places = [numbers.offset_dims[kept.index(d)] for d in span.dims]
    return span.at(places)


def scattered(op: Operation, given: Values) -> Value:
    """Of an array with slices written at indices, or added there."""
    x, index, updates = given
    if op.name == "scatter-mul" and updates.growth != 1:
        return elementwise(op, given)
    if index.kind > Kind.ROWS or all(v.is_free for v in given):
        return elementwise(op, given)
    if updates.running:
        return op.mixed([x, updates], CARRIED)
    of_rows = [v for v in given if v.span]
    if of_rows and all(v.in_loop for v in of_rows):
        return _scattered_in_loop(op, x, index, updates)
    dims = op.varying_out()
    if not dims:
        return _scattered_without_rows(op, x, index, updates)
    numbers = op.params["dimension_numbers"]
    by_index = set(dims) & set(numbers.scatter_dims_to_operand_dims)
    if by_index and index.place is not Place.INDEX:
        return op.unknown(given, op.told(PUT_IN_ORDER))
    if by_index and not _has_each(op, sorted(by_index)):
        return op.unknown(given, op.told("it writes some rows"))
    if index.kind is Kind.ROWS and not by_index and not _writes_in_rows(op, dims):
        return op.unknown(given, op.told("each row chooses where all rows are written"))
    if updates.kind is Kind.SUM:
        return joined(op, [x, updates])
    few, _ = op.out_shapes()
    span = x.span or span_of_shape(few, dims, op.rows)
    own = updates.span and updates.span._replace(first=span.first, last=span.last)
    if own not in (None, span):
        return op.mixed([x, updates], "it writes rows into others")
    others = [x, updates]
    if index.why or not by_index:  # else each row is written at its own index
        others.append(index)
    growths = [v.growth for v in (x, updates) if not v.is_zero]
    growth = growths[0] if growths else 1.0
    if not all(same_growth(growth, each) for each in growths):
        what = "it writes into rows what depends on their number"
        return op.mixed(others, what)
    made = op.rows_at(others, span, growth)
    if made.why or not _writes_by_part(op, given, op.leading_dims(span)):
        return made
    return replace(made, place=Place.OTHER, why=op.told(SOME_OTHERWISE))


def _writes_by_part(op: Operation, given: Values, parts: Collection[int]) -> bool:
    """Whether other elements, or at other indices, are written into each half of the rows, or into each other part."""
    x, index, updates = given
    numbers = op.params["dimension_numbers"]
    if any(d in parts for d in numbers.scatter_dims_to_operand_dims):
        return True
    batch = list(numbers.operand_batching_dims)
    of_index = {d: numbers.scatter_indices_batching_dims[at] for at, d in enumerate(batch)}
    of_window = numbers.update_window_dims
    ndim = op.ndim_in(2)
    of_updates = [d for d in range(ndim) if d not in of_window]
    apart = {*batch, *numbers.inserted_window_dims}
    kept = [d for d in range(op.ndim_in(0)) if d not in apart]
    to_updates = dict(zip(kept, of_window, strict=True))
    to_updates |= {d: of_updates[at] for d, at in of_index.items()}
    dims = (
        (x, parts),
        (index, [of_index[d] for d in parts if d in of_index]),
        (updates, [to_updates[d] for d in parts if d in to_updates]),
    )
    return any(value.is_free and not value.copies.issuperset(own) for value, own in dims)


def _writes_in_rows(op: Operation, dims: Sequence[int]) -> bool:
    """Whether the index of each row writes into that row, since both have the dim of a batch."""
    return set(dims) <= set(op.params["dimension_numbers"].operand_batching_dims)


def _scattered_in_loop(
    op: Operation,
    x: Value,
    index: Value,
    updates: Value,
) -> Value:
    """Of what one row of a loop, or a sum over those so far, has of it: a row's own index writes into that row."""
    if op.name == "scatter-mul":
        return elementwise(op, [x, index, updates])
    written = joined(op, [x, updates], adds=op.name in ADDS)
    made = _at_places(op, written, [index])
    if index.is_free or made.running:
        return replace(made, why=made.why or index.why)
    of_row = elementwise(op, [index, with_growth(made, 1.0)])
    return with_growth(of_row, made.growth)


def _scattered_without_rows(
    op: Operation,
    x: Value,
    index: Value,
    updates: Value,
) -> Value:
    adds = op.name in ADDS
    if Kind.ROWS not in (index.kind, updates.kind):
        return _at_places(op, joined(op, [x, updates], adds=adds), [index])
    if not adds or updates.kind > Kind.ROWS:
        return op.mixed(
            [x, index, updates],
            "it keeps what the last of some rows writes",
        )
    spans = {v.span._replace(first=0, last=0) for v in (index, updates) if v.span}
    if any(span.part for span in spans) or len(spans) > 1:
        return op.unknown([x, index, updates], op.told(SOME_ALONE))
    by_place = any(v.place for v in (index, updates))
    why = op.told(WEIGHT_BY_PLACE) if by_place else NONE
    total = Value(
        Kind.SUM,
        updates.growth,
        why=updates.why or index.why or why,
    )
    return joined(op, [x, total], adds=True)


def sliced_at(op: Operation, given: Values) -> Value:
    """Of a slice from indices that are values."""
    x, *indices = given
    if not all(v.is_free for v in indices):
        plain = [replace(v, growth=1.0) for v in indices]
        return elementwise(op, [x, *plain])
    made = sliced(op, [x])
    are_known = all(v.number for v in indices)
    if made.kind is x.kind or are_known:
        return _at_places(op, made, indices)
    return op.unknown(given, op.told(TAKEN))


def updated_at(op: Operation, given: Values) -> Value:
    """Of an array with a slice written from indices that are values."""
    x, update, *indices = given
    few, _ = op.in_shapes(0)
    few_update, _ = op.in_shapes(1)
    dims = [d for d in update.span.dims if d >= 0] if update.span else []
    if any(few[d] != few_update[d] for d in dims):
        return op.mixed(given, "it writes some rows")
    own = [d for d in x.span.dims if d >= 0] if x.span else []
    if any(few[d] != few_update[d] for d in own):
        return op.unknown(given, op.told("it writes some rows"))
    of_rows = [v for v in indices if not v.is_free]
    of_all = [v for v in indices if v.is_free]
    made = joined(op, [x, update, *of_rows])
    return _at_places(op, made, of_all)


def _at_places(op: Operation, made: Value, indices: Values) -> Value:
    """Returns what is read or written at indices that depend on no row: they may depend on the place of each."""
    place = max((v.place for v in indices), default=Place.NONE)
    if not place:
        return made
    if made.kind is Kind.ROWS:
        return op.rows_at([made, *indices], made.span, made.growth)
    if made.kind is Kind.SUM:
        return replace(made, why=made.why or op.told(WEIGHT_BY_PLACE))
    if not made.is_free or not op.keeps_places():
        return made
    return replace(made, place=Place.OTHER)
