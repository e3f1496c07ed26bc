"""Values: how the result of an operation depends on the rows of a batch, and along which dims it has them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

# Reasons of a doubt that callers look for.
BY_PART = "it depends on the place of a head, or whatever devices exchange, in the part of one"
TORN = "it adds up some dims of rows"
OTHER_PROGRAM = (
    "another program for another number of rows, as jax.lax.associative_scan over them is"
)
NOT_KNOWN = "it is not known"
OF_DEVICES = "it depends on the number of devices"
TAKEN = "it takes some rows"
MOVED = "it moves rows"
MOVED_APART = "it moves rows apart"
ORDERED = "it orders or adds up rows"
PUT_IN_ORDER = "it puts rows in another order"
SOME_OTHERWISE = "some rows are treated otherwise than others, by their places"
CARRIED = "it carries one row to the next"
SOME_ALONE = "a sum over some rows"
WEIGHT_BY_PLACE = "each row has a weight by its place"
REORDERED = {TAKEN, MOVED, MOVED_APART, ORDERED, PUT_IN_ORDER, SOME_OTHERWISE}


class Reason(NamedTuple):
    """Why a value is in doubt or mixes rows, or what is taken to be right; without words there is none.

    Attributes:
        what: What is done, in words.
        operation: The name of the operation that does it, if it is one.
        line: Its line of code.
        part: The part of the model that it is in: "embed", "layer", "head", "model" or "loss".
    """

    what: str = ""
    operation: str = ""
    line: str = ""
    part: str = ""

    def __bool__(self) -> bool:
        return bool(self.what)

    def __str__(self) -> str:
        place = f" ({self.operation} at {self.line})" if self.operation else ""
        return f"{self.part}{': ' if self.part else ''}{self.what}{place}"


NONE = Reason()


class Kind(IntEnum):
    """How a value depends on the rows, from the simplest to the worst."""

    FREE = 0  # not at all
    ROWS = 1  # it has rows, each of which depends on the same row alone
    SUM = 2  # it is a sum over rows
    UNKNOWN = 3  # it may be right
    MIXED = 4  # otherwise: the values for parts of the rows do not add up to it


class Place(IntEnum):
    """Whether a value depends on the places that rows have in their microbatch."""

    NONE = 0
    INDEX = 1  # it is the index of each row: 0, 1, 2, ...
    FROM_END = 2  # it is the index less the number of rows, by which JAX counts from the end
    PAST_END = 3  # it is the index plus their number, which JAX takes where an index is below 0
    OTHER = 4  # it is another function of the indices


# The dims along which a number is copied: all that it may get.
EVERY_DIM = frozenset(range(64))


class Span(NamedTuple):
    """Where the rows are: dims ``first`` to ``last``, taken as one, are ``[outer, rows, inner]``.

        [rows, seq, embed]      first=0, last=0
        [seq, rows, embed]      first=1, last=1
        [rows * seq, embed]     first=0, last=0, inner=seq
        [2, rows / 2, embed]    first=0, last=1

    In the body of a loop over rows each trip has one of them, or some: that dim is -1.

    Attributes:
        first: The first dim.
        last: The last dim.
        outer: How often the rows are repeated.
        inner: The size of a row, along these dims.
        part: Of a value that has some of the rows, where these start and stop for few rows and for many: two pairs.
    """

    first: int
    last: int
    outer: int = 1
    inner: Fraction = Fraction(1)
    part: tuple[tuple[int, int], ...] = ()

    @property
    def dims(self) -> range:
        """The dims that hold rows."""
        return range(self.first, self.last + 1)

    @property
    def in_loop(self) -> bool:
        """Whether only a loop around has rows."""
        return self.last < 0

    def at(self, dims: Sequence[int | None]) -> "Span | None":
        """Returns the span with its dims at these places; None if they are no longer neighbours, or gone."""
        places = [d for d in dims if d is not None]
        are_neighbours = all(b == a + 1 for a, b in pairwise(places))
        if len(places) < len(dims) or not are_neighbours:
            return None
        return self._replace(first=places[0], last=places[-1])

    def moved(self, places: Sequence[int | None]) -> "Span | None":
        """Returns the span where dim d becomes dim ``places[d]``; a loop stays around."""
        return self.at([places[d] if d >= 0 else d for d in self.dims])

    def shifted(self, by: int) -> "Span":
        """Returns the span with this number added to its dims."""
        return self._replace(
            first=max(self.first + by, -1),
            last=max(self.last + by, -1),
        )


@dataclass(frozen=True)
class Value:
    """How a value depends on the rows.

    Attributes:
        kind: The kind.
        growth: By which factor all its elements are larger for many rows than for few; None: not known. Of a sum over rows it
            is the factor beside the sum: 1 for ``jnp.sum``, few / many for ``jnp.mean``.
        span: Where it has rows.
        number: The number that all its elements are, for few and for many rows; None: not known, or several.
        place: Whether it depends on the places of rows.
        copied: Of a value that does not depend on rows, the dims along which it is known to be one element, copied.
        is_bound: Whether it is a maximum over rows, made of nothing else that mixes them. Without its gradient it is taken for
            a constant that cancels, as in a softmax.
        running: Which value that a loop over rows carries it is, from 1 on: the sum so far; 0: it is none.
        is_of_any: Whether it says that a condition holds for some row, or which elements are NaN or infinite.
        root_of: The sum over rows of which it is the square root.
        assumed: What is taken to be right, such as that a maximum cancels.
        why: The operation that mixed rows, or that is in doubt.
    """

    kind: Kind = Kind.FREE
    growth: float | None = 1.0
    span: Span | None = None
    number: tuple[float, float] | None = None
    place: Place = Place.NONE
    copied: frozenset[int] = frozenset()
    is_bound: bool = False
    running: int = 0
    is_of_any: bool = False
    root_of: "Value | None" = None
    assumed: Reason = NONE
    why: Reason = NONE

    @property
    def rows(self) -> Span:
        """Where it has rows, of a value that has them."""
        assert self.span is not None, "it has rows"
        return self.span

    @property
    def copies(self) -> frozenset[int]:
        """The dims along which it is known to be one element, copied."""
        return self.copied if self.number is None else EVERY_DIM

    @property
    def is_zero(self) -> bool:
        """Whether it is known to be zero."""
        return self.number == (0, 0)

    @property
    def is_free(self) -> bool:
        """Whether it does not depend on the rows."""
        return self.kind is Kind.FREE

    @property
    def in_loop(self) -> bool:
        """Whether it is of one row of a loop around."""
        return self.span is not None and self.span.in_loop


Values = Sequence[Value]


def of_number(few: float, many: float) -> Value:
    """Returns the value of a constant, which may depend on the number of rows."""
    same_sign = few * many > 0
    is_same = few == many or (math.isnan(few) and math.isnan(many))
    growth = 1.0 if is_same else many / few if same_sign else None
    return Value(growth=growth, number=(float(few), float(many)))


ZERO = of_number(0, 0)


def same_growth(a: float | None, b: float | None) -> bool:
    """Returns whether two factors are known to be the same, but for rounding, or are both unknown."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-6)


def product_of_growths(a: float | None, b: float | None, power: int = 1) -> float | None:
    """Returns the factor of ``a * b ** power``."""
    return None if a is None or b is None else a * b**power


def first_why(values: Values) -> Reason:
    """Returns what is in doubt about the first value of which something is."""
    return next((value.why for value in values if value.why), NONE)


def first_assumed(values: Values) -> Reason:
    """Returns what is assumed of the first value of which something is."""
    return next(
        (value.assumed for value in values if value.assumed),
        NONE,
    )
