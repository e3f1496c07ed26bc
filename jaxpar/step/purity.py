"""Whether a model and its loss are pure: traced twice, they have the same numbers.

What JAX traces it keeps: a counter of Python, the time or a random number of NumPy is read once and is in each step the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar._compat import Tracer, literals
from jaxpar.layered_model import LayeredModel


class ImpureError(ValueError):
    """A model or its loss is not a pure function."""


def check_pure(
    model: LayeredModel | Callable, loss: Callable, params: PyTree, batch: PyTree
) -> None:
    """Raises ImpureError if a model and its loss have other numbers when they are traced once more."""
    forward = model.apply if isinstance(model, LayeredModel) else model
    first = _numbers(forward, loss, params, batch)
    second = _numbers(forward, loss, params, batch)
    pairs = zip(first, second, strict=False)
    apart = [pair for pair in pairs if not _same(*pair)]
    if not apart and len(first) == len(second):
        return
    got = ", {} and then {}".format(*map(_shown, apart[0])) if apart else ""
    raise ImpureError(
        "a model and its loss must be pure functions, of their arguments alone, since they are traced once for all steps; got "
        f"other numbers in a second trace{got}. Put what changes, such as a counter or the time, into the batch, and draw "
        "random numbers by jax.random from keys in it, not by NumPy."
    )


def _numbers(forward: Callable, loss: Callable, params: PyTree, batch: PyTree) -> list[Any]:
    """Returns the numbers that are written in a model and its loss, or that these close over, from a trace of their own."""

    def whole(params: PyTree, batch: PyTree) -> Any:
        return loss(forward(params, batch), batch)

    traced = jax.make_jaxpr(whole)(params, batch)
    values = [*literals(traced), *traced.consts]
    return [value for value in values if not isinstance(value, Tracer)]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not all(map(_can_be_read, (one, other))):
        return True
    pair = [np.asarray(each) for each in (one, other)]
    has_nan = all(jnp.issubdtype(each.dtype, jnp.inexact) for each in pair)
    return np.array_equal(*pair, equal_nan=has_nan)


def _can_be_read(value: Any) -> bool:
    is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
    return not is_key and getattr(value, "is_fully_addressable", True)


def _shown(value: Any) -> str:
    return f"{np.asarray(value).flat[0]:g}" if np.size(value) else "nothing"
