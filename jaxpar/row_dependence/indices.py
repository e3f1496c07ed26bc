"""The rules of products of matrices, of convolutions, and of reads and writes at indices."""

from collections.abc import Sequence
from dataclasses import replace

from jaxpar.row_dependence.elements import (
    elementwise,
    joined,
)
from jaxpar.row_dependence.operation import (
    Operation,
    span_of_shape,
)
from jaxpar.row_dependence.parts import sliced
from jaxpar.row_dependence.values import (
    MOVED,
    NONE,
    PUT_IN_ORDER,
    SOME_ALONE,
    SOME_OTHERWISE,
    TAKEN,
    TORN,
    WEIGHT_BY_PLACE,
    ZERO,
    Kind,
    Place,
    Span,
    Value,
    Values,
    first_assumed,
    first_why,
    product_of_growths,
    same_growth,
)

ADDS = ("scatter-add", "scatter-sub")
Dims = list[int | None]

# Products -------------------------------------------------------------------------------------


def multiplied_matrices(op: Operation, given: Values) -> Value:
    """Of a product of matrices, with any dims contracted and any batched."""
    a, b = given
    if a.is_zero or b.is_zero:
        return ZERO
    growth = product_of_growths(a.growth, b.growth)
    loops = {v.span for v in given if v.in_loop}
    if loops and all(v.is_free or v.in_loop for v in given):
        return _product_in_loop(op, given, growth)
    if loops or max(a.kind, b.kind) > Kind.ROWS:
        return _product_with_sums(op, given, growth)
    if not a.is_free or not b.is_free:
        return _product_of_rows(op, given, growth)
    has_place = max(a.place, b.place)
    place = Place.OTHER if has_place and op.varying_out() else Place.NONE
    growth = _contracted_growth(op, given, growth)
    return Value(growth=growth, place=place)


def _contracted_growth(op: Operation, given: Values, growth: float | None) -> float | None:
    """Returns the growth of a product of which dims are added up that are longer for more rows, and hold none."""
    (contracted, others), _ = op.params["dimension_numbers"]
    dims = [
        d
        for d, other in zip(contracted, others, strict=True)
        if not _holds_rows(given[0], d) and not _holds_rows(given[1], other)
    ]
    more = op.growth_of_size(0, dims)
    if more != 1 and any(v.is_free and v.place for v in given):
        return None
    return product_of_growths(growth, more)


def _holds_rows(value: Value, dim: int) -> bool:
    return value.kind is Kind.ROWS and dim in value.rows.dims


def _product_in_loop(op: Operation, given: Values, growth: float | None) -> Value:
    """Of one row of a loop, and of what belongs to it."""
    spans = {v.span for v in given if v.span}
    if len(spans) > 1:
        return op.unknown(
            given,
            op.told("a loop over rows multiplies them by others"),
        )
    return op.rows_at(given, spans.pop(), growth)


def _product_with_sums(op: Operation, given: Values, growth: float | None) -> Value:
    kinds = {v.kind for v in given}
    has_place = any(v.place for v in given)
    if kinds == {Kind.FREE, Kind.SUM} and not has_place:
        of_rows = max(given, key=lambda v: v.kind)
        growth = _contracted_growth(op, given, growth)
        return replace(of_rows, growth=growth)
    if max(kinds) is Kind.ROWS:
        return op.unknown(
            given,
            op.told("a loop over rows multiplies them by others"),
        )
    return elementwise(op, given)


def _product_of_rows(op: Operation, given: Values, growth: float | None) -> Value:
    contracted, _ = op.params["dimension_numbers"]
    growth = _contracted_growth(op, given, growth)
    moved, summed, num_torn = set(), [], 0
    for at, value in enumerate(given):
        if value.kind is not Kind.ROWS:
            continue
        dims = set(value.rows.dims)
        gone = dims & set(contracted[at])
        if gone == dims:
            places = [contracted[at].index(d) for d in value.rows.dims]
            summed.append((tuple(places), value.rows._replace(first=0, last=0)))
        elif gone:
            num_torn += 1
        else:
            moved.add(value.rows.moved(_out_dims(op, at)))
    if summed:
        are_pairs = len(set(summed)) == 1 and not moved and not num_torn
        return _sum_of_products(op, given, growth, are_pairs=are_pairs)
    if num_torn:
        return op.unknown(given, first_why(given) or op.told(TORN))
    if len(moved) > 1:
        return op.mixed(given, "it multiplies rows by other rows")
    made = op.rows_at(given, moved.pop(), growth)
    if made.why or not _differs_by_part(op, given, made):
        return made
    return replace(made, place=Place.OTHER, why=op.told(SOME_OTHERWISE))


def _differs_by_part(op: Operation, given: Values, made: Value) -> bool:
    """Whether rows are multiplied by other params in each half of them, or in each other part."""
    parts = op.leading_dims(made.rows)
    of_free = [at for at, value in enumerate(given) if value.is_free]
    dims_of = lambda at: {d: to for d, to in enumerate(_out_dims(op, at)) if to in parts}
    return any(not given[at].copies.issuperset(dims_of(at)) for at in of_free)


