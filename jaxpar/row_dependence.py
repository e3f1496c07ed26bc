"""How the values of a traced function depend on the rows of a batch: not at all, row by row, as a sum over rows, or otherwise.

A function is traced for two numbers of rows, and the two jaxprs are read side by side. A dim that differs holds rows, and a
literal that differs contains the number of rows:

    a:f32[8,2]   a:f32[16,2]      rows
    b = reduce_sum[axes=(0,)] a   a sum over rows
    c = div b 8.0   div b 16.0    a sum over rows, divided by their number: a mean

A sum over rows is the sum of those of the microbatches; a mean, a maximum or the first row is not made of theirs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar._compat import Literal, Tracer, inlined, is_jaxpr, opened, scan_counts

Names = frozenset[str]
NONE: Names = frozenset()


class Kind(IntEnum):
    """How a value depends on the rows."""

    ZERO = 0  # it is zero
    CONSTANT = 1  # not at all
    ROWS = 2  # it has rows, each of which depends on the same row
    SUM = 3  # it is a sum over rows, plus zero
    OTHER = 4  # in another way


@dataclass(frozen=True)
class Dependence:
    """How a value depends on the rows, and on named values without rows.

    Attributes:
        kind: The kind.
        degree: The power of the number of rows by which it is multiplied, -1 for a mean; None: unknown.
        constants: The named constants of which it consists, while its own kind is ``CONSTANT``.
        sums: The named sums over rows that it contains as terms, multiplied by constants alone.
        wrong: The named values that depend on rows otherwise, and on which it depends in any way; sums that are not terms;
            constants that are added to a sum over rows.
    """

    kind: Kind
    degree: int | None = 0
    constants: Names = NONE
    sums: Names = NONE
    wrong: Names = NONE

    @property
    def is_constant(self) -> bool:
        """Whether it does not depend on the rows."""
        return self.kind <= Kind.CONSTANT


CONSTANT, ROWS = Dependence(Kind.CONSTANT), Dependence(Kind.ROWS)


def join(values: Sequence[Dependence], *, has_rows: bool) -> Dependence:
    """Returns the dependence of a sum of values, and of a value that is one of them."""
    wrong, sums, constants = (
        frozenset().union(*(getattr(v, name) for v in values)) for name in ("wrong", "sums", "constants")
    )
    values = [v for v in values if v.kind is not Kind.ZERO]
    kind = max((v.kind for v in values), default=Kind.ZERO)
    degrees = {v.degree for v in values} or {0}
    if kind is Kind.SUM and not has_rows:
        # A constant times the number of rows is a sum of constants over rows.
        degrees = {v.degree for v in values if not v.is_constant}
        added = [v for v in values if v.is_constant and (v.degree is None or {v.degree - 1} != degrees)]
        if added:
            once = (v.constants for v in added if v.degree is not None)
            return Dependence(Kind.OTHER, None, sums=sums, wrong=wrong.union(*once))
    elif kind is Kind.SUM:
        kind = Kind.OTHER
    degree = degrees.pop() if len(degrees) == 1 else None
    return _with_names_of(Dependence(kind, degree, constants, sums, wrong), has_rows)


def _with_names_of(value: Dependence, has_rows: bool) -> Dependence:
    """Returns ``value`` with only the names that its kind keeps: a sum in every row is not a term of their sum."""
    if has_rows and value.sums:
        value = replace(value, sums=NONE, wrong=value.wrong | value.sums)
    return value if value.is_constant else replace(value, constants=NONE)


def mix(values: Sequence[Dependence], *, has_rows: bool, degree: int | None) -> Dependence:
    """Returns the dependence of what an operation that is not known makes of values."""
    kind = max((v.kind for v in values), default=Kind.CONSTANT)
    kind = Kind.CONSTANT if kind <= Kind.CONSTANT else Kind.ROWS if kind is Kind.ROWS and has_rows else Kind.OTHER
    names = frozenset().union(*(v.constants for v in values))
    wrong = frozenset().union(*(v.wrong | v.sums for v in values))
    return _with_names_of(Dependence(kind, degree, names, NONE, wrong), has_rows)


def product(a: Dependence, b: Dependence, *, sign: int = 1, has_rows: bool) -> Dependence:
    """Returns the dependence of ``a * b``, or with sign -1 of ``a / b``."""
    if a.kind is Kind.ZERO or (b.kind is Kind.ZERO and sign > 0):
        return Dependence(Kind.ZERO)
    degree = None if None in (a.degree, b.degree) else (a.degree or 0) + sign * (b.degree or 0)
    if a.is_constant and sign > 0:
        a, b = b, a
    if not b.is_constant or (has_rows and a.kind is Kind.SUM):
        return mix([a, b], has_rows=has_rows, degree=degree)
    made = Dependence(a.kind, degree, a.constants | b.constants, a.sums, a.wrong | b.wrong)
    return _with_names_of(made if b.degree == 0 else replace(made, sums=NONE, wrong=made.wrong | made.sums), has_rows)


def summed(value: Dependence, *, had_rows: bool, has_rows: bool) -> Dependence:
    """Returns the dependence of a sum over dims of a value."""
    if not had_rows or has_rows:
        return value
    if value.kind is Kind.ROWS:
        return replace(value, kind=Kind.SUM)
    more = None if value.degree is None else value.degree + 1
    return replace(value, degree=more) if value.kind is Kind.CONSTANT else value


def trace_dependences(
    function: Callable[..., PyTree], few: Sequence[PyTree], many: Sequence[PyTree], ratio: float
) -> tuple[tuple[PyTree, PyTree], Callable[[Sequence[Dependence]], list[Dependence]]]:
    """Returns the shapes that a function returns for both numbers of rows, and how its outputs depend on rows.

    The latter is a function of the dependences of its flat arguments. Traces, computes nothing.

    Args:
        function: A function of pytrees.
        few: Its arguments, arrays or ShapeDtypeStructs.
        many: The same with more rows.
        ratio: How many times more.
    """
    (of_few, few_shapes), (of_many, many_shapes) = (
        jax.make_jaxpr(function, return_shape=True)(*args) for args in (few, many)
    )
    return (few_shapes, many_shapes), partial(_Reader(ratio).read, of_few, of_many)


# Operations that return their operands' elements, or sums of them, and how many operands these are (None: all); the others
# are indices.
_OF_ONE = (
    "reshape broadcast_in_dim transpose squeeze expand_dims slice split rev copy copy_p neg real imag conj cumsum reduce_sum "
    "reduce_precision convert_element_type stop_gradient sharding_constraint pvary name gather dynamic_slice"
)
_OF_TWO = "add sub add_any complex pad dynamic_update_slice"
_TERMS = {**dict.fromkeys(_OF_ONE.split(), 1), **dict.fromkeys(_OF_TWO.split(), 2), "concatenate": None}


class _Reader:
    """Reads two jaxprs of one function side by side. Inside a loop over the rows, shapes do not tell what has rows."""

    def __init__(self, ratio: float, *, in_rows: bool = False) -> None:
        self._ratio, self._in_rows = ratio, in_rows

    def read(self, few: Any, many: Any, given: Sequence[Dependence]) -> list[Dependence]:
        """Returns the dependence of each output of a jaxpr, open or closed."""
        constants = zip(getattr(few, "consts", ()), getattr(many, "consts", ()), strict=False)
        few, many = opened(few), opened(many)
        alike = [e.primitive for e in few.eqns] == [e.primitive for e in many.eqns]
        if not alike or len(few.constvars) != len(many.constvars):
            return [
                mix(given, has_rows=_has_rows(a, b), degree=None)
                for a, b in zip(few.outvars, many.outvars, strict=True)
            ]
        known = dict(zip(few.constvars, (self._of_constant(*pair) for pair in constants), strict=True))
        known |= dict(zip(few.invars, given, strict=True))

        def of(a: Any, b: Any) -> Dependence:
            if not isinstance(a, Literal):
                return known[a]
            return self._of_constant(a.val, b.val) if isinstance(b, Literal) else replace(CONSTANT, degree=None)

        for a, b in zip(few.eqns, many.eqns, strict=True):
            made = self._equation(a, b, [of(*pair) for pair in zip(a.invars, b.invars, strict=True)])
            known.update(zip(a.outvars, made, strict=True))
        return [of(*pair) for pair in zip(few.outvars, many.outvars, strict=True)]

    def _of_constant(self, few: Any, many: Any) -> Dependence:
        if not all(_is_known(value) for value in (few, many)):
            return CONSTANT
        few, many = np.asarray(few), np.asarray(many)
        if few.shape == many.shape and np.array_equal(few, many, equal_nan=few.dtype.kind in "fc"):
            return CONSTANT if few.size and np.any(few) else Dependence(Kind.ZERO)
        if few.dtype.kind not in "iuf" or np.ptp(few) or np.ptp(many) or few.flat[0] * many.flat[0] <= 0:
            return replace(CONSTANT, degree=None)
        power = math.log(float(many.flat[0]) / float(few.flat[0])) / math.log(self._ratio)
        return replace(CONSTANT, degree=round(power) if abs(power - round(power)) < 0.02 else None)

    def _equation(self, few: Any, many: Any, given: list[Dependence]) -> list[Dependence]:
        name, has_rows = few.primitive.name, [_has_rows(*pair) for pair in zip(few.outvars, many.outvars, strict=True)]
        if name == "scan":
            return self._scan(few, many, given, has_rows)
        if name == "while":
            return self._while(few, many, given, has_rows)
        if name == "cond":
            return self._cond(few, many, given, has_rows)
        if (inner := inlined(few)) is not None:
            return self.read(inner, inlined(many), given)
        if self._in_rows:
            return [mix(given, has_rows=True, degree=_degree(few, given))] * len(has_rows)
        if name == "optimization_barrier":
            return given
        return [self._operation(few, many, given, each) for each in has_rows]

    def _operation(self, few: Any, many: Any, given: list[Dependence], has_rows: bool) -> Dependence:
        name, out = few.primitive.name, few.outvars[0].aval
        had_rows = [_has_rows(*pair) for pair in zip(few.invars, many.invars, strict=True)]
        mixed = mix(given, has_rows=has_rows, degree=_degree(few, given))
        if name == "iota":
            return replace(mixed, degree=None) if has_rows else mixed
        if name in ("mul", "div"):
            return product(*given, sign=1 if name == "mul" else -1, has_rows=has_rows)
        if name == "dot_general":
            made = product(*given, has_rows=any(had_rows))
            return summed(made, had_rows=any(had_rows), has_rows=has_rows)
        if name == "scatter-add" and not had_rows[0]:
            return join([given[0], _added_by_scatter(*given[1:], had_rows=had_rows[2])], has_rows=has_rows)
        if name in ("select_n", "scatter") and given[name == "scatter"].is_constant:
            return join(given[1:] if name == "select_n" else given[::2], has_rows=has_rows)
        if name not in _TERMS or (
            name == "convert_element_type" and not _keeps_sums(few.invars[0].aval.dtype, out.dtype)
        ):
            return mixed
        terms, indices = given[: _TERMS[name]], given[_TERMS[name] or len(given) :]
        if not all(index.is_constant for index in indices):
            return mixed
        if name == "reduce_sum":
            return summed(terms[0], had_rows=had_rows[0], has_rows=has_rows)
        lost = any(had_rows) and not has_rows and not all(term.is_constant for term in terms)
        return mixed if lost else join(terms, has_rows=has_rows)

    def _cond(self, few: Any, many: Any, given: list[Dependence], has_rows: list[bool]) -> list[Dependence]:
        branches = list(zip(few.params["branches"], many.params["branches"], strict=True))
        made = [self.read(*branch, given[1:]) for branch in branches]
        outs = []
        for i, each in enumerate(has_rows):
            unchanged = {_position(opened(branch[0]).outvars[i], opened(branch[0]).invars) for branch in branches}
            values = [branch[i] for branch in made]
            if len(unchanged) == 1 and None not in unchanged:
                outs.append(values[0])
            elif given[0].is_constant:
                outs.append(join(values, has_rows=each or self._in_rows))
            else:
                outs.append(_chosen([given[0], *values], has_rows=each or self._in_rows))
        return outs

    def _scan(self, few: Any, many: Any, given: list[Dependence], has_rows: list[bool]) -> list[Dependence]:
        first, num_carry = scan_counts(few)
        last = first + num_carry
        over_rows = few.params["length"] != many.params["length"]
        body = _Reader(self._ratio, in_rows=self._in_rows or over_rows)
        constants, carry, xs = given[:first], given[first:last], given[last:]
        run = lambda carry: body.read(few.params["jaxpr"], many.params["jaxpr"], [*constants, *carry, *xs])
        carry, made = self._repeated(run, carry, has_rows)
        if over_rows:
            inner = opened(few.params["jaxpr"])
            kept = [a is b for a, b in zip(inner.invars[first:last], inner.outvars, strict=False)]
            carry = [
                v if same or v.is_constant else mix([v], has_rows=False, degree=None)
                for v, same in zip(carry, kept, strict=True)
            ]
        return [*carry, *made[len(carry) :]]

    def _while(self, few: Any, many: Any, given: list[Dependence], has_rows: list[bool]) -> list[Dependence]:
        of_cond, of_body = few.params["cond_nconsts"], few.params["body_nconsts"]
        first, second, carry = given[:of_cond], given[of_cond : of_cond + of_body], given[of_cond + of_body :]
        run = lambda carry: self.read(few.params["body_jaxpr"], many.params["body_jaxpr"], [*second, *carry])
        carry, _ = self._repeated(run, carry, has_rows)
        (goes_on,) = self.read(few.params["cond_jaxpr"], many.params["cond_jaxpr"], [*first, *carry])
        if goes_on.is_constant and goes_on.degree == 0:
            return carry
        inner = opened(few.params["body_jaxpr"])
        kept = [a is b for a, b in zip(inner.invars[of_body:], inner.outvars, strict=True)]
        return [
            value if same else _chosen([goes_on, value], has_rows=each or self._in_rows)
            for value, same, each in zip(carry, kept, has_rows, strict=True)
        ]

    def _repeated(self, run: Callable, carry: list[Dependence], has_rows: list[bool]) -> tuple[list[Dependence], list]:
        """Returns the dependence of what a loop carries after any number of trips, and of what its body returns."""
        while True:
            made = run(carry)
            following = [
                old if old == new else join([old, new], has_rows=each or self._in_rows)
                for old, new, each in zip(carry, made, has_rows, strict=False)
            ]
            if following == carry:
                return carry, made
            carry = following


def _chosen(values: Sequence[Dependence], *, has_rows: bool) -> Dependence:
    """Returns the dependence of what a branch or a number of trips makes of values, the first of which chooses it."""
    return mix(values, has_rows=has_rows, degree=0 if {value.degree for value in values} == {0} else None)


def _added_by_scatter(indices: Dependence, updates: Dependence, *, had_rows: bool) -> Dependence:
    """Returns the dependence of what a scatter-add adds to an operand without rows, at indices that each row may choose."""
    if indices.is_constant or not had_rows:
        own = updates if indices.is_constant else mix([indices, updates], has_rows=False, degree=updates.degree)
        return summed(own, had_rows=had_rows, has_rows=False)
    rows = mix([indices, updates], has_rows=True, degree=updates.degree)
    return summed(rows, had_rows=True, has_rows=False)


def _position(atom: Any, atoms: Sequence[Any]) -> int | None:
    return next((i for i, each in enumerate(atoms) if each is atom), None)


def _has_rows(few: Any, many: Any) -> bool:
    return few.aval.shape != many.aval.shape


def _is_known(value: Any) -> bool:
    if isinstance(value, Tracer) or is_jaxpr(value) or not getattr(value, "is_fully_addressable", True):
        return False
    return not jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended) and np.size(value) <= 4096


def _keeps_sums(old: Any, new: Any) -> bool:
    """Whether a cast of a sum is the sum of casts, but for rounding."""
    return jnp.issubdtype(new, jnp.inexact) or (
        jnp.issubdtype(new, jnp.integer) and not jnp.issubdtype(old, jnp.inexact)
    )


def _degree(equation: Any, given: Sequence[Dependence]) -> int | None:
    """The degree of what an operation that is not known makes: 0, unless an operand that is no index has another."""
    numbers = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in equation.invars]
    degrees = {v.degree for v, is_number in zip(given, numbers, strict=True) if is_number or not any(numbers)}
    return 0 if degrees <= {0} else None
