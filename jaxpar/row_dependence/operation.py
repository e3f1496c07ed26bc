"""An operation as it is in both jaxprs, for few rows and for many, and the results that its rules have in common."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar._compat import source_line
from jaxpar.row_dependence.expressions import Expressions
from jaxpar.row_dependence.values import (
    MOVED_APART,
    NONE,
    Kind,
    Place,
    Reason,
    Span,
    Value,
    Values,
    first_assumed,
    first_why,
    same_growth,
)

Shape = tuple[int, ...]
# Settings of operations that are sizes, or names, and may be others for more rows.
_SIZES = frozenset(
    (
        *("shape", "new_sizes", "sizes", "reps", "length", "unroll", "name", "slice_sizes"),
        *("start_indices", "limit_indices", "padding_config", "window_dimensions"),
        *("lhs_shape", "rhs_shape", "fft_lengths", "axis_size"),
    )
)
_WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
_BY_DIM = {  # settings with an entry for each dim
    "slice": ("start_indices", "limit_indices"),
    "dynamic_slice": ("slice_sizes",),
    "pad": ("padding_config",),
    "split": (),
    **dict.fromkeys(_WINDOWS, ("window_dimensions",)),
}
_COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "all_to_all")
LIBRARY = f"{Path(__file__).parents[1]}{os.sep}"  # the folder of jaxpar, in a line of its code


def carried_on(why: Reason) -> Reason:
    """Returns a doubt about what devices have joined; none about an operation of jaxpar's own, which is tested."""
    if not why:
        return NONE
    is_own = why.line.startswith(LIBRARY) and why.operation not in _COLLECTIVES
    return NONE if is_own else why


