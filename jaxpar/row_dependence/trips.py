"""Loops: what their trips make of values, and those that end once no row goes on.

In such a loop each row keeps what its own trips made, if what goes on also chooses what is changed:

    while any(is_large(h)):                                    goes on while some row is large
        h = jnp.where(is_large(h)[:, None], h / 2, h)          and a row that is not is left as it is

A choice by anything else, such as the number of trips or another bound, lets trips change a row that other rows make.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxpar._compat import Literal, inlined, opened
from jaxpar.row_dependence.elements import chosen, elementwise
from jaxpar.row_dependence.expressions import Expressions
from jaxpar.row_dependence.operation import Operation
from jaxpar.row_dependence.values import CARRIED, TORN, Kind, Place, Value, Values

_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy")
Choice = tuple[int, bool]  # the number of an expression, and whether it is true where a row goes on


@dataclass(frozen=True)
class Trips:
    """The body of such a loop.

    Attributes:
        body: Its jaxpr.
        expressions: Those of the body.
        going_on: What is true of a row of which the loop goes on.
        changed: The ids of the variables that trips change.
    """

    body: Any
    expressions: Expressions
    going_on: frozenset[Choice]
    changed: frozenset[int]

    def keep_rows(self, before: Any, after: Any) -> bool:
        """Whether each row of a value is changed by trips of its own alone.

        Args:
            before: The variable of the value before a trip.
            after: That of the value after it.
        """
        equation = self.expressions.maker(after)
        if equation is None:
            return False
        if equation.primitive.name == "select_n":
            return self._chooses(equation, before)
        given = [at for at, each in enumerate(equation.invars) if each is before]
        if (inner := inlined(equation)) is None or not given:
            return False
        inside, own = self._within(equation, opened(inner))
        to = equation.outvars.index(after)
        return inside.keep_rows(own.invars[given[0]], own.outvars[to])

    def _chooses(self, equation: Any, before: Any) -> bool:
        """Whether a choice between two cases takes the value as it was, for rows that are done."""
        choice, *cases = equation.invars
        is_of_rows = choice.aval.ndim > 0 and id(choice) in self.changed and len(cases) == 2
        if not is_of_rows:
            return False
        kept = [at for at, case in enumerate(cases) if case is before]
        return any(
            self.going_on & _all_of(self.expressions, choice, is_true=at == 0) for at in kept
        )

    def _within(self, equation: Any, inner: Any) -> tuple["Trips", Any]:
        leaves, changed = {}, set()
        for of, own in zip(equation.invars, inner.invars, strict=True):
            plain = _of_any_shape(self.expressions, of)
            leaves[id(own)] = self.expressions.number(plain)
            if id(of) in self.changed:
                changed.add(id(own))
        inside = replace(
            self,
            body=inner,
            expressions=self.expressions.of(inner.eqns, leaves),
            changed=_following(inner, changed),
        )
        return inside, inner


def trips_of(
    op: Operation,
    changed: set[int],
    asked_of: Values,
    carry: Values,
) -> Trips:
    """Returns the body of a loop.

    Args:
        op: The loop, a ``while``.
        changed: The ids of what the body is given that trips change.
        asked_of: The values of what its condition reads beside what it carries.
        carry: Those of what it carries.
    """
    of_condition, of_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    condition, body = opened(op.params["cond_jaxpr"]), opened(op.params["body_jaxpr"])
    of_both = op.few.invars
    outside = lambda of: ("literal", str(of.val)) if isinstance(of, Literal) else id(of)
    carried = [("carried", at) for at in range(len(body.outvars))]
    constants = list(map(outside, of_both[:of_condition]))
    constants_of_body = list(map(outside, of_both[of_condition : of_condition + of_body]))
    expressions = Expressions(body.eqns, _leaves(body, [*constants_of_body, *carried]))
    asked = expressions.of(condition.eqns, _leaves(condition, [*constants, *carried]))
    going_on = _of_some_row(asked, condition.outvars[0], is_true=True)
    trips = Trips(body, expressions, going_on, _following(body, changed))
    read = asked.leaves(condition.outvars[0])
    beside = _read_beside_rows(asked, condition.outvars[0], is_true=True)
    values = zip([*constants, *carried], [*asked_of, *carry], strict=True)
    are_bounds = all(value.is_free for leaf, value in values if leaf in beside)
    is_asked = (at for at, leaf in enumerate(carried) if leaf in read)
    if are_bounds and all(_stays(trips, at, of_body) for at in is_asked):
        return trips
    return replace(trips, going_on=frozenset())


def _read_beside_rows(expressions: Expressions, of: Any, *, is_true: bool) -> set[Hashable]:
    """Returns the leaves of what a condition asks beside that of some row: the number of trips, or another bound."""
    of = _of_any_shape(expressions, of)
    if not _of_some_row(expressions, of, is_true=is_true):
        return expressions.leaves(of)
    equation = expressions.maker(of)
    assert equation is not None, "it asks of some row"
    name, operands = equation.primitive.name, equation.invars
    if name == "not":
        return _read_beside_rows(expressions, operands[0], is_true=not is_true)
    if name == ("and" if is_true else "or"):
        found = (_read_beside_rows(expressions, each, is_true=is_true) for each in operands)
        return set().union(*found)
    return set()


def _stays(
    trips: Trips,
    at: int,
    num_constants: int,
) -> bool:
    """Whether a row that is done stays so by a value that the condition reads: a counter, or what only such rows keep."""
    before = trips.body.invars[num_constants + at]
    after = trips.body.outvars[at]
    is_counter = before.aval.ndim == 0 and jnp.issubdtype(before.aval.dtype, jnp.integer)
    if before is after or is_counter or trips.keep_rows(before, after):
        return True
    equation = trips.expressions.maker(after)
    if equation is None or equation.primitive.name not in ("or", "and"):
        return False
    return any(each is before for each in equation.invars)  # a mask that only grows, or shrinks


def _leaves(jaxpr: Any, names: list[Hashable]) -> dict[int, Hashable]:
    return {id(variable): name for variable, name in zip(jaxpr.invars, names, strict=True)}


def _following(body: Any, changed: set[int]) -> frozenset[int]:
    """Returns the ids of all that is made of what changes."""
    for each in body.eqns:
        if any(id(x) in changed for x in each.invars):
            changed = changed | set(map(id, each.outvars))
    return frozenset(changed)


def _of_any_shape(expressions: Expressions, of: Any) -> Any:
    """Returns what a variable is made of by operations that only change its shape."""
    equation = expressions.maker(of)
    while equation is not None and equation.primitive.name in _SHAPES:
        of = equation.invars[0]
        equation = expressions.maker(of)
    return of


def _of_some_row(expressions: Expressions, of: Any, *, is_true: bool) -> frozenset[Choice]:
    """Returns what is true of some row where a condition is: ``any(a)``, ``not all(b)``, or one of these and others."""
    of = _of_any_shape(expressions, of)
    equation = expressions.maker(of)
    if equation is None:
        return frozenset()
    name, operands = equation.primitive.name, equation.invars
    if name == "not":
        return _of_some_row(expressions, operands[0], is_true=not is_true)
    if name == ("and" if is_true else "or"):
        found = [_of_some_row(expressions, each, is_true=is_true) for each in operands]
        of_rows = list(filter(None, found))
        return of_rows[0] if len(of_rows) == 1 else frozenset()
    if name == ("reduce_or" if is_true else "reduce_and"):
        return _all_of(expressions, operands[0], is_true=is_true, parts=False)
    return frozenset()


def _all_of(
    expressions: Expressions,
    of: Any,
    *,
    is_true: bool,
    parts: bool = True,
) -> frozenset[Choice]:
    """Returns what must be true where a choice is, or false where it is not; ``parts``: each of several too."""
    of = _of_any_shape(expressions, of)
    equation = expressions.maker(of)
    found = frozenset([(expressions.number(of), is_true)])
    if equation is None:
        return found
    name, operands = equation.primitive.name, equation.invars
    if name == "not":
        return found | _all_of(expressions, operands[0], is_true=not is_true, parts=parts)
    if parts and name == ("and" if is_true else "or"):
        return found.union(*(_all_of(expressions, each, is_true=is_true) for each in operands))
    return found


# What loops make ----------------------------------------------------------------------


def kept_by_trips(body: Any, first: int, count: int) -> list[bool]:
    """Returns which of the values that a loop carries no trip changes."""
    carried = body.invars[first : first + count]
    return [a is b for a, b in zip(carried, body.outvars, strict=False)]


def after_trips(
    op: Operation,
    goes_on: Value,
    value: Value,
    at: int,
    *,
    is_own: bool,
) -> Value:
    """Returns a value after trips whose number depends on the rows; ``is_own``: on a row alone, for what is of that row."""
    if goes_on.kind is Kind.ROWS:
        return elementwise(op, [goes_on, value], at)
    if value.kind is Kind.ROWS and goes_on.kind is not Kind.MIXED:
        why = goes_on.why or op.told("the number of trips depends on the rows")
        return value if is_own else op.unknown([goes_on, value], why, at)
    return op.mixed([goes_on, value], "the number of trips depends on the rows", at)


def after_equal_trips(op: Operation, goes_on: Value, value: Value, at: int) -> Value:
    """Returns a value after trips whose number does not depend on the rows, but may on their places.

    ``vmap`` makes one loop of several, which goes on for some of them and leaves the others as they are.
    """
    is_of_several = opened(op.params["cond_jaxpr"]).outvars[0].aval.ndim > 0
    if not (goes_on.place or is_of_several):
        return value
    return chosen(op, [goes_on, value, value], at)


def of_varying_trips(op: Operation, before: Value, after: Value, at: int) -> Value:
    """Returns a value after as many trips as the number of rows says."""
    why = op.told("the number of trips depends on the number of rows")
    made = op.unknown([before, after], why, at)
    return replace(made, growth=None) if made.is_free and not made.place else made


def entering(value: Value, *, is_of_part: bool) -> Value:
    """Returns what each trip of a loop is given of a value, one after another along its first dim.

    Where each of a few trips has a part of the rows, what depends on none is another value for these, but for copies of one.
    """
    span = value.span and value.span.shifted(-1)
    copied = frozenset(d - 1 for d in value.copied if d)
    differs = is_of_part and value.is_free and 0 not in value.copies
    place = max(value.place, Place.OTHER if differs else Place.NONE)
    return replace(value, span=span, copied=copied, place=place)


def of_trip(op: Operation, given: Values, made: Sequence[Value]) -> list[Value]:
    """Returns the results of an operation; what is made of values that differ by trips differs too, if not a number."""
    differs = op.in_trip and any(v.is_free and v.place for v in given)
    if not differs:
        return list(made)
    by_place = lambda v: v.is_free and not v.place and v.number is None
    return [replace(v, place=Place.OTHER) if by_place(v) else v for v in made]


def counted(value: Value) -> Value:
    """Returns what each trip of a loop makes, that may have counted the trips."""
    if not value.is_free or value.number:
        return value
    return replace(value, growth=1.0, place=Place.OTHER)


def stacked_over_trips(
    op: Operation,
    value: Value,
    at: int,
    *,
    is_over_rows: bool,
) -> Value:
    """Returns what the trips of a loop return, one after another along a new dim."""
    if value.running:
        return op.mixed([value], CARRIED, at)
    if is_over_rows and value.kind is Kind.SUM:
        return replace(value, why=value.why or op.told(TORN))
    if value.is_free:
        copied = frozenset(d + 1 for d in value.copied)
        place = value.place if op.keeps_places(at) else Place.NONE
        return replace(value, copied=copied, place=place)
    if value.span is None or (value.in_loop and not is_over_rows):
        return value
    return replace(
        value,
        span=value.span._replace(
            first=value.span.first + 1,
            last=value.span.last + 1,
        ),
    )
