"""Along which dims a value that depends on no row is one element, copied.

jnp.broadcast_to(bias, (2, n, 3))      [2, n, 3] of [3]: copied along 0 and 1
jnp.broadcast_to(sign, (2, n))         [2, n] of [2, 1]: copied along 1, and another element in each half of the rows
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxpar.row_dependence.operation import Operation, groups_of
from jaxpar.row_dependence.products import dims_of_product
from jaxpar.row_dependence.rules import OF_ELEMENTS
from jaxpar.row_dependence.values import Value, Values

Dims = frozenset[int]


def with_copies(op: Operation, given: Values, made: Sequence[Value]) -> list[Value]:
    """Returns the results of an operation; those that depend on no row say along which dims they are copies."""
    find = _elements if op.name in OF_ELEMENTS else _BY_NAME.get(op.name, _of_none)
    copied = find(op, given) if all(value.is_free for value in given) else frozenset()
    return [replace(value, copied=copied) if value.is_free else value for value in made]


def _of_none(op: Operation, given: Values) -> Dims:
    return frozenset()


def _elements(op: Operation, given: Values) -> Dims:
    return frozenset.intersection(*(value.copies for value in given)) if given else frozenset()


def _of_broadcast(op: Operation, given: Values) -> Dims:
    kept = set()
    few, many = op.in_shapes()
    for old, new in enumerate(op.params["broadcast_dimensions"]):
        is_one = few[old] == many[old] == 1
        if not is_one and old not in given[0].copies:
            kept.add(new)
    return _all_dims(op) - kept


def _all_dims(op: Operation) -> Dims:
    few, _ = op.out_shapes()
    return frozenset(range(len(few)))


def _of_transpose(op: Operation, given: Values) -> Dims:
    order = op.params["permutation"]
    return frozenset(new for new, old in enumerate(order) if old in given[0].copies)


def _of_reduction(op: Operation, given: Values) -> Dims:
    axes = op.params["axes"]
    left = [dim for dim in range(op.ndim_in(0)) if dim not in axes]
    copies = given[0].copies
    return frozenset(new for new, old in enumerate(left) if old in copies)


def _of_reshape(op: Operation, given: Values) -> Dims:
    found = set()
    for before, after in groups_of(op):
        if given[0].copies.issuperset(before):
            found.update(after)
    return frozenset(found)


def _of_join(op: Operation, given: Values) -> Dims:
    return _elements(op, given) - {op.params["dimension"]}


def _of_slice(op: Operation, given: Values) -> Dims:
    return given[0].copies


def _of_product(op: Operation, given: Values) -> Dims:
    found = set(_all_dims(op))
    for at, value in enumerate(given):
        places = dims_of_product(op, at)
        found.difference_update(to for dim, to in enumerate(places) if dim not in value.copies)
    return frozenset(found)


def _of_convolution(op: Operation, given: Values) -> Dims:
    numbers = op.params["dimension_numbers"]
    is_of_copies = numbers.lhs_spec[0] in given[0].copies
    return frozenset(numbers.out_spec[:1]) if is_of_copies else frozenset()


def _of_indices(op: Operation, given: Values) -> Dims:
    return _all_dims(op) - {op.params["dimension"]}


_BY_NAME: dict[str, Callable[[Operation, Values], Dims]] = {
    "broadcast_in_dim": _of_broadcast,
    "transpose": _of_transpose,
    **dict.fromkeys(("reduce_sum", "reduce_prod", "reduce_and", "reduce_or"), _of_reduction),
    "reduce_max": _of_reduction,
    "reduce_min": _of_reduction,
    "reshape": _of_reshape,
    "squeeze": _of_reshape,
    "concatenate": _of_join,
    "slice": _of_slice,
    "dot_general": _of_product,
    "conv_general_dilated": _of_convolution,
    "iota": _of_indices,
}
