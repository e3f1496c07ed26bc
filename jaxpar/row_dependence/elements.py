"""The rules of operations on each element: sums, products, choices and functions of numbers."""

import math
from dataclasses import replace

from jaxpar.row_dependence.operation import Operation
from jaxpar.row_dependence.values import (
    CARRIED,
    NONE,
    SOME_OTHERWISE,
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

_CANCELS = "a maximum over rows is taken to cancel"
_SMALL = 1e-4  # a number below it that is added to a sum, against a division by zero, is taken to be none


def elementwise(op: Operation, given: Values, at: int = 0) -> Value:
    """Of a function of the elements at the same place."""
    kinds = {v.kind for v in given}
    spans = {v.span for v in given if v.span}
    if kinds == {Kind.FREE}:
        return op.free(given, at)
    if kinds & {Kind.UNKNOWN, Kind.MIXED}:
        return op.unknown(given, first_why(given), at)
    if Kind.SUM in kinds:
        return op.mixed(
            given,
            "it makes of a sum over rows what is no sum over rows",
            at,
        )
    if len(spans) > 1 or _is_spread(op, given, at):
        return op.mixed(given, "it makes one row of several", at)
    if any(v.growth != 1 for v in given):
        what = "each row depends on the number of rows"
        return op.mixed(given, what, at, is_sure=op.reads_floats())
    span = spans.pop()
    made = op.rows_at(given, span, at=at)
    if made.why or not _differs_by_part(op, given, span, at):
        return made
    return replace(made, place=Place.OTHER, why=op.told(SOME_OTHERWISE))


def _differs_by_part(op: Operation, given: Values, span: Span, at: int) -> bool:
    """Whether what depends on no row is another element for each half of the rows, or for each other part."""
    parts = op.leading_dims(span, at)
    return any(v.is_free and not parts <= v.copies for v in given)


def drawn(op: Operation, given: Values) -> Value:
    """Of random numbers by keys of rows.

    With keys of XLA's generator JAX draws those of all rows at once, from the key of the first. Only unsafe_rbg splits by it.
    """
    made = elementwise(op, given)
    kind = str(op.few.invars[0].aval.dtype)
    draws = op.name in ("random_bits", "random_gamma")
    if made.kind is not Kind.ROWS or not ("urbg" in kind or (draws and "rbg" in kind)):
        return made
    why = op.told(
        f"the numbers of a row depend on its microbatch, since its {kind} does not give them alone"
    )
    return replace(made, place=Place.OTHER, why=made.why or why)


def _is_spread(op: Operation, given: Values, at: int) -> bool:
    """Whether one row meets many: JAX broadcasts dims of size 1."""
    varying = set(op.varying_out(at))
    spans = [v.span for v in given if v.span]
    for span in spans:
        counts = {stop - start for start, stop in span.part}
        if len(counts) == 1 and varying & set(span.dims):
            return True
    return False


def unchanged(op: Operation, given: Values) -> list[Value]:
    """Of an operation that returns its operands."""
    return list(given[: op.num_outputs])


def last(op: Operation, given: Values) -> Value:
    """Of an operation that returns its last operand."""
    return given[-1]


def believed(op: Operation, given: Values) -> list[Value]:
    """Of a function that JAX calls on the host and cannot read: its author knows that it gets some of the rows."""
    why = first_why(given)
    results = range(op.num_outputs)
    return [op.unknown(given, why, at) for at in results]


# Sums and choices -----------------------------------------------------------------------------


def added(op: Operation, given: Values) -> Value:
    """Of a sum or difference of two values."""
    a, b = given
    subtracts = op.name == "sub"
    if subtracts and b.running:
        return op.mixed(given, CARRIED)
    is_maximum = b.kind is Kind.MIXED and b.is_bound
    if subtracts and is_maximum and a.kind is Kind.ROWS:
        bound = Value(assumed=op.told(_CANCELS))
        return op.rows_at([a, bound], a.span, a.growth)
    return joined(op, given, adds=True)


def joined(
    op: Operation,
    given: Values,
    at: int = 0,
    *,
    adds: bool = False,
) -> Value:
    """Of a value each of whose elements is one of the operands', or with ``adds`` their sum."""
    terms = [v for v in given if not v.is_zero]
    if not terms:
        return given[0] if given else Value()
    if not adds and len(terms) < len(given) and any(v.running for v in terms):
        return op.mixed(given, CARRIED, at)  # it begins anew
    kinds = {v.kind for v in terms}
    growth = terms[0].growth
    is_even = all(same_growth(growth, v.growth) for v in terms)
    if kinds == {Kind.FREE}:
        return _joined_constants(op, terms, at, is_even=is_even)
    if kinds & {Kind.UNKNOWN, Kind.MIXED}:
        return op.unknown(terms, first_why(terms), at)
    if Kind.SUM in kinds:
        return _joined_sums(op, terms, at, adds=adds, is_even=is_even)
    if not is_even:
        return op.mixed(
            terms,
            "it adds rows and what depends on their number",
            at,
        )
    made = elementwise(op, _without_growth(terms), at)
    return with_growth(made, growth)


def _joined_constants(op: Operation, terms: Values, at: int, *, is_even: bool) -> Value:
    made = op.free(_without_growth(terms), at)
    if is_even:
        return replace(made, growth=terms[0].growth)
    is_index = made.place and not op.is_float(at)
    return replace(made, growth=1.0 if is_index else None)


def _joined_sums(
    op: Operation,
    terms: Values,
    at: int,
    *,
    adds: bool,
    is_even: bool,
) -> Value:
    """Of terms one of which is a sum over rows: the others must be sums too, or as large as sums are."""
    sums = [v for v in terms if v.kind is Kind.SUM]
    why = first_why(terms)
    assumed = first_assumed(terms)
    first = replace(sums[0], why=why, assumed=assumed)
    if running := {v.running for v in sums if v.running}:
        return _joined_running(op, terms, at, first, adds=adds and is_even, slots=running)
    if any(v.kind is Kind.ROWS for v in terms):
        return op.mixed(terms, "a sum over rows reaches each row", at)
    constants = [v for v in terms if v.is_free]
    once = [v for v in constants if not op.is_like_a_sum(v, first)]
    if once and all(map(_is_small, once)):
        return replace(
            first,
            assumed=op.told("a small number is added to a sum over rows"),
        )
    if any(v.growth is None for v in terms) or (once and not adds):
        return Value(
            Kind.UNKNOWN,
            None,
            why=op.told("a number beside a sum over rows"),
        )
    if once or not all(same_growth(first.growth, v.growth) for v in sums):
        return op.mixed(
            terms,
            "it adds to a sum over rows what is none, such as a mean or a number",
            at,
        )
    return first


def _joined_running(
    op: Operation,
    terms: Values,
    at: int,
    first: Value,
    *,
    adds: bool,
    slots: set[int],
) -> Value:
    """Of what a loop over rows carries and of a term of each trip, or of cases that all are such sums."""
    own = [v for v in terms if v.running]
    of_trip = all(v.span is None or v.in_loop for v in terms)
    is_sum = adds and len(own) == 1 and of_trip
    is_case = not adds and len(own) == len(terms)
    if len(slots) == 1 and (is_sum or is_case):
        by_place = any(v.place for v in terms)
        why = first.why or (op.told(WEIGHT_BY_PLACE) if by_place else NONE)
        return replace(first, running=slots.pop(), why=why)
    return op.mixed(terms, CARRIED, at)


def _is_small(value: Value) -> bool:
    return value.number is not None and abs(value.number[0]) < _SMALL


def chosen(op: Operation, given: Values, at: int = 0) -> Value:
    """Of a condition that chooses between cases."""
    condition, *cases = given
    if op.name == "select_n" and condition.number and len(set(condition.number)) == 1:
        return cases[int(condition.number[0])]
    if condition.kind is Kind.MIXED and not condition.is_bound:
        return condition
    numbers = [v for v in cases if not _is_nan(v)]
    is_told = (condition.is_free and not condition.place) or condition.is_of_any
    if len(numbers) == 1 and condition.kind is not Kind.ROWS and is_told:
        return numbers[0]  # a loss that is NaN tells itself; the median is, if any element is
    in_doubt = condition.why and condition.kind is not Kind.MIXED
    if in_doubt or condition.kind in (Kind.SUM, Kind.UNKNOWN):
        is_of_device = op.axis and condition.kind is Kind.UNKNOWN  # such as by its number
        why = condition.why or (NONE if is_of_device else op.told("a condition on a sum over rows"))
        values = [_at_most_unknown(v) for v in given]
        return op.unknown(values, why, at)
    made = joined(op, cases, at)
    if condition.is_free and condition.growth != 1 and (op.is_float(at) or not made.place):
        why = made.why or op.told("which case is chosen depends on the number of rows")
        return replace(made, why=why, growth=None if made.is_free else made.growth)
    if condition.is_free and condition.place:
        return _by_place(op, made, given, at)
    if condition.is_free:
        is_by_part = made.kind is Kind.ROWS and _differs_by_part(op, [condition], made.rows, at)
        return replace(made, why=made.why or op.told(SOME_OTHERWISE)) if is_by_part else made
    if condition.kind is Kind.ROWS and made.running:
        return made
    both = elementwise(op, [condition, with_growth(made, 1.0)], at)
    if both.kind is Kind.ROWS:
        return with_growth(both, made.growth)
    return both


def _by_place(op: Operation, made: Value, given: Values, at: int) -> Value:
    """Of a case that is chosen by the place of each row, such as by a mask that is drawn from one key."""
    condition, *cases = given
    if made.kind is Kind.ROWS:
        return op.rows_at([condition, made], made.span, made.growth, at)
    if made.kind is Kind.SUM:
        why = made.why or op.told("each row has a weight by its place")
        return replace(made, why=why)
    # An index below 0 counts from the end: JAX chooses between it and its sum with the number of rows.
    places = {case.place for case in cases}
    is_index = Place.INDEX in places and Place.OTHER not in places
    return replace(made, place=Place.INDEX if is_index else Place.OTHER) if made.is_free else made


def _is_nan(value: Value) -> bool:
    return value.number is not None and math.isnan(value.number[0])


def _at_most_unknown(value: Value) -> Value:
    if value.kind is Kind.MIXED:
        return replace(value, kind=Kind.UNKNOWN)
    return value


def largest(op: Operation, given: Values) -> Value:
    """Of the larger of two values: a weight is often kept from being 0."""
    sums = [v for v in given if v.kind is Kind.SUM]
    numbers = [v.number[0] for v in given if v.number]
    bounds = [number for number in numbers if 0 <= number <= 1]
    if len(sums) == len(bounds) == 1:
        return replace(
            sums[0],
            assumed=op.told("a sum over rows is kept from 0"),
        )
    return elementwise(op, given)


_OF_CONDITIONS = ("reduce_or", "reduce_and", "or", "and", "not")
_OF_SHAPES = ("broadcast_in_dim", "reshape", "squeeze")


def with_conditions(op: Operation, given: Values, made: list[Value]) -> list[Value]:
    """Returns the results of an operation; conditions of some row, and tests for NaN, are marked as such."""
    is_itself = op.name == "ne" and op.few.invars[0] is op.few.invars[1]
    is_test = is_itself or op.name == "is_finite"
    is_of_rows = op.name in ("reduce_or", "reduce_and") and given[0].kind is Kind.ROWS
    goes_on = op.name in (*_OF_CONDITIONS, *_OF_SHAPES) and any(v.is_of_any for v in given)
    if not (is_test or is_of_rows or goes_on):
        return made
    return [replace(value, is_of_any=True) for value in made]


# Products -------------------------------------------------------------------------------------


def multiplied(op: Operation, given: Values) -> Value:
    """Of a product."""
    a, b = given
    if a.is_free:
        a, b = b, a
    return _scaled(op, a, b)


def divided(op: Operation, given: Values) -> Value:
    """Of a quotient."""
    a, b = given
    if a.kind is Kind.SUM and not op.is_float() and b.number != (1, 1):
        return elementwise(op, given)  # a quotient of integers is cut
    return _scaled(op, a, b, power=-1)


def _scaled(op: Operation, a: Value, b: Value, power: int = 1) -> Value:
    if a.is_zero or (b.is_zero and power > 0):
        return ZERO
    growth = product_of_growths(a.growth, b.growth, power)
    if a.kind is Kind.SUM and b.is_free and not b.place:
        if a.running and b.number != (1, 1):
            return op.mixed([a, b], CARRIED)
        assumed = first_assumed([a, b])
        return replace(a, growth=growth, why=first_why([a, b]), assumed=assumed)
    kinds = {a.kind, b.kind}
    of_rows = kinds <= {Kind.FREE, Kind.ROWS}
    if of_rows and (b.is_free or power > 0):
        made = elementwise(op, _without_growth([a, b]))
        return with_growth(made, growth)
    return elementwise(op, [a, b])


def with_growth(value: Value, growth: float | None) -> Value:
    """Returns a value with another factor, if it is one for which that is known."""
    if value.kind in (Kind.FREE, Kind.ROWS):
        return replace(value, growth=growth)
    return value


def _without_growth(values: Values) -> list[Value]:
    return [replace(v, growth=1.0) for v in values]


# Functions ------------------------------------------------------------------------------------


def rooted(op: Operation, given: Values) -> Value:
    """Of a square root: its square is a sum over rows again."""
    made = elementwise(op, given)
    is_root = made.kind is Kind.MIXED and given[0].kind is Kind.SUM
    return replace(made, root_of=given[0]) if is_root else made


def squared(op: Operation, given: Values) -> Value:
    """Of a power of an integer."""
    is_square = op.params.get("y", 2) == 2
    root_of = given[0].root_of
    if is_square and root_of is not None:
        return root_of
    return elementwise(op, given)


def stopped(op: Operation, given: Values) -> Value:
    """Of a value whose gradient is stopped: a maximum is then one that shifts what is exponentiated."""
    if given[0].is_bound:
        return Value(is_bound=True, assumed=op.told(_CANCELS))
    return given[0]


def converted(op: Operation, given: Values) -> Value:
    """Of another dtype: a number is cut where it becomes an integer."""
    (value,) = given
    becomes_bool = op.few.outvars[0].aval.dtype == bool and not _is_bool(op)
    if becomes_bool or (op.reads_floats() and not op.is_float()):
        return elementwise(op, given)
    if value.kind is Kind.ROWS:
        return op.rows_at(given, value.span, value.growth)
    return value


def _is_bool(op: Operation) -> bool:
    return op.few.invars[0].aval.dtype == bool