@dataclass(frozen=True)
class Operation:
    """One equation of the two jaxprs.

    Attributes:
        few: The equation for few rows.
        many: The equation for many rows.
        rows: How many rows few are.
        ratio: How many times more the many are.
        trips_vary: Whether the loop around is over rows.
        caller: The line that calls the function around.
        axis: The mesh axis that splits the rows; "" where none does in these jaxprs.
        num_joined: How many neighbouring rows no split parts; 0: groups of rows are not looked for.
        expressions: Those of the jaxpr for few rows.
        known: The values of the variables before it in that jaxpr.
        in_trip: Whether each trip of a loop around has other rows than the others.
    """

    few: Any
    many: Any
    rows: int
    ratio: float
    trips_vary: bool = False
    caller: str = ""
    axis: str = ""
    num_joined: int = 0
    expressions: Expressions = field(default_factory=lambda: Expressions([]))
    known: Mapping[Any, Value] = field(default_factory=dict)
    in_trip: bool = False

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.few.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters, for few rows."""
        return self.few.params

    @property
    def line(self) -> str:
        """The user's line of code."""
        return source_line(self.few) or self.caller

    @property
    def is_of_library(self) -> bool:
        """Whether jaxpar's own code makes it."""
        return self.line.startswith(LIBRARY)

    def told(self, what: str) -> Reason:
        """Returns a reason with the operation and its line."""
        return Reason(what, self.name, self.line)

    @property
    def joins_rows(self) -> bool:
        """Whether it is a collective over the axis that splits the rows."""
        over = self.params.get("axes") or self.params.get("axis_name") or ()
        return bool(self.axis) and self.axis in ([over] if isinstance(over, str) else over)

    # Shapes -----------------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        """The number of its results."""
        return len(self.few.outvars)

    def in_shapes(self, at: int = 0) -> tuple[Shape, Shape]:
        """Returns the shapes of an operand, for few and for many rows."""
        return self.few.invars[at].aval.shape, self.many.invars[at].aval.shape

    def out_shapes(self, at: int = 0) -> tuple[Shape, Shape]:
        """Returns the shapes of a result, for few and for many rows."""
        return self.few.outvars[at].aval.shape, self.many.outvars[at].aval.shape

    def varying_in(self, at: int = 0) -> list[int]:
        """Returns the dims of an operand whose sizes differ: they hold rows."""
        return _differing(*self.in_shapes(at))

    def varying_out(self, at: int = 0) -> list[int]:
        """Returns the dims of a result whose sizes differ."""
        return _differing(*self.out_shapes(at))

    def keeps_places(self, at: int = 0) -> bool:
        """Whether a result may be another one at each place of a row, or in each trip of a loop over places."""
        return bool(self.varying_out(at)) or self.in_trip

    def parts_groups(self, size: Fraction | int) -> bool:
        """Whether a split parts some groups of so many neighbouring rows."""
        return size > 1 and self.num_joined > 0 and self.num_joined % size != 0

    def other_setting(self) -> str:
        """Returns the name of a setting, other than a size, that is another for more rows; "" if there is none."""
        few, many = self.few.params, self.many.params
        others = (name for name in few if name not in _SIZES and name in many)
        plain = (n for n in others if _is_plain(few[n]) and _is_plain(many[n]))
        name = next((n for n in plain if str(few[n]) != str(many[n])), "")
        if not name and not self.axis and self.name in _BY_DIM:
            name = self._other_size()
        return name

    def _other_size(self) -> str:
        """Returns what is other for more rows along a dim that holds none, but for a result of as many entries as rows."""
        of_rows = set(self.varying_in())
        longer = set() if of_rows else set(self.varying_out())
        kept = set(range(self.ndim_in(0))) - of_rows - longer
        if self.name == "split":
            is_apart = self.params["axis"] in kept and self.both("sizes")
            return "sizes" if is_apart and is_apart[0] != is_apart[1] else ""
        settings = _BY_DIM[self.name]
        differing = (s for s in settings for d in kept if len(set(self.params_of(s, d))) > 1)
        return next(differing, "")

    def leading_dims(self, span: Span, at: int = 0) -> frozenset[int]:
        """Returns the dims of rows by which a result has parts of its rows: ``[2, rows / 2]`` has two halves along dim 0."""
        few, _ = self.out_shapes(at)
        varying = [d for d in self.varying_out(at) if d in span.dims]
        return frozenset(d for d in span.dims if varying and 0 <= d < varying[0] and few[d] > 1)

    def changed_dims(self) -> list[int]:
        """Returns the dims of which the result has another size than the operand."""
        few = _differing(self.in_shapes()[0], self.out_shapes()[0])
        many = _differing(self.in_shapes()[1], self.out_shapes()[1])
        return sorted({*few, *many})

    def ndim_in(self, at: int) -> int:
        """Returns the number of dims of an operand."""
        return self.few.invars[at].aval.ndim

    def sizes_in(self, at: int, dims: Sequence[int]) -> tuple[int, int]:
        """Returns how many elements some dims of an operand have, for few and for many rows."""
        few, many = self.in_shapes(at)
        return math.prod(few[d] for d in dims), math.prod(many[d] for d in dims)

    def growth_of_size(self, at: int, dims: Sequence[int]) -> float:
        """Returns how many times more elements some dims of an operand have for many rows."""
        varying = [d for d in dims if d in self.varying_in(at)]
        few, many = self.sizes_in(at, varying)
        return many / few

    def both(self, name: str) -> tuple[Any, Any]:
        """Returns a parameter, for few and for many rows."""
        return self.few.params[name], self.many.params[name]

    def params_of(self, name: str, dim: int) -> tuple[int, int]:
        """Returns a parameter's entry for a dim, for few and for many rows."""
        return self.few.params[name][dim], self.many.params[name][dim]

    def is_float(self, at: int = 0) -> bool:
        """Whether a result is of real or complex numbers."""
        return jnp.issubdtype(self.few.outvars[at].aval.dtype, jnp.inexact)

    def reads_floats(self) -> bool:
        """Whether an operand is of real or complex numbers."""
        return any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in self.few.invars)

    # Results ----------------------------------------------------------------------------------

    def free(self, given: Values, at: int = 0) -> Value:
        """Returns a result of values that do not depend on rows."""
        place = max(v.place for v in given) if self.keeps_places(at) else Place.NONE
        is_same = place or all(v.growth == 1 for v in given)
        return Value(
            growth=1.0 if is_same else None,
            place=place,
            is_bound=any(v.is_bound for v in given),
            assumed=first_assumed(given),
            why=carried_on(first_why(given)),
        )

    def rows_at(
        self,
        given: Values,
        span: Span | None,
        growth: float | None = 1.0,
        at: int = 0,
    ) -> Value:
        """Returns a result that has rows at ``span``, each made of the same row; None: they are torn apart."""
        why = first_why(given)
        if span is None:
            return self.unknown(
                given,
                why or self.told(MOVED_APART),
                at,
            )
        place = max(v.place for v in given)
        if place and self.is_float(at) and not why:
            why = self.told(
                "it depends on the place of a row in its microbatch, where the batch can bring a key or number of each row"
            )
        return Value(
            Kind.ROWS,
            growth,
            span,
            place=place,
            why=why,
            assumed=first_assumed(given),
        )

    def mixed(
        self,
        given: Values,
        what: str,
        at: int = 0,
        *,
        is_sure: bool = False,
        is_bound: bool = False,
    ) -> Value:
        """Returns a result in which rows are mixed. If it is of integers, or of values in doubt, it is a doubt.

        Integers order and count rows where each is treated on its own after all, as by the routers of experts.
        """
        is_proved = self.is_float(at) or is_sure
        why = first_why(given)
        if why or not is_proved or any(v.kind is Kind.UNKNOWN for v in given):
            return self.unknown(given, why or self.told(what), at)
        return Value(
            Kind.MIXED,
            None,
            why=self.told(what),
            is_bound=is_bound,
        )

    def unknown(self, given: Values, why: Reason = NONE, at: int = 0) -> Value:
        """Returns a result of an operation that is not known: it is taken to have rows where its size says so."""
        mixed = [v for v in given if v.kind is Kind.MIXED]
        if mixed:
            is_bound = all(v.is_free or v.is_bound for v in given)
            return replace(mixed[0], is_bound=is_bound, root_of=None)
        dims = self.varying_out(at)
        if all(v.is_free for v in given):
            is_same = dims or all(v.growth == 1 for v in given)
            return Value(
                growth=1.0 if is_same else None,
                place=Place.OTHER if dims else Place.NONE,
                assumed=first_assumed(given),
                why=carried_on(first_why(given)),
            )
        span = self._guessed_span(given, dims, at)
        return (
            Value(Kind.UNKNOWN, None, why=why)
            if span is None
            else Value(Kind.ROWS, span=span, why=why)
        )

    def _guessed_span(self, given: Values, dims: list[int], at: int) -> Span | None:
        spans = [v.span for v in given if v.span is not None]
        if not dims:
            return next(
                (span for span in spans if span.in_loop),
                None,
            )
        shape, _ = self.out_shapes(at)
        guessed = span_of_shape(shape, dims, self.rows)
        known = [span for span in spans if set(dims) <= set(span.dims)]
        return next((span for span in known if _is_repeated(span, shape, self.rows)), guessed)

    # Sums -------------------------------------------------------------------------------------

    def is_like_a_sum(self, value: Value, of_sum: Value) -> bool:
        """Whether a constant is larger for more rows as a sum over them is, so that it may be added to one."""
        if of_sum.growth is None:
            return False
        return same_growth(value.growth, of_sum.growth * self.ratio)


def span_of_shape(shape: Shape, dims: Sequence[int], rows: int) -> Span:
    """Returns where an array has rows whose dims of these numbers differ with the number of rows."""
    size = math.prod(shape[dims[0] : dims[-1] + 1])
    return Span(dims[0], dims[-1], inner=Fraction(size, rows))


def _is_plain(setting: Any) -> bool:
    """Whether a setting is a number, a name or a dtype, or a tuple of these."""
    if isinstance(setting, tuple):
        return all(map(_is_plain, setting))
    return isinstance(setting, bool | int | float | str | np.dtype)


def _is_repeated(span: Span, shape: Shape, rows: int) -> bool:
    """Whether an array has the rows of a span as often as it says."""
    size = math.prod(shape[d] for d in span.dims if 0 <= d < len(shape))
    return span.outer == 1 or size == span.outer * rows * span.inner


def groups_of(op: Operation) -> list[tuple[list[int], list[int]]]:
    """Returns which neighbouring dims a reshape makes of which, for few rows and for many.

    [2, 6, 5] -> [12, 5]    ([0, 1], [0]), ([2], [1])
    """
    pairs = list(zip(op.in_shapes(), op.out_shapes(), strict=True))
    old, new = pairs[0]
    groups, before, after = [], list(range(len(old))), list(range(len(new)))
    if any(0 in shape for pair in pairs for shape in pair):
        return [(before, after)]
    while before or after:
        taken, made = before[:1], [] if before else after[:1]
        before, after = before[len(taken) :], after[len(made) :]
        while sign := _larger(pairs, taken, made):
            if sign > 0:
                taken.append(before.pop(0))
            else:
                made.append(after.pop(0))
        groups.append((taken, made))
    return groups


def _larger(pairs: Sequence[tuple[Shape, Shape]], taken: Sequence[int], made: Sequence[int]) -> int:
    """Returns 1 where the dims that are made are the larger ones, -1 where those that are taken are, 0 for equal sizes."""
    sizes = ((_product(new, made), _product(old, taken)) for old, new in pairs)
    return next((1 if after > before else -1 for after, before in sizes if after != before), 0)


def _product(shape: Shape, dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


def _differing(few: Shape, many: Shape) -> list[int]:
    return [d for d, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
