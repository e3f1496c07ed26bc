"""Functions with a derivative of their own: its backward pass is read too, since it may mix rows where the values do not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._compat import bind
from jaxpar.row_dependence.operation import LIBRARY, Operation, span_of_shape
from jaxpar.row_dependence.values import (
    NONE,
    NOT_KNOWN,
    Kind,
    Reason,
    Value,
    Values,
)

Read = Callable[[Any, Any, Values], list[Value]]

_OF_CUSTOM_VJP = "custom_vjp_call"
_NAMES = (_OF_CUSTOM_VJP, "custom_jvp_call")
_OF_ROWS = (Kind.ROWS, Kind.SUM)


def in_doubt_by_gradient(
    read: Read,
    op: Operation,
    given: Values,
    made: Sequence[Value],
) -> list[Value]:
    """Returns what a call returns, in doubt if its own backward pass mixes the rows of gradients.

    Args:
        read: Returns the values of what a jaxpr returns, for few and for many rows.
        op: The call.
        given: The values of its operands.
        made: Those of its results.
    """
    is_own = op.name.startswith(_NAMES)
    doubted = [v.kind in _OF_ROWS or v.is_free for v in made]
    if not is_own or not any(doubted):
        return list(made)
    why = _doubt(read, op, given, made)
    pairs = zip(made, doubted, strict=True)
    return [replace(v, why=v.why or why) if in_doubt else v for v, in_doubt in pairs]


def _doubt(
    read: Read,
    op: Operation,
    given: Values,
    made: Sequence[Value],
) -> Reason:
    """Returns why gradients may not be those of each row; none if they are as far as can be seen."""
    pairs = enumerate(zip(made, op.few.outvars, strict=True))
    of_results = [_gradient_of(op, v, at) for at, (v, of) in pairs if _is_real(of)]
    try:
        few, many = _backward(op.few), _backward(op.many)
    except Exception:  # code of the user's, which may fail in any way
        return NONE if op.is_of_library else op.told("its own derivative cannot be traced")
    found = read(few, many, [*given, *of_results])
    again, found = found[: len(of_results)], found[len(of_results) :]
    for value in again:
        if value.kind is Kind.MIXED:
            what = f"its forward pass, where it is differentiated, mixes rows: {value.why.what}"
            return value.why._replace(what=what)
    for value in found:
        if value.kind is Kind.MIXED:
            what = f"its own derivative mixes rows: {value.why.what}"
            # That of a sum of gradients is here.
            is_here = value.why.line.startswith(LIBRARY)
            return op.told(what) if is_here else value.why._replace(what=what)
    known = {value.why for value in (*given, *made)} | {NONE}
    for why in (value.why for value in found if value.why not in known):
        # A kernel of a backward pass is not known, and jaxpar's own functions are tested.
        if why.what != NOT_KNOWN and not why.line.startswith(LIBRARY):
            return why._replace(what=f"its own derivative: {why.what}")
    real = [v for v, at in zip(given, op.few.invars, strict=True) if _is_real(at)]
    for value, gradient in zip(real, found[-len(real) :] if real else (), strict=True):
        if value.is_free and gradient.is_free and not gradient.is_zero:
            return op.told(
                "the gradient of what depends on no row, by its own derivative, is no sum over rows"
            )
    is_plain = all(v.growth == 1 for v in given)
    if is_plain and any(v.kind in _OF_ROWS and v.growth not in (1, None) for v in found):
        return op.told("its own derivative depends on the number of rows")
    return NONE


def _gradient_of(op: Operation, value: Value, at: int) -> Value:
    """Returns the value of the gradient of a result.

    Each row adds to that of a result which depends on no row, such as a param, or has its own, where that is copied for each
    row; that of a sum is one number for all rows.
    """
    if value.kind is Kind.ROWS:
        return Value(Kind.ROWS, span=value.span)
    if value.is_free and (dims := op.varying_out(at)):
        few, _ = op.out_shapes(at)
        return Value(Kind.ROWS, span=span_of_shape(few, dims, op.rows))
    return Value(Kind.SUM) if value.is_free else Value()


def _backward(equation: Any) -> Any:
    """Returns the jaxpr of a call's results and gradients, of its operands and of the gradients of its results.

    The results are those of its own forward pass, which may be another function than the call.
    """

    def gradients(operands: list[Any], of_results: list[Any]) -> list[Any]:
        call = lambda *real: _real_results(equation, operands, real)
        real = [x for x, at in zip(operands, equation.invars, strict=True) if _is_real(at)]
        results, pull = jax.vjp(call, *real)
        return [*results, *pull(of_results)]

    shapes = [each.aval for each in equation.invars]
    of_results = [each.aval for each in equation.outvars if _is_real(each)]
    return jax.make_jaxpr(gradients)(shapes, of_results)


def _real_results(
    equation: Any,
    operands: Sequence[Any],
    real: Sequence[Any],
) -> list[Any]:
    """Returns the real results of a call, of all its operands and of the real ones."""
    rest = iter(real)
    pairs = zip(operands, equation.invars, strict=True)
    inputs = [next(rest) if _is_real(at) else x for x, at in pairs]
    made = bind(equation, inputs)
    return [y for y, at in zip(made, equation.outvars, strict=True) if _is_real(at)]


def _is_real(variable: Any) -> bool:
    """Whether a variable is of numbers that have a gradient."""
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)
