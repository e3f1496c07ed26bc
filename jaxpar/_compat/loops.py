"""Loops: the number of their trips, and what they carry."""

import math
from typing import Any

from jax.extend.core import Literal

from jaxpar._compat.jaxprs import opened

# Whether a counter must go up or down for a comparison to end a loop, and what adding a positive step does.
_ENDS_BY = {"lt": 1, "le": 1, "gt": -1, "ge": -1}
_STEPS_BY = {"add": 1, "sub": -1}


def has_known_trips(loop: Any) -> bool:
    """Returns whether it is known how often a ``while`` equation runs its body (``num_trips``)."""
    return num_trips(loop) is not None


def num_trips(loop: Any) -> int | None:
    """Returns how often a ``scan`` or ``while`` equation runs its body; None if it is not known.

    It is known of a ``while`` that counts from one number that is written in it to another, in steps of a third.
    ``jax.lax.fori_loop`` between Python numbers is a ``scan``, so this is a loop that its author
    counts by hand:

        condition    counter < limit
        body         counter + step
    """
    params = loop.params
    if loop.primitive.name == "scan":
        return params["length"]
    condition = opened(params["cond_jaxpr"])
    body = opened(params["body_jaxpr"])
    num_of_condition = params["cond_nconsts"]
    num_of_body = params["body_nconsts"]
    carried = condition.invars[num_of_condition:]
    if len(condition.eqns) != 1:
        return None
    compare = condition.eqns[0]
    direction = _ENDS_BY.get(compare.primitive.name)
    if direction is None:
        return None
    counter, limit = compare.invars
    if counter not in carried:
        return None
    index = carried.index(counter)
    first = loop.invars[num_of_condition + num_of_body + index]
    step = _step(body, body.invars[num_of_body + index], body.outvars[index])
    is_written = isinstance(first, Literal) and isinstance(limit, Literal)
    if not is_written or step is None or direction * step <= 0:
        return None
    trips = (float(limit.val) - float(first.val)) / step
    if not math.isfinite(trips):
        return None
    # The last number is reached if it may equal the limit.
    trips = math.floor(trips) + 1 if compare.primitive.name in ("le", "ge") else math.ceil(trips)
    return max(0, trips)


def _step(body: Any, old: Any, new: Any) -> Any:
    """Returns the number by which the body of a loop changes a counter; None if it is not written in it."""
    for equation in body.eqns:
        sign = _STEPS_BY.get(equation.primitive.name)
        if sign is None or new not in equation.outvars:
            continue
        counter, step = equation.invars
        if counter is old and isinstance(step, Literal):
            return sign * step.val
    return None


def scan_counts(equation: Any) -> tuple[int, int]:
    """Returns how many of the inputs of a scan are constants, and how many it carries.

    Its parameters changed with JAX 0.11. Inputs and outputs that are neither have one dim more than
    in the body.
    """
    body = opened(equation.params["jaxpr"])
    num_inputs = _num_of_same_shape(equation.invars, body.invars)
    num_carry = _num_of_same_shape(equation.outvars, body.outvars)
    return num_inputs - num_carry, num_carry


def _num_of_same_shape(outside: list, inside: list) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(a.aval.shape == b.aval.shape for a, b in pairs)
