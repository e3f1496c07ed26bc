"""Whether a model and its loss are pure: traced twice, they do the same with the same numbers.

What JAX traces it keeps: a counter of Python, the time or a random number of NumPy is read once and is in each step the same.
Steps for two meshes are traced apart, so they would have other numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar._compat import (
    Literal,
    Tracer,
    constants,
    inner_jaxprs,
    literals,
    opened,
    trace_context,
)
from jaxpar.layered_model import LayeredModel

# JAX keeps the trace of a function, and of those with jax.jit or jax.checkpoint that it calls, but not for another value.
second_trace = trace_context(default_value=False)
# Settings that change no number: of a jitted function, of what jax.checkpoint stores.
_LABELS = ("name",)


class ImpureError(ValueError):
    """A model or its loss is not a pure function."""


def check_pure(
    model: LayeredModel | Callable, loss: Callable, params: PyTree, batch: PyTree
) -> None:
    """Raises ImpureError if a model and its loss are not the same when they are traced once more."""
    forward = model.apply if isinstance(model, LayeredModel) else model

    def traced(*, again: bool) -> list[Any]:
        with second_trace(again):
            whole = lambda params, batch: loss(forward(params, batch), batch)
            return [jax.make_jaxpr(whole)(params, batch)]

    check_same_traces(traced(again=False), traced(again=True))


def check_same_traces(first: Sequence[Any], second: Sequence[Any]) -> None:
    """Raises ImpureError if two traces of a model and its loss differ.

    Args:
        first: The jaxprs of one trace.
        second: Those of the other, in the same order.
    """
    numbers = [_numbers(each) for each in (first, second)]
    apart = [pair for pair in zip(*numbers, strict=False) if not _same(*pair)]
    if apart:
        _refuse("numbers", *_first_apart(*apart[0]))
    operations = [_operations(each) for each in (first, second)]
    for one, other in zip(*operations, strict=False):
        if one.name != other.name:
            _refuse("operations", one.name, other.name)
        if one.settings != other.settings:
            _refuse(f"settings of {one.name}", *_apart(one.settings, other.settings))
        if one.variables != other.variables:
            _refuse(f"values for {one.name}")
    for what, (one, other) in (("operations", operations), ("numbers", numbers)):
        if len(one) != len(other):
            _refuse(what)


def _refuse(what: str, *got: str) -> None:
    told = ", {} and then {}".format(*got) if got else ""
    raise ImpureError(
        "a model and its loss must be pure functions, of their arguments alone, since they are traced once for all steps; got "
        f"other {what} in a second trace{told}. Put what changes, such as a counter or the time, into the batch, and draw "
        "random numbers by jax.random from keys in it, not by NumPy."
    )


def _numbers(traced: Sequence[Any]) -> list[Any]:
    """Returns the numbers that are written in traced functions, or that these close over."""
    values: list[Any] = []
    for each in traced:
        values += (*literals(each), *constants(each))
    return [value for value in values if not isinstance(value, Tracer)]


class _Operation(NamedTuple):
    """An operation of a jaxpr.

    Attributes:
        name: Of its primitive.
        settings: Those that are numbers and names, as text.
        variables: The numbers of its inputs and outputs in its jaxpr; None: a literal.
    """

    name: str
    settings: dict[str, str]
    variables: tuple[int | None, ...]


def _operations(traced: Sequence[Any]) -> list[_Operation]:
    """Returns the operations of traced functions, each with those inside it."""
    found: list[_Operation] = []
    for each in traced:
        found += _of_jaxpr(each)
    return found


def _of_jaxpr(jaxpr: Any) -> Iterator[_Operation]:
    body = opened(jaxpr)
    numbers: dict[Any, int] = {}

    def numbered(variables: Sequence[Any]) -> tuple[int | None, ...]:
        number = lambda x: numbers.setdefault(x, len(numbers))
        return tuple(None if isinstance(x, Literal) else number(x) for x in variables)

    numbered([*body.constvars, *body.invars])
    for equation in body.eqns:
        variables = numbered([*equation.invars, *equation.outvars])
        yield _Operation(equation.primitive.name, _settings(equation.params), variables)
        for inner in inner_jaxprs(equation):
            yield from _of_jaxpr(inner)
    yield _Operation("the result", {}, numbered(body.outvars))


def _settings(params: dict[str, Any]) -> dict[str, str]:
    plain = {name: value for name, value in params.items() if _is_plain(value)}
    return {name: repr(value) for name, value in plain.items() if name not in _LABELS}


def _is_plain(value: Any) -> bool:
    """Whether a setting is made of numbers and names; others may be new objects in each trace."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Enum | np.dtype)


def _apart(one: dict[str, str], other: dict[str, str]) -> tuple[str, str]:
    name = next(name for name in {**one, **other} if one.get(name) != other.get(name))
    return f"{name}={one.get(name)}", f"{name}={other.get(name)}"


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not all(map(_can_be_read, (one, other))):
        return True
    pair = _as_numbers(one, other)
    has_nan = all(jnp.issubdtype(each.dtype, jnp.inexact) for each in pair)
    return np.array_equal(*pair, equal_nan=has_nan)


def _can_be_read(value: Any) -> bool:
    return getattr(value, "is_fully_addressable", True)


def _as_numbers(*values: Any) -> list[np.ndarray]:
    """Returns values as arrays of NumPy, and random keys as the numbers that they are made of."""
    is_key = lambda value: jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key)
    with jax.ensure_compile_time_eval():
        plain = [jax.random.key_data(each) if is_key(each) else each for each in values]
    return list(map(np.asarray, plain))


def _first_apart(one: Any, other: Any) -> tuple[str, str]:
    """Returns the first number in which two values differ, as text, or their shapes."""
    pair = _as_numbers(one, other)
    if pair[0].shape != pair[1].shape:
        return f"an array {list(pair[0].shape)}", f"one {list(pair[1].shape)}"
    are_nan = (pair[0] != pair[0]) & (pair[1] != pair[1])
    at = int(np.argmax(((pair[0] != pair[1]) & ~are_nan).reshape(-1)))
    first, second = (each.flat[at].item() for each in pair)
    return f"{first:g}", f"{second:g}"
