"""The rules of products of matrices, of convolutions, and of kernels of attention."""

from dataclasses import replace

from jaxpar.row_dependence.elements import (
    elementwise,
)
from jaxpar.row_dependence.operation import (
    Operation,
)
from jaxpar.row_dependence.values import (
    SOME_ALONE,
    SOME_OTHERWISE,
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
)

Dims = list[int | None]


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
    return replace(op.free(given), growth=growth, place=place)


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
        assumed = first_assumed(given)
        return replace(of_rows, growth=growth, why=first_why(given), assumed=assumed)
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
            moved.add(value.rows.moved(dims_of_product(op, at)))
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
    dims_of = lambda at: {d: to for d, to in enumerate(dims_of_product(op, at)) if to in parts}
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


def dims_of_product(op: Operation, at: int) -> Dims:
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
    if x.is_free and kernel.is_free and batch in x.copies:
        return replace(op.free(given), growth=growth)
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
