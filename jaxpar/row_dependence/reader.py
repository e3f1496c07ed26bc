"""The reader of two jaxprs of one function: it follows values through operations, calls, branches and loops."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar._compat import (
    Literal,
    inlined,
    is_in_einsum,
    linear_solve,
    opened,
    scan_counts,
    source_line,
)
from jaxpar.row_dependence.collectives import in_doubt_by_devices, own_rows
from jaxpar.row_dependence.constants import of_constant
from jaxpar.row_dependence.copies import with_copies
from jaxpar.row_dependence.elements import (
    chosen,
    joined,
    with_conditions,
)
from jaxpar.row_dependence.expressions import Expressions
from jaxpar.row_dependence.gradient import in_doubt_by_gradient
from jaxpar.row_dependence.mark import is_of_own_rows, is_row_wise
from jaxpar.row_dependence.operation import Operation, carried_on
from jaxpar.row_dependence.places import placed
from jaxpar.row_dependence.rules import (
    DRAWS,
    KEEP_RUNNING,
    OF_NUMBERS,
    RULES,
    TAKE_MIXED,
    computed,
)
from jaxpar.row_dependence.trips import (
    after_equal_trips,
    after_trips,
    counted,
    entering,
    kept_by_trips,
    of_trip,
    of_varying_trips,
    stacked_over_trips,
    trips_of,
)
from jaxpar.row_dependence.values import (
    CARRIED,
    EVERY_DIM,
    NONE,
    NOT_KNOWN,
    OTHER_PROGRAM,
    SOME_ALONE,
    ZERO,
    Kind,
    Place,
    Reason,
    Value,
    Values,
    first_assumed,
    first_why,
)

_MOST_TRIPS = (
    6  # after which each value that a loop carries has settled, once those that it is made of have
)

Results = list[Value]
Pair = tuple[Any, Any]  # for few and for many rows


def traced(
    function: Callable[..., PyTree],
    few: Sequence[PyTree],
    many: Sequence[PyTree],
    within: Sequence[Callable[[], AbstractContextManager]] = (nullcontext, nullcontext),
) -> tuple[Pair, Pair]:
    """Returns the jaxprs of a function for few and for many rows, and the shapes that it returns for both.

    Traces, computes nothing.

    Args:
        function: A function of pytrees.
        few: Its arguments, arrays or ShapeDtypeStructs.
        many: The same with more rows.
        within: What makes the contexts in which it is traced for few and for many rows.
    """
    with within[0]():
        of_few, few_shapes = jax.make_jaxpr(function, return_shape=True)(*few)
    with within[1]():
        of_many, many_shapes = jax.make_jaxpr(function, return_shape=True)(*many)
    return (of_few, of_many), (few_shapes, many_shapes)


@dataclass(frozen=True)
class Reader:
    """Reads the jaxprs for few and for many rows side by side.

    Attributes:
        rows: How many rows few are.
        ratio: How many times more the many are.
        trips_vary: Whether it reads the body of a loop over rows.
        in_trip: Whether each trip of a loop around has other rows: what is another value in each depends on their places.
        caller: The line that calls what it reads.
        axis: The mesh axis that splits the rows of these jaxprs, whose collectives join them; "" if none does.
        is_backward: Whether it reads a backward pass, in which no function is differentiated again.
        num_joined: How many neighbouring rows no split parts, where groups of more are mixed; 0: groups are not looked for.
    """

    rows: int
    ratio: float
    trips_vary: bool = False
    caller: str = ""
    axis: str = ""
    is_backward: bool = False
    num_joined: int = 0
    in_trip: bool = False

    def read(self, few: Any, many: Any, given: Values) -> Results:
        """Returns the value of each output of a jaxpr, open or closed, from those of its inputs."""
        constants = zip(
            getattr(few, "consts", ()),
            getattr(many, "consts", ()),
            strict=False,
        )
        few, many = opened(few), opened(many)
        if not _are_alike(few, many):
            return self._of_other_program(few, many, given)
        known = dict(
            zip(
                few.constvars,
                (of_constant(*pair) for pair in constants),
                strict=True,
            )
        )
        known |= dict(zip(few.invars, given, strict=True))
        twins = dict(
            zip([*few.constvars, *few.invars], [*many.constvars, *many.invars], strict=True)
        )
        expressions = Expressions(few.eqns)

        def value_of(a: Any, b: Any, user: Any = None) -> Value:
            if isinstance(a, Literal):
                return of_constant(a.val, b.val) if isinstance(b, Literal) else Value(growth=None)
            value = known[a]
            if twins[a] is not b and not (user and is_in_einsum(user)):
                line = (user and source_line(user)) or self.caller
                return _of_other_operand(value, line)
            is_scalar = value.is_free and a.aval.size == b.aval.size == 1
            return replace(value, copied=EVERY_DIM) if is_scalar else value

        for a, b in zip(few.eqns, many.eqns, strict=True):
            values = [value_of(*pair, a) for pair in zip(a.invars, b.invars, strict=True)]
            op = self._operation(a, b, expressions, known)
            known.update(
                zip(
                    a.outvars,
                    of_trip(op, values, self._results(op, values)),
                    strict=True,
                )
            )
            twins.update(zip(a.outvars, b.outvars, strict=True))
        return [value_of(*pair) for pair in zip(few.outvars, many.outvars, strict=True)]

    def _operation(
        self,
        few: Any,
        many: Any,
        expressions: Expressions | None = None,
        known: Mapping[Any, Value] = MappingProxyType({}),
    ) -> Operation:
        return Operation(
            few,
            many,
            self.rows,
            self.ratio,
            self.trips_vary,
            self.caller,
            self.axis,
            self.num_joined,
            expressions or Expressions([]),
            known,
            self.in_trip,
        )

    def _of_other_program(self, few: Any, many: Any, given: Values) -> Results:
        op = self._operation(_Whole(few), _Whole(many))
        line = _first_other_line(few, many) or self.caller
        why = Reason(OTHER_PROGRAM, "another operation", line)
        values = list(given) or [Value(Kind.UNKNOWN)]
        made = [op.unknown(values, why, at) for at in range(op.num_outputs)]
        return [replace(v, growth=None, why=why) if v.is_free else v for v in made]

    def _results(self, op: Operation, given: Values) -> Results:
        """Returns the values that an operation returns."""
        outputs = range(op.num_outputs)
        if (setting := op.other_setting()) and not is_in_einsum(op.few):
            why = op.told(f"its {setting} depends on the number of rows")
            made = [op.unknown(given, why, at) for at in outputs]
            return [replace(v, growth=None, why=why) if v.is_free else v for v in made]
        if op.name in SPECIAL:
            return SPECIAL[op.name](self, op, given)
        if is_row_wise(op.few):
            return [op.unknown(given, NONE, at) for at in outputs]
        if op.axis and is_of_own_rows(op.few):
            return [own_rows(op)]
        if (inner := inlined(op.few)) is not None:
            inside = replace(self, caller=op.line)
            made = inside.read(inner, inlined(op.many), given)
            if self.is_backward:
                return made
            return in_doubt_by_gradient(replace(inside, is_backward=True).read, op, given, made)
        if op.name in OF_NUMBERS and given and all(v.number for v in given):
            return [computed(op, given)]
        if op.name in DRAWS and all(v.is_free for v in given):
            is_same = all(v.growth == 1 for v in given)
            by_place = any(v.place for v in given)
            drawn = lambda at: Value(
                growth=1.0 if is_same else None,
                place=Place.OTHER if by_place or op.varying_out(at) else Place.NONE,
                assumed=first_assumed(given),
                why=carried_on(first_why(given)),
            )
            return [drawn(at) for at in outputs]
        if any(v.kind is Kind.MIXED for v in given) and op.name not in TAKE_MIXED:
            made = [op.unknown(given, NONE, at) for at in outputs]
            return with_conditions(op, given, made)
        return self._by_rule(op, given)

    def _by_rule(self, op: Operation, given: Values) -> Results:
        outputs = range(op.num_outputs)
        try:
            made = RULES[op.name](op, given)
        except Exception:  # no rule, or a form of an operation that its rule does not know
            why = first_why(given) or op.told(NOT_KNOWN)
            return [op.unknown(given, why, at) for at in outputs]
        made = made if isinstance(made, list) else [made for _ in outputs]
        if any(v.running for v in given) and op.name not in KEEP_RUNNING:
            made = [op.mixed(given, CARRIED, at) for at in outputs]
        made = with_copies(op, given, placed(op, given, with_conditions(op, given, made)))
        return in_doubt_by_devices(op, given, made)

    # Calls and branches -----------------------------------------------------------------------

    def _linear_solve(self, op: Operation, given: Values) -> Results:
        few, count, start = linear_solve(op.few)
        many, _, _ = linear_solve(op.many)
        constants = given[start : start + count]
        sides = given[len(given) - op.num_outputs :]
        inside = replace(self, caller=op.line)
        return inside.read(few, many, [*constants, *sides])

    def _branches(self, op: Operation, given: Values) -> Results:
        few, many = op.both("branches")
        made = [self.read(a, b, given[1:]) for a, b in zip(few, many, strict=True)]
        results = []
        for at, values in enumerate(zip(*made, strict=True)):
            is_passed = _passes_one(few, at)
            made_of = [given[0], *values]
            results.append(values[0] if is_passed else chosen(op, made_of, at))
        return results

    def _on_shards(self, op: Operation, given: Values) -> Results:
        """Of a function on each shard of its arguments, over axes that do not split them."""
        few, many = map(opened, op.both("jaxpr"))
        is_whole = all(
            [v.aval.shape for v in equation.invars] == [v.aval.shape for v in inner.invars]
            for equation, inner in ((op.few, few), (op.many, many))
        )
        if not is_whole:
            return [op.unknown(given, op.told(NOT_KNOWN), at) for at in range(op.num_outputs)]
        return replace(self, caller=op.line).read(few, many, given)

    # Loops ------------------------------------------------------------------------------------

    def _while_loop(self, op: Operation, given: Values) -> Results:
        of_condition = op.params["cond_nconsts"]
        of_body = op.params["body_nconsts"]
        start = of_condition + of_body
        first = given[:of_condition]
        second = given[of_condition:start]
        few, many = op.both("body_jaxpr")
        run = lambda carry: self.read(few, many, [*second, *carry])
        carry, _ = self._settled(op, run, given[start:])
        (goes_on,) = self.read(*op.both("cond_jaxpr"), [*first, *carry])
        body = opened(few)
        kept = kept_by_trips(body, of_body, len(carry))
        if goes_on.is_free and goes_on.growth == 1:
            both = enumerate(zip(carry, kept, strict=True))
            return [v if k else after_equal_trips(op, goes_on, v, at) for at, (v, k) in both]
        carried = list(zip(body.invars[of_body:], kept, strict=True))
        changed = {id(before) for before, is_kept in carried if not is_kept}
        trips = trips_of(op, changed, first, carry)
        made = []
        for at, (value, (before, is_kept)) in enumerate(zip(carry, carried, strict=True)):
            is_own = is_kept or trips.keep_rows(before, body.outvars[at])
            made.append(value if is_kept else after_trips(op, goes_on, value, at, is_own=is_own))
        return made

    def _scan(self, op: Operation, given: Values) -> Results:
        first, count = scan_counts(op.few)
        constants = given[:first]
        start = given[first : first + count]
        xs = given[first + count :]
        varies = op.params["length"] != op.many.params["length"]
        is_over_rows = any(v.span and 0 in v.span.dims for v in xs)
        in_trip = self.in_trip or varies or is_over_rows
        entered = [entering(x, is_of_part=is_over_rows and not varies) for x in xs]
        body = replace(
            self,
            trips_vary=varies or (self.trips_vary and not is_over_rows),
            in_trip=in_trip,
        )
        few, many = op.both("jaxpr")
        run = lambda carry: body.read(few, many, [*constants, *carry, *entered])
        if is_over_rows:
            carry, made = self._added_up(
                op, run, start, entered, kept_by_trips(opened(few), first, count)
            )
        else:
            carry, made = self._settled(op, run, start)
        kept = kept_by_trips(opened(few), first, count)
        if varies and not is_over_rows:
            both = enumerate(zip(start, carry, kept, strict=True))
            carry = [a if k else of_varying_trips(op, a, b, at) for at, (a, b, k) in both]
        ys = enumerate(made[count:], count)
        by_trip = not all(kept) or any(x.place for x in xs)
        if varies and not is_over_rows and by_trip:
            ys = ((at, counted(value)) for at, value in ys)
        return [
            *carry,
            *(stacked_over_trips(op, v, at, is_over_rows=is_over_rows) for at, v in ys),
        ]

    def _settled(
        self,
        op: Operation,
        body: Callable[[Values], Results],
        start: Values,
    ) -> tuple[Results, Results]:
        """Returns what a loop carries after any number of trips, and what its body then returns."""
        carry, made = list(start), body(start)
        for _ in range(_MOST_TRIPS + len(carry)):
            pairs = enumerate(zip(carry, made, strict=False))
            following = [a if a == b else joined(op, [a, b], at) for at, (a, b) in pairs]
            if following == carry:
                return carry, made
            carry, made = following, body(following)
        why = op.told("each trip of a loop makes other values of it")
        carry = [op.unknown([value], value.why or why, at) for at, value in enumerate(carry)]
        return carry, body(carry)

    def _added_up(
        self,
        op: Operation,
        body: Callable[[Values], Results],
        start: Values,
        entered: Values,
        kept: Sequence[bool],
    ) -> tuple[Results, Results]:
        """Returns the same of a loop over rows: it may add up what each gives, if it reads nothing of the sum."""
        if any(v.span and v.span.part for v in entered):
            why = op.told(SOME_ALONE)
            unknown = lambda at, v: op.unknown([v, *entered], why, at)
            return [unknown(at, v) for at, v in enumerate(start)], body(start)
        terms = body([v if k else ZERO for v, k in zip(start, kept, strict=True)])
        running = [
            Value(Kind.SUM, term.growth, running=at)
            for at, term in enumerate(terms[: len(start)], 1)
        ]
        made = body([v if k else r for v, k, r in zip(start, kept, running, strict=False)])
        carry = []
        for at, (value, is_kept, new) in enumerate(zip(start, kept, made, strict=False)):
            if is_kept:
                carry.append(value)
            elif new.kind is Kind.SUM and new.running == at + 1:
                total = replace(
                    new,
                    growth=terms[at].growth,
                    running=0,
                )
                carry.append(joined(op, [value, total], at, adds=True))
            else:
                carry.append(
                    op.mixed(
                        [new],
                        CARRIED,
                        at,
                    )
                )
        return carry, made


# The operations that are read by the reader itself.
SPECIAL = {
    "scan": Reader._scan,
    "while": Reader._while_loop,
    "cond": Reader._branches,
    "custom_linear_solve": Reader._linear_solve,
    "shard_map": Reader._on_shards,
}


@dataclass(frozen=True)
class _Whole:
    """A jaxpr in place of an equation."""

    jaxpr: Any

    @property
    def outvars(self) -> Sequence[Any]:
        return self.jaxpr.outvars


def _of_other_operand(value: Value, line: str) -> Value:
    """Returns the value of an operand in whose place there is another one for more rows."""
    why = value.why or Reason(OTHER_PROGRAM, "another operand", line)
    if value.is_free:
        return replace(value, growth=None, number=None, why=why)
    return replace(value, why=why)


def _are_alike(few: Any, many: Any) -> bool:
    """Whether two jaxprs have the same operations."""
    names = [[equation.primitive for equation in jaxpr.eqns] for jaxpr in (few, many)]
    return names[0] == names[1] and len(few.constvars) == len(many.constvars)


def _first_other_line(few: Any, many: Any) -> str:
    """Returns the line of the first operation that the other jaxpr does not have; "" if none is known."""
    for pair in zip_longest(few.eqns, many.eqns):
        names = {each and each.primitive for each in pair}
        if len(names) > 1:
            return source_line(pair[0] or pair[1])
    return ""


def _passes_one(branches: Sequence[Any], at: int) -> bool:
    """Whether all branches return one operand as it is."""
    passed = set()
    for branch in map(opened, branches):
        out = branch.outvars[at]
        places = [i for i, operand in enumerate(branch.invars) if operand is out]
        passed.add(places[0] if places else None)
    return len(passed) == 1 and None not in passed
