"""The rule by which values that depend on no row come to depend on the places of rows, besides ``iota`` and constants.

    table[: len(h)]                 a slice that has as many entries as rows, of a table that has not
    table.reshape(len(h), -1)       a table that is cut into as many parts as there are rows
    jnp.pad(w, (0, len(h) - 3))     the first entries are others than the last
    jnp.cumsum(jnp.ones(len(h)))    what is added up has as many terms as the place says

Copies of one number are none of these: ``jnp.ones(9)[: len(h)]`` is the same at all places. A function of the indices of rows,
such as ``(jnp.arange(len(h)) + 1) % len(h)``, is no longer the index of each row, by which a row reads itself.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxpar.row_dependence.operation import Operation
from jaxpar.row_dependence.values import ZERO, Kind, Place, Value, Values

Dims = Collection[int]


class _Makes(NamedTuple):
    """How an operation makes entries that differ by their places.

    Attributes:
        names: The operations.
        dims: Returns the dims along which entries differ.
        of: The operands whose entries the result has.
        adds: Whether it adds them up, so that many are another number than one.
        of_logarithms: Whether many zeros are no zero.
    """

    names: str
    dims: Callable[[Operation], Dims]
    of: slice = slice(1)
    adds: bool = False
    of_logarithms: bool = False


def placed(op: Operation, given: Values, made: Sequence[Value]) -> list[Value]:
    """Returns the results of an operation on values without rows: those that now depend on places say so."""
    made = _no_longer_indices(op, given, made)
    made = [_without_rows(op, given, value, at) for at, value in enumerate(made)]
    makes = _BY_NAME.get(op.name)
    if makes is None or _are_copies(makes, given):
        return list(made)
    if not all(value.is_free for value in given):
        return list(made)
    differing = set(makes.dims(op))
    results = []
    for at, value in enumerate(made):
        differs = differing & set(op.varying_out(at))
        is_new = value.is_free and not value.place
        growth = 1.0 if value.growth is None else value.growth
        by_place = replace(value, growth=growth, place=Place.OTHER)
        results.append(by_place if differs and is_new else value)
    return results


def _without_rows(op: Operation, given: Values, value: Value, at: int) -> Value:
    """Returns a result; of one that has no longer a dim for rows, it is not known how it depends on their number.

    Neither is that of an element that is read, or written, at an index which depends on the number of rows.
    """
    varying = [v for i, v in enumerate(given) if op.varying_in(i)]
    had_places = any(v.place for v in varying) or (varying and op.name not in _OF_COPIES)
    is_left = op.keeps_places(at)
    is_whole = op.name == "reshape"  # of what all devices have
    is_lost = had_places and not is_left and not is_whole
    is_elsewhere = _index_depends_on_number(op, given)
    if is_elsewhere and value.kind in (Kind.ROWS, Kind.SUM):
        why = value.why or op.told("which elements it takes depends on the number of rows")
        return replace(value, why=why)
    if not (is_lost or is_elsewhere) or not value.is_free or value.number:
        return value
    return replace(value, growth=None, place=value.place if op.varying_out(at) else Place.NONE)


def _index_depends_on_number(op: Operation, given: Values) -> bool:
    indices = given[_INDICES.get(op.name, slice(0, 0))]
    return any(v.is_free and v.growth != 1 and not v.place for v in indices)


# Which operands are indices.
_INDICES = {
    "gather": slice(1, 2),
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        slice(1, 2),
    ),
}
# What makes of copies of one element that element again, or what their number says.
_OF_COPIES = frozenset(
    (
        *("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_sum", "reduce_prod"),
        *("argmax", "argmin", "slice", "dynamic_slice", "gather", "squeeze", "reshape", "split"),
        *("unstack", "dot_general", "broadcast_in_dim", "stop_gradient", "psum", "pmax", "pmin"),
        *("all_gather", "all_to_all", "ppermute", "axis_index", "sort", "top_k"),
        *("pure_callback", "io_callback"),  # whose authors are believed
    )
)


def _no_longer_indices(op: Operation, given: Values, made: Sequence[Value]) -> list[Value]:
    """Returns the results, which are the index of each row only where the operation leaves an index what it was."""
    had_indices = any(Place.NONE < value.place < Place.OTHER for value in given)
    if not had_indices or (op.name in _KEEP_INDICES and _keeps_rows_apart(op)):
        return list(made)
    place = _place_of_sum(op, given)
    other = lambda value: replace(value, place=place) if value.place else value
    return list(map(other, made))


def _keeps_rows_apart(op: Operation) -> bool:
    """Whether the dim of rows is what it was: not one that is merged with another one, or made of two."""
    few, many = op.out_shapes()
    sizes = {(few[d], many[d]) for d in op.varying_out()}
    operands = range(len(op.few.invars))
    before = [(shapes, op.varying_in(at)) for at in operands for shapes in [op.in_shapes(at)]]
    own = {tuple(shape[d] for shape in shapes) for shapes, dims in before for d in dims}
    return sizes <= own


def _place_of_sum(op: Operation, given: Values) -> Place:
    """Returns what indices become: an index below 0 counts from the end, so JAX adds the number of rows to such a one."""
    if op.name not in ("add", "sub") or len(op.varying_out()) != 1:
        return Place.OTHER
    dim = op.varying_out()[0]
    sizes = tuple(shape[dim] for shape in op.out_shapes())
    index, number = given if op.name == "sub" else sorted(given, key=lambda v: bool(v.number))
    if number.number != sizes:
        return Place.OTHER
    return _SUMS.get((op.name, index.place), Place.OTHER)


_SUMS = {
    ("sub", Place.INDEX): Place.FROM_END,
    ("add", Place.FROM_END): Place.INDEX,
    ("add", Place.INDEX): Place.PAST_END,
}


def _are_copies(makes: _Makes, given: Values) -> bool:
    """Whether a result is one number at all places."""
    numbers = {value.number for value in given[makes.of]}
    if numbers == {ZERO.number} and not makes.of_logarithms:
        return True
    is_one = len(numbers) == 1 and None not in numbers
    return is_one and not makes.adds


def _made_longer(op: Operation) -> Dims:
    """The dims along which a part has as many entries as rows, and the whole has not."""
    return set(op.varying_out()) - set(op.varying_in())


def _padded(op: Operation) -> Dims:
    config = op.params["padding_config"]
    return [dim for dim, widths in enumerate(config) if any(widths)]


def _joined(op: Operation) -> Dims:
    """The dim along which arrays are joined of which not all have rows there."""
    axis = op.params["dimension"]
    have_rows = [axis in op.varying_in(at) for at in range(len(op.few.invars))]
    return [] if all(have_rows) else [axis]


def _cut(op: Operation) -> Dims:
    """The dims of a table that is cut into as many parts as there are rows."""
    return [] if op.varying_in() else op.varying_out()


def _gathered(op: Operation) -> Dims:
    return [] if op.varying_in() else op.params["dimension_numbers"].offset_dims


def _written(op: Operation) -> Dims:
    return op.params["dimension_numbers"].scatter_dims_to_operand_dims


def _updated(op: Operation) -> Dims:
    whole, _ = op.in_shapes(0)
    part, _ = op.in_shapes(1)
    return [dim for dim in range(len(whole)) if whole[dim] != part[dim]]


def _summed(op: Operation) -> Dims:
    return [op.params["axis"]]


def _transformed(op: Operation) -> Dims:
    ndim = op.ndim_in(0)
    return range(ndim - len(op.params["fft_lengths"]), ndim)


def _of_matrix(op: Operation) -> Dims:
    return range(op.ndim_in(0))


def _windows(op: Operation) -> Dims:
    sizes = op.params["window_dimensions"]
    return [dim for dim, size in enumerate(sizes) if size > 1]


_KEEP_INDICES = frozenset(
    (
        *(
            "broadcast_in_dim",
            "concatenate",
            "convert_element_type",
            "copy",
            "optimization_barrier",
        ),
        *("reshape", "select_n", "sharding_constraint", "squeeze", "stop_gradient", "transpose"),
    )
)
_ALL_BUT_INDEX = slice(0, 3, 2)
_TABLE = (
    _Makes("slice dynamic_slice split", _made_longer),
    _Makes("reshape", _cut),
    _Makes("pad", _padded, of=slice(2)),
    _Makes("concatenate", _joined, of=slice(None)),
    _Makes("gather", _gathered),
    _Makes("scatter scatter-min scatter-max", _written, of=_ALL_BUT_INDEX),
    _Makes(
        "scatter-add scatter-sub scatter-mul",
        _written,
        of=_ALL_BUT_INDEX,
        adds=True,
    ),
    _Makes("dynamic_update_slice", _updated, of=slice(2)),
    _Makes("cumsum cumprod", _summed, adds=True),
    _Makes("cumlogsumexp", _summed, adds=True, of_logarithms=True),
    _Makes("fft", _transformed, adds=True),
    _Makes("cholesky lu qr eig eigh svd schur hessenberg", _of_matrix, adds=True),
    _Makes("reduce_window reduce_window_sum", _windows, adds=True),
)
_BY_NAME = {name: makes for makes in _TABLE for name in makes.names.split()}
