"""Which outputs of a jaxpr are inputs, unchanged: through calls, branches and choices between equal values."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal  # pyright: ignore[reportPrivateImportUsage]

from jaxpar._compat.calls import inlined
from jaxpar._compat.jaxprs import opened, params_of

Origins = list[int | None]


def forwarded(jaxpr: Any) -> Origins:
    """Returns, for each output of a jaxpr, open or closed, the index of the input that it is; None if it is none."""
    inner = opened(jaxpr)
    return _origins(inner, range(len(inner.invars)))


def _origins(inner: Any, given: Sequence[int | None]) -> Origins:
    """Returns the origins of an open jaxpr's outputs, given those of its inputs."""
    origin = dict(zip(inner.invars, given, strict=True))

    def origins_of(values: Sequence[Any]) -> Origins:
        return [None if isinstance(value, Literal) else origin.get(value) for value in values]

    for equation in inner.eqns:
        found = _through(equation, origins_of(equation.invars))
        origin.update(zip(equation.outvars, found, strict=True))
    return origins_of(inner.outvars)


def _through(equation: Any, origins: Origins) -> Origins:
    """Returns the origins of an equation's outputs, given those of its inputs."""
    name = equation.primitive.name
    if name == "select_n":
        return [_same(origins[1:])]
    if name == "copy" or (name == "convert_element_type" and _keeps_dtype(equation)):
        return origins
    if name == "cond":
        branches = params_of(equation)["branches"]
        taken = [_inside(branch, origins[1:]) for branch in branches]
        return [_same(each) for each in zip(*taken, strict=True)]
    num_outputs = len(equation.outvars)
    called = inlined(equation)
    if called is not None and len(opened(called).outvars) == num_outputs:
        return _inside(called, origins)
    return [None] * num_outputs


def _inside(jaxpr: Any, origins: Origins) -> Origins:
    inner = opened(jaxpr)
    if len(inner.invars) != len(origins):
        return [None] * len(inner.outvars)
    return _origins(inner, origins)


def _same(origins: Sequence[int | None]) -> int | None:
    return origins[0] if len({*origins}) == 1 else None


def _keeps_dtype(equation: Any) -> bool:
    given = equation.invars[0]
    made = equation.outvars[0]
    return given.aval.dtype == made.aval.dtype
