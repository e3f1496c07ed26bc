"""Which outputs of a jaxpr are inputs, unchanged: through calls, branches and choices between equal values."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal  # pyright: ignore[reportPrivateImportUsage]

from jaxpar._compat.calls import inlined
from jaxpar._compat.jaxprs import opened, params_of


def forwarded(jaxpr: Any) -> list[int | None]:
    """Returns, for each output of a jaxpr, open or closed, the index of the input that it is; None if it is none."""
    inner = opened(jaxpr)
    return _origins(inner, range(len(inner.invars)))


def _origins(inner: Any, given: Sequence[int | None]) -> list[int | None]:
    """Returns the origins of an open jaxpr's outputs, given those of its inputs."""
    origin = dict(zip(inner.invars, given, strict=True))

    def origin_of(value: Any) -> int | None:
        return None if isinstance(value, Literal) else origin.get(value)

    for equation in inner.eqns:
        origins = [origin_of(value) for value in equation.invars]
        for output, found in zip(equation.outvars, _through(equation, origins), strict=True):
            origin[output] = found
    return [origin_of(output) for output in inner.outvars]


def _through(equation: Any, origins: Sequence[int | None]) -> list[int | None]:
    """Returns the origins of an equation's outputs, given those of its inputs."""
    name = equation.primitive.name
    if name == "select_n":
        return [_same(origins[1:])]
    if name == "copy" or (name == "convert_element_type" and _keeps_dtype(equation)):
        return [origins[0]]
    if name == "cond":
        taken = [_inside(branch, origins[1:]) for branch in params_of(equation)["branches"]]
        return [_same(each) for each in zip(*taken, strict=True)]
    called = inlined(equation)
    if called is not None and len(opened(called).outvars) == len(equation.outvars):
        return _inside(called, origins)
    return [None] * len(equation.outvars)


def _inside(jaxpr: Any, origins: Sequence[int | None]) -> list[int | None]:
    inner = opened(jaxpr)
    if len(inner.invars) != len(origins):
        return [None] * len(inner.outvars)
    return _origins(inner, origins)


def _same(origins: Sequence[int | None]) -> int | None:
    return origins[0] if len({*origins}) == 1 else None


def _keeps_dtype(equation: Any) -> bool:
    return equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype
