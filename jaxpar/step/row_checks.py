"""The checks that a model treats rows apart and that a loss is a sum over them, since rows are split among microbatches.

Both sums of a loss are added over microbatches and replicas:

    jnp.sum(errors), jnp.float32(len(errors))    a sum over rows and their number: accepted
    jnp.mean(errors), 1.0                        both divided by the number of rows, so their ratio is the same: accepted
    jnp.sum(errors), 1.0                         the ratio would be divided by the number of microbatches: refused
    jnp.sum(errors) + 5 * jnp.mean(h), len(h)    each microbatch would add a mean of its own: refused

A row must not depend on others, nor a leaf of ``x`` without rows on rows:

    h - h.mean(-1)      of each row: accepted
    h - h.mean(0)       of the batch: refused
    x["aux"] + sum(h)   a sum over rows, of which the loss is one: accepted
    x["aux"] + mean(h)  another in each microbatch: refused, if the loss adds it to a sum

What is proved to be wrong is refused, before anything is compiled. What is not known to be right is taken, with one warning
that names the line of code. ``row_dependence`` proves it.

``position_checks.py`` does the same for sequences that ``context`` splits.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar._compat import equations, is_squeeze_of_user, source_line
from jaxpar.layered_model import (
    LAYERS,
    OUTER,
    LayeredModel,
    is_stacked,
    num_layers,
)
from jaxpar.row_dependence import (
    Kind,
    Reader,
    Reason,
    Value,
    span_of_shape,
    traced,
)
from jaxpar.row_dependence.values import same_growth
from jaxpar.step.purity import check_pure

Model = LayeredModel | Callable[[PyTree, PyTree], PyTree]

NO_SUMS = (Kind.MIXED, Kind.ROWS)

_FOR_ONE = 7  # rows that are read in place of one
_GROUPS = (2, 3, 4, 5, 8)  # rows in a group that a loss may take together


def check_rows(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    num_parts: int,
) -> None:
    """Raises if the loss, a metric or a gradient would depend on how rows are split; warns where it may.

    Refused is what is proved to be wrong and reaches the loss. Traces, computes nothing.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with a dict of further sums.
        params: Arrays or ShapeDtypeStructs.
        batch: Likewise.
        num_parts: The number of microbatches of all replicas; with one nothing is split and nothing is refused.
    """
    if num_parts == 1:
        return
    shapes = shapes_of(params), shapes_of(batch)
    num_rows = num_rows_of(batch)
    own = num_rows // num_parts
    sizes = _two_sizes(own, num_rows)
    found = _of_sizes(model, loss, *shapes, sizes)
    by_row = None
    if found is None and own == 1:
        found, by_row = _of_groups(model, loss, *shapes)
    if found is None:
        doubts = [Reason(f"model and loss take no {sizes[0]} and no {sizes[1]} rows")]
    else:
        try:
            _refuse_parts(found)
            _refuse_sums(found)
            _refuse_groups(by_row)
        except ValueError:
            check_pure(model, loss, params, batch)
            raise
        doubts = found.doubts
    if own == 1:
        doubts = [*doubts, *_squeezes_of_one_row(model, loss, *shapes)]
    if doubts and jax.process_index() == 0:
        warnings.warn(_warning(doubts), stacklevel=2)


def _two_sizes(own: int, num_rows: int) -> tuple[int, int]:
    """Returns the rows of a microbatch and of the batch.

    One row is no number, since its dim may be another's: seven are read in its place, which are no groups of rows either.
    """
    few = own if own > 1 else _FOR_ONE
    return few, num_rows if num_rows > few else 2 * few


def _of_sizes(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    sizes: tuple[int, int],
    num_joined: int = 0,
) -> "Found | None":
    """Returns how the loss depends on the rows, from two numbers of them; None if model and loss take no such numbers."""
    few, many = sizes
    batches = [resized(batch, size) for size in sizes]
    reader = Reader(few, many / few, num_joined=num_joined)
    return examine(model, loss, params, batches, reader)


def _squeezes_of_one_row(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
) -> list[Reason]:
    """Returns where the dim of rows is taken away in a microbatch of one row, as ``jnp.squeeze(h)`` does, and of no other."""
    batches = [resized(batch, size) for size in (1, _FOR_ONE)]
    try:
        parts = list(_trace(model, loss, params, batches, (nullcontext, nullcontext)))
    except Exception:  # any error that a model raises for another number of rows than its own
        return []
    what = "it takes the dim of rows away where a microbatch has one row"
    doubts = []
    for part in parts:
        of_one, of_others = (Counter(map(source_line, _squeezes(each))) for each in part.jaxprs)
        lines = of_one - of_others
        doubts += [Reason(what, "squeeze", line, part.name) for line in lines]
    return doubts


def _squeezes(jaxpr: Any) -> list[Any]:
    return list(filter(is_squeeze_of_user, equations(jaxpr)))


def _of_groups(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
) -> "tuple[Found | None, Found | None]":
    """Returns the same of a model that takes rows in groups, and of one whose groups are split into microbatches of a row."""
    for size in _GROUPS:
        few = size * _FOR_ONE
        sizes = few, 2 * few
        found = _of_sizes(model, loss, params, batch, sizes)
        if found is not None:
            return found, _of_sizes(model, loss, params, batch, sizes, num_joined=1)
    return None, None


# What is found --------------------------------------------------------------------------------


@dataclass
class Found:
    """How a loss depends on the rows.

    Attributes:
        ratio: How many times more rows the batch has than a microbatch.
        sums: The values of what the loss returns: loss_sum, weight_sum and further sums.
        names: The names of these sums.
        part_of: Of each operation that mixes rows in the model, the part that it is in.
        doubts: What is taken though it may be wrong.
        by_place: Of these, what depends on the places of rows in a microbatch, or on a device.
        joins_rows: Whether collectives join the rows of all devices: what is not known may then be the same on all.
    """

    ratio: float
    sums: list[Value] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    part_of: dict[Reason, str] = field(default_factory=dict)
    doubts: list[Reason] = field(default_factory=list)
    by_place: list[Reason] = field(default_factory=list)
    joins_rows: bool = False

    def doubt(self, value: Value, part: str) -> None:
        """Notes what is in doubt about a value that a part returns."""
        if value.kind is not Kind.MIXED:
            new = [each._replace(part=part) for each in (value.why, value.assumed) if each]
            self.doubts += [each for each in new if each not in self.doubts]
            if value.place:
                self.by_place += [each for each in new if each not in self.by_place]

    def mixed_on_the_way(self) -> tuple[str, Reason] | None:
        """Returns the part of the model that mixes rows which reach the loss, and how it does; None if none does."""
        whys = (value.why for value in self.sums if value.kind is Kind.MIXED)
        return next(((self.part_of[why], why) for why in whys if why in self.part_of), None)

    def settled(
        self,
        value: Value,
        part: str,
        shapes: tuple[Any, Any],
        rows: int,
    ) -> Value:
        """Returns the value that the next part is given; what is in doubt is noted, and then taken to be right."""
        is_leaf_of_x = part in ("embed", "layer")
        if is_leaf_of_x and value.kind is Kind.UNKNOWN:  # without rows, and yet of rows
            value = (
                Value(growth=None) if self.joins_rows else Value(Kind.MIXED, None, why=value.why)
            )
        self.doubt(value, part)
        if value.kind is Kind.MIXED:
            self.part_of.setdefault(value.why, part)
            return value
        if value.kind is not Kind.ROWS:
            return value
        return rows_of(shapes, rows) if value.why else replace(value, assumed="")

    def power(self, value: Value) -> float | None:
        """Returns the factor of a sum over rows, few / many for a mean; None: not known."""
        if value.growth is None or value.is_zero or value.kind not in (Kind.FREE, Kind.SUM):
            return None
        return value.growth / self.ratio if value.is_free else value.growth

    def disagree(self, a: Value, b: Value) -> bool:
        """Whether two sums are known to grow differently with the number of rows."""
        powers = self.power(a), self.power(b)
        return None not in powers and not same_growth(*powers)

    def described(self, value: Value) -> Reason:
        """Returns what a sum is, in words, and the operation that makes it another than a sum."""
        if value.kind is Kind.MIXED:
            return value.why._replace(what=f"no sum over rows: {value.why.what}")
        if value.kind is Kind.ROWS:
            return Reason("a number for each row")
        power = self.power(value)
        if same_growth(power, 1.0):
            what = "a multiple of the number of rows" if value.is_free else "a sum over rows"
        elif same_growth(power, 1 / self.ratio):
            what = "the same for any number of rows" if value.is_free else "a mean over rows"
        else:
            what = "a sum over rows times what depends on their number"
        return Reason(what)


@dataclass(frozen=True)
class _Traced:
    """A part of the model, or the loss, traced for both numbers of rows.

    Attributes:
        name: The name of the part.
        jaxprs: The jaxprs for few and for many rows.
        num_params: The number of leaves of its params, which come first.
        count: How often it is applied.
        returned: The shapes that it returns, for few and for many rows.
    """

    name: str
    jaxprs: tuple[Any, Any]
    num_params: int
    count: int
    returned: tuple[PyTree, PyTree]


def examine(
    model: Model,
    loss: Callable,
    params: PyTree,
    batches: Sequence[PyTree],
    reader: Reader,
    within: Sequence[Callable[[], AbstractContextManager]] = (nullcontext, nullcontext),
) -> Found | None:
    """Returns how the loss depends on the rows; None if model and loss take no such numbers of rows.

    Args:
        model: The model.
        loss: The loss.
        params: ShapeDtypeStructs.
        batches: The batch with few rows and with many, as ShapeDtypeStructs.
        reader: Reads the jaxprs.
        within: What makes the contexts in which both are traced.
    """
    try:
        *parts, of_loss = _trace(model, loss, params, batches, within)
    except Exception:  # any error that a model raises for another number of rows than its own
        return None
    found = Found(reader.ratio, joins_rows=bool(reader.axis))
    of_batch = [rows_of(pair, reader.rows) for pair in pairs_of(batches)]
    values = of_batch
    for part in parts:
        values = _after(part, values, reader, found)
    found.sums = reader.read(*of_loss.jaxprs, [*values, *of_batch])
    found.names = [
        _name(path) for path, _ in jax.tree_util.tree_leaves_with_path(of_loss.returned[0])
    ]
    for at, value in enumerate(found.sums):
        found.doubt(value, "loss")
        kinds = (Kind.FREE,) if reader.axis else (Kind.FREE, Kind.SUM)
        if value.growth is None and value.kind in kinds:
            name = found.names[at] or ("loss_sum", "weight_sum")[at]
            what = f"how {name} depends on the number of rows"
            found.doubts.append(Reason(what, part="loss"))
    return found


def _name(path: tuple[Any, ...]) -> str:
    """Returns the name of a further sum, from its path in what a loss returns."""
    return jax.tree_util.keystr(path[1:], simple=True, separator="/")


def _trace(
    model: Model,
    loss: Callable,
    params: PyTree,
    batches: Sequence[PyTree],
    within: Sequence[Callable[[], AbstractContextManager]],
) -> Iterator[_Traced]:
    """Yields the parts of the model, and then the loss."""
    x = batches[0], batches[1]
    for name, function, own, count in _parts(model, params):
        jaxprs, x = traced(function, (own, x[0]), (own, x[1]), within)
        num_params = len(jax.tree.leaves(own))
        yield _Traced(name, jaxprs, num_params, count, x)
    jaxprs, returned = traced(loss, (x[0], batches[0]), (x[1], batches[1]), within)
    yield _Traced("loss", jaxprs, 0, 1, returned)


def pairs_of(
    trees: Sequence[PyTree],
) -> list[tuple[Any, Any]]:
    """Returns the leaves of two trees side by side."""
    return list(zip(*map(jax.tree.leaves, trees), strict=True))


def _after(
    part: _Traced,
    values: list[Value],
    reader: Reader,
    found: Found,
) -> list[Value]:
    """Returns the values that a part returns, applied as often as the model does."""
    of_params = [Value()] * part.num_params
    for _ in range(part.count):
        before = values
        made = reader.read(*part.jaxprs, [*of_params, *before])
        settled = zip(made, pairs_of(part.returned), strict=True)
        values = [found.settled(value, part.name, shapes, reader.rows) for value, shapes in settled]
        if values == before:
            break
    return values


def _parts(model: Model, params: PyTree) -> Iterator[tuple[str, Callable, PyTree, int]]:
    """Yields the functions that make up the model: name, function, params, and how often it is applied."""
    if not isinstance(model, LayeredModel):
        yield "model", model, params, 1
        return
    outer, layers = params[OUTER], params[LAYERS]
    count = num_layers(params)
    yield "embed", model.embed, outer, 1
    if is_stacked(params):
        first = jax.eval_shape(
            lambda layers: jax.tree.map(lambda p: p[0], layers),
            layers,
        )
        yield "layer", model.layers(1)[0], first, count
    else:
        yield from (("layer", *each, 1) for each in zip(model.layers(count), layers, strict=True))
    yield "head", model.head, outer, 1


# What is refused ------------------------------------------------------------------------------


def _refuse_parts(found: Found) -> None:
    """Raises if rows that a part of the model mixes reach the loss."""
    if mixed := found.mixed_on_the_way():
        part, why = mixed
        raise ValueError(
            f"{part} must treat each row of a batch on its own, since rows are split into microbatches and replicas; got "
            f"one that mixes them, on the way to the loss: {why}. Normalize over other dims than rows, as LayerNorm "
            "does; give a leaf of x a number for each row, of shape [rows], and sum it in the loss; or mark a function "
            "that treats rows on their own after all with jaxpar.row_wise."
        )


def _refuse_sums(found: Found) -> None:
    """Raises if the loss returns other than sums over rows."""
    loss_sum, weight_sum, *sums = found.sums
    is_wrong = any(value.kind in NO_SUMS for value in (loss_sum, weight_sum))
    if is_wrong or found.disagree(loss_sum, weight_sum):
        raise ValueError(
            "loss_sum and weight_sum must be sums over the rows that the loss is given, since both are added over microbatches "
            f"and replicas; got loss_sum {found.described(loss_sum)}, and weight_sum {found.described(weight_sum)}. Return "
            "jnp.sum of the losses of rows, and jnp.sum of their weights or the number of these rows, such as "
            "jnp.float32(len(outputs)). Make a term that is a mean a sum over rows, and multiply a penalty of params by "
            "weight_sum. What needs all rows, such as counts of classes or a mean to subtract, compute before the step and put "
            "into the batch, a number for each row."
        )
    for name, each in zip(found.names[2:], sums, strict=True):
        if each.kind in NO_SUMS or found.disagree(each, weight_sum):
            raise ValueError(
                "each sum of a loss must be one over the rows that the loss is given, since it is added over microbatches and "
                f"replicas, and divided by weight_sum; got {name!r}, {found.described(each)}, and weight_sum, "
                f"{found.described(weight_sum)}. Return jnp.sum of it over the rows, or leave it out."
            )


def _refuse_groups(found: Found | None) -> None:
    """Raises if groups of rows, such as pairs, are split into microbatches of one row."""
    if found is None:
        return
    whys = [value.why for value in found.sums if value.kind is Kind.MIXED]
    if whys:
        raise ValueError(
            "a microbatch must have all rows of a group that the loss takes together, such as the two of a pair; got "
            f"microbatches of one row, and code that takes rows in groups: {whys[0]}. Use fewer microbatches or replicas, or "
            "a batch of more rows, so that each microbatch has whole groups."
        )


def _warning(doubts: Sequence[Reason]) -> str:
    return (
        "each row of a batch must be treated on its own and a loss must be a sum over rows, since rows are split into "
        f"microbatches and replicas; got code of which that is not known: {'; '.join(map(str, doubts))}. It is taken "
        "to be right. Compare numbers with jaxpar.check_split, and mark a function that treats rows on their own with "
        "jaxpar.row_wise."
    )


# Shapes ---------------------------------------------------------------------------------------


def shapes_of(tree: PyTree) -> PyTree:
    """Returns a tree with its arrays as ShapeDtypeStructs."""
    return jax.eval_shape(lambda tree: tree, tree)


def rows_of(shapes: tuple[Any, Any], rows: int) -> Value:
    """Returns the value of an array that has rows where its shapes differ, and if they do not, none."""
    few, many = (each.shape for each in shapes)
    dims = [d for d, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
    return Value(Kind.ROWS, span=span_of_shape(few, dims, rows)) if dims else Value()


def num_rows_of(batch: PyTree) -> int:
    """Returns the number of rows of a batch."""
    return jax.tree.leaves(batch)[0].shape[0]


def resized(batch: PyTree, num_rows: int) -> PyTree:
    """Returns the shapes of a batch with another number of rows."""
    of = lambda leaf: jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype)
    return jax.tree.map(of, batch)