def _sum_of_products(
    op: Operation,
    given: Values,
    growth: float | None,
    *,
    are_pairs: bool,
) -> Value:
    """Of a product that adds up the rows."""
    if not are_pairs:
        return op.mixed(given, "it multiplies rows by other rows")
    why = first_why(given)
    has_place = any(v.place for v in given)
    if has_place and not why:
        why = op.told(WEIGHT_BY_PLACE)
    if any(v.span and v.span.part for v in given):
        return Value(Kind.UNKNOWN, None, why=why or op.told(SOME_ALONE))
    if any(_sums_parts(op, given, at) for at in (0, 1)):
        return Value(Kind.UNKNOWN, None, why=why or op.told(WEIGHT_BY_PLACE))
    assumed = first_assumed(given)
    return Value(Kind.SUM, growth, why=why, assumed=assumed)


def _sums_parts(op: Operation, given: Values, at: int) -> bool:
    """Whether rows are added up with a factor that is another one for each half of them, or for each other part."""
    value, other = given[at], given[1 - at]
    if value.kind is not Kind.ROWS or not other.is_free:
        return False
    contracted, _ = op.params["dimension_numbers"]
    few, _ = op.in_shapes(at)
    varying = op.varying_in(at)
    parts = [d for d in value.rows.dims if varying and d < varying[0] and few[d] > 1]
    factors = [contracted[1 - at][contracted[at].index(d)] for d in parts]
    return not other.copies.issuperset(factors)


def _out_dims(op: Operation, at: int) -> Dims:
    """Returns where each dim of an operand is in the result; None: nowhere."""
    contracted, batched = op.params["dimension_numbers"]
    following = len(batched[0])
    if at == 1:
        following += op.ndim_in(0) - len(contracted[0]) - len(batched[0])
    places: Dims = []
    for dim in range(op.ndim_in(at)):
        if dim in batched[at]:
            places.append(batched[at].index(dim))
        elif dim in contracted[at]:
            places.append(None)
        else:
            places.append(following)
            following += 1
    return places


def solved_triangle(op: Operation, given: Values) -> Value:
    """Of the solution of a triangular system: that of each right side is its own."""
    matrix, sides = given
    ndim = op.ndim_in(1)
    mixed = ndim - 2 if op.params["left_side"] else ndim - 1
    is_batched = matrix.is_free or matrix.rows.last < ndim - 2
    mixes = sides.span is not None and mixed in sides.span.dims
    if mixes or not is_batched:
        return op.mixed(given, "it solves for several rows together")
    return elementwise(op, given)


def convolved(op: Operation, given: Values) -> Value:
    """Of a convolution: rows are its batch."""
    x, kernel = given
    numbers = op.params["dimension_numbers"]
    batch = numbers.lhs_spec[0]
    growth = product_of_growths(x.growth, kernel.growth)
    of_batch = x.span is not None and list(x.span.dims) == [batch]
    is_plain = kernel.is_free and op.params["batch_group_count"] == 1
    if not of_batch or not is_plain or growth is None:
        return op.unknown(given, op.told("a convolution along rows"))
    out = numbers.out_spec[0]
    return op.rows_at(given, x.rows.at([out]), growth)


def by_batch(op: Operation, given: Values) -> list[Value]:
    """Of a kernel whose first dim is a batch, such as cuDNN's attention."""
    first = Span(0, 0)
    results = range(op.num_outputs)
    spans = {v.span for v in given if v.span}
    kind = max(v.kind for v in given)
    is_even = all(v.growth == 1 for v in given)
    queries, keys = given[:2]
    if queries.kind is keys.kind is Kind.ROWS and spans != {first}:
        return [op.mixed(given, "it multiplies rows by other rows", at) for at in results]
    if spans == {first} and kind is Kind.ROWS and is_even:
        return [op.rows_at(given, first) for _ in results]
    return [elementwise(op, given, at) for at in results]


# Indices --------------------------------------------------------------------------------------


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
    return op.rows_at([x, index], span, x.growth)


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
    if index.kind > Kind.ROWS or all(v.is_free for v in given):
        return elementwise(op, given)
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
    own = updates.span._replace(first=span.first, last=span.last) if updates.span else span
    if own != span:
        return op.mixed([x, updates], "it writes rows into others")
    others = [x, updates, index] if index.why else [x, updates]
    growths = [v.growth for v in (x, updates) if not v.is_zero]
    growth = growths[0] if growths else 1.0
    if not all(same_growth(growth, each) for each in growths):
        what = "it writes into rows what depends on their number"
        return op.mixed(others, what)
    return op.rows_at(others, span, growth)


def _writes_in_rows(op: Operation, dims: Sequence[int]) -> bool:
    """Whether the index of each row writes into that row, since both have the dim of a batch."""
    return set(dims) <= set(op.params["dimension_numbers"].operand_batching_dims)


def _scattered_without_rows(op: Operation, x: Value, index: Value, updates: Value) -> Value:
    adds = op.name in ADDS
    if Kind.ROWS not in (index.kind, updates.kind):
        return joined(op, [x, updates], adds=adds)
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
        return made
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
    chosen = [v for v in indices if not v.is_free]
    return joined(op, [x, update, *chosen])
