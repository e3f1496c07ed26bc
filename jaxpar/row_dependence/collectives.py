"""The rules of collectives over the axis that splits the rows: what devices join no longer depends on which rows each has.

    psum a          a is SUM     FREE    the sum over the rows of all devices
    all_gather a    a has ROWS   FREE    the rows of all devices
    all_to_all a    a has ROWS   FREE    and of such a value, the rows of a device again
    psum a          a is FREE    FREE    as many times as there are devices
    psum a          a has ROWS   MIXED   rows of one device and others of another are added

Collectives over other axes leave rows where they are. A value that a device sends to another one is not known. A sequence is
cut into pairs of chunks, which `jaxpar.context_parallel` puts in order again: code that numbers the devices itself, or joins
what they have, is a doubt.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxpar._compat import source_line
from jaxpar.row_dependence.elements import elementwise
from jaxpar.row_dependence.operation import LIBRARY, Operation, carried_on, span_of_shape
from jaxpar.row_dependence.values import (
    BY_PART,
    NONE,
    NOT_KNOWN,
    OF_DEVICES,
    Kind,
    Place,
    Reason,
    Value,
    Values,
    first_why,
    product_of_growths,
)

_NOT_KNOWN = Value(Kind.UNKNOWN, None)
_BY_OWN_PLACE = "it joins what depends on the place of a row in its device"


def summed(op: Operation, given: Values) -> list[Value]:
    """Of the sums over devices."""
    if not op.joins_rows:
        return list(given)
    return [_sum_of_devices(op, value, at) for at, value in enumerate(given)]


def _sum_of_devices(op: Operation, value: Value, at: int) -> Value:
    if value.kind is Kind.SUM:  # what one device subtracts does not cancel in a sum over devices
        return Value(growth=value.growth, why=value.why or carried_on(value.assumed))
    if value.is_free:
        growth = product_of_growths(value.growth, 1 / op.ratio)
        return Value(growth=growth, why=_without_places(op, value).why)
    return _of_all_devices(op, value, at)


def largest(op: Operation, given: Values) -> list[Value]:
    """Of the largest, or smallest, values of all devices; over another axis that of sums is no sum."""
    values = enumerate(given)
    if not op.joins_rows:
        return [elementwise(op, [value], at) for at, value in values]
    return [_largest_of_devices(op, value, at) for at, value in values]


def _largest_of_devices(op: Operation, value: Value, at: int) -> Value:
    if value.is_bound:  # of the whole sequence: it cancels wherever one device's may not
        return Value(why=value.why if value.is_free else NONE)
    if value.is_free:
        return _without_places(op, value)
    if value.kind is Kind.SUM:
        why = value.why or op.told("it takes the largest of what each device has added up")
        return replace(_NOT_KNOWN, why=why)
    return _of_all_devices(op, value, at)


def _of_all_devices(op: Operation, value: Value, at: int) -> Value:
    if value.kind is Kind.ROWS:
        return op.mixed([value], "it joins rows of one device and others of another", at)
    return _joined(op, value)


def _joined(op: Operation, value: Value) -> Value:
    """Of what mixes the rows of a device: it may be made right later, as parts of a softmax are."""
    if value.kind is Kind.MIXED:
        why = op.told("it joins over the devices what mixes the rows of each")
        return replace(_NOT_KNOWN, why=why)
    return replace(_NOT_KNOWN, why=carried_on(value.why))


def _without_places(op: Operation, value: Value) -> Value:
    """Returns what devices join of a value that all have: it is in doubt if it numbers the rows of each."""
    if not value.place:
        return value
    return replace(value, place=Place.NONE, why=value.why or op.told(_BY_OWN_PLACE))


def gathered(op: Operation, given: Values) -> Value:
    """Of the values of all devices, side by side."""
    (value,) = given
    if not op.joins_rows:
        return op.unknown(given, op.told(NOT_KNOWN))
    if value.is_free:
        is_same = not op.varying_out()
        why = NONE if is_same else op.told("it joins what is the same on all devices")
        return _without_places(op, replace(value, why=value.why or why))
    if value.kind is not Kind.ROWS:
        return _joined(op, value)
    few, many = map(math.prod, op.out_shapes())
    is_of_rows = op.params["all_gather_dimension"] in value.rows.dims
    if few != many or not is_of_rows:  # all rows are as many for any number of devices
        why = value.why or op.told("it joins the rows of all devices, and others of each")
        return op.unknown(given, why)
    return _in_order_of_devices(op, value)


def _in_order_of_devices(op: Operation, value: Value) -> Value:
    why = NONE if op.is_of_library else op.told("it joins rows in the order of the devices")
    return Value(growth=value.growth, why=value.why or carried_on(value.assumed) or why)


def exchanged(op: Operation, given: Values) -> Value:
    """Of a part of the values of each device."""
    (value,) = given
    if not op.joins_rows:
        return op.unknown(given, op.told(NOT_KNOWN))
    if value.kind is Kind.ROWS:
        return _in_order_of_devices(op, value)
    if not value.is_free:
        return _joined(op, value)
    dims = op.varying_out()
    if len(dims) != 1:
        return replace(_NOT_KNOWN, why=value.why)
    shape, *_ = op.out_shapes()
    span = span_of_shape(shape, dims, op.rows)
    why = op.told(BY_PART) if value.place else NONE
    of_rows = replace(value, growth=1.0, why=why)
    return op.rows_at([of_rows], span, value.growth)


def sent(op: Operation, given: Values) -> list[Value]:
    """Of what other devices send, and of the number of the device."""
    count = op.num_outputs
    if op.joins_rows:
        why = NONE if op.is_of_library else op.told("it depends on the number of a device")
        return [replace(_NOT_KNOWN, why=why)] * count
    if not given:
        return [Value()] * count
    why = op.told(NOT_KNOWN)
    return [op.unknown(given, why, at) for at in range(count)]


def own_rows(op: Operation) -> Value:
    """Of a function that numbers a device's rows: it is in doubt if it numbers others than it has."""
    line = source_line(op.few, outside=LIBRARY)
    what = (
        "it numbers rows as those of a device, and others than it has, where jnp.arange numbers all"
    )
    why = Reason(what, "a call", line)
    return op.unknown([_NOT_KNOWN], NONE if op.varying_out() else why)


def in_doubt_by_devices(op: Operation, given: Values, made: Sequence[Value]) -> list[Value]:
    """Returns results with what is in doubt about values that all devices share.

    That is what they joined in another order, and what does not grow as the number of devices does: ``tanh`` of a sum over
    devices of a mean of each.
    """
    are_shared = all(value.is_free for value in given)
    why = carried_on(first_why(given)) if are_shared else NONE
    grows = bool(op.axis) and any(v.is_free and v.growth not in (1, None) for v in given)
    # A sum that is multiplied by what grows in a way that is not known, such as params by the places of a device.
    is_scaled = bool(op.axis) and any(v.is_free and v.growth is None for v in given)
    is_scaled = is_scaled and any(v.kind is Kind.SUM and v.growth is not None for v in given)
    results = []
    for at, value in enumerate(made):
        is_lost = (grows or is_scaled) and value.growth is None and op.is_float(at)
        told = why or (op.told(OF_DEVICES) if is_lost else NONE)
        results.append(replace(value, why=value.why or told) if told else value)
    return results
