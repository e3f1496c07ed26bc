"""The kinds of dependence on rows, and those of sums and products of values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

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
