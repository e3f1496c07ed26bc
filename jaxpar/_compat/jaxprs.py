"""Jaxprs and their equations, read."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]

# Under ``jax_remat3``, of JAX 0.12, jax.checkpoint is a primitive that holds another in a parameter.
_HOLDER = "call_hi_primitive"
_HELD = "_prim"
_DRAWS = (
    "random_bits",
    "random_gamma",
    "threefry2x32",
    "rng_bit_generator",
    "rng_uniform",
)
# Settings of operations that change the values of their results, whatever the shapes: of integer_pow and of casts.
_OF_VALUES = ("y", "new_dtype", "exponent_bits", "mantissa_bits")


def is_jaxpr(value: Any) -> bool:
    """Returns whether a value is a jaxpr, open or closed; since JAX 0.11 the two are one class."""
    return isinstance(value, ClosedJaxpr | Jaxpr)


def opened(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a closed one, and an open one itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, open or closed, and of those inside its equations, except those of kernels."""
    for equation in opened(jaxpr).eqns:
        yield from with_inner(equation)


def with_inner(equation: Any) -> Iterator[Any]:
    """Yields an equation and those inside it, except those of a kernel."""
    yield equation
    for jaxpr in inner_jaxprs(equation):
        yield from equations(jaxpr)


def inner_jaxprs(equation: Any) -> list[Any]:
    """Returns the jaxprs inside an equation, except that of a kernel."""
    if equation.primitive.name == "pallas_call":
        return []
    params = list(params_of(equation).values())
    return [param for param in jax.tree.leaves(params, is_leaf=is_jaxpr) if is_jaxpr(param)]


def held_primitive(equation: Any) -> Any:
    """Returns the primitive that an equation's primitive holds; None if it holds none."""
    is_holder = equation.primitive.name == _HOLDER
    return equation.params[_HELD] if is_holder else None


def params_of(equation: Any) -> dict[str, Any]:
    """Returns the parameters of an equation's primitive, or of the one that it holds."""
    held = held_primitive(equation)
    return equation.params if held is None else held.params


def with_params(equation: Any, params: dict[str, Any]) -> Any:
    """Returns an equation with other ``params_of``."""
    held = held_primitive(equation)
    if held is not None:
        params = {_HELD: type(held)(**params)}
    return equation.replace(params=params)


def source_line(equation: Any, outside: str | None = None) -> str:
    """Returns the line of code that made an equation, "file:line:column (function)"; "" if none is known.

    Args:
        equation: The equation.
        outside: A folder; the line is then the one that called what is in it.
    """
    if outside is None:
        return source_info_util.summarize(equation.source_info)
    lines = source_info_util.summarize(equation.source_info, num_frames=100).splitlines()
    return next((line for line in reversed(lines) if not line.startswith(outside)), "")


def is_in_einsum(equation: Any) -> bool:
    """Returns whether an equation is part of an einsum of three operands or more, whose order depends on their sizes."""
    scope = str(equation.source_info.name_stack)
    return bool(re.search(r"(^|/)[\w. ]*,[\w. ]*,[\w., ]*->[\w.]*(/|$)", scope))


def is_squeeze_of_user(equation: Any) -> bool:
    """Returns whether ``squeeze`` was called, by the user and not by another function of JAX, such as a product of matrices."""
    traceback = equation.source_info.traceback
    if equation.primitive.name != "squeeze" or traceback is None:
        return False
    inside = f"{os.sep}jax{os.sep}"
    of_jax = takewhile(lambda frame: inside in frame.file_name, traceback.frames)
    names = [frame.function_name for frame in of_jax]
    around = names[names.index("squeeze") + 1 :] if "squeeze" in names else ["another"]
    return all("meth" in name or "squeeze" in name for name in around)


def literal_value(literal: Any) -> Any:
    """Returns the value of a literal as an array; JAX may hold it as a Python number."""
    if np.isscalar(literal.val):
        return np.asarray(literal.val, literal.aval.dtype)
    return literal.val


def literals(jaxpr: Any) -> list[Any]:
    """Returns the values that are written into a jaxpr's equations, in their order: 8.0 of a mean over 8 rows."""
    values = []
    for equation in equations(jaxpr):
        values += [x.val for x in equation.invars if isinstance(x, Literal)]
    return values


def constants(jaxpr: Any) -> list[Any]:
    """Returns the arrays that a jaxpr closes over, and those of the jaxprs inside its equations."""
    found = list(getattr(jaxpr, "consts", ()))
    for equation in equations(jaxpr):
        for inner in inner_jaxprs(equation):
            found += getattr(inner, "consts", ())
    return found


def digests_of_outputs(closed: Any, *, has_values: bool = True) -> list[str]:
    """Returns for each output of a jaxpr a digest of the operations that compute it and the values written into them.

    It tells which input each operation reads, and is the same for inputs of other shapes. Without ``has_values`` it is the same
    for other values too.
    """
    inputs = [f"input {number}" for number in range(len(opened(closed).invars))]
    return _digests(closed, inputs, has_values=has_values)


def _digests(jaxpr: Any, given: Sequence[str], *, has_values: bool) -> list[str]:
    """Returns the digests of the outputs of a jaxpr from those of its inputs."""
    body = opened(jaxpr)
    # The body of a call, a loop or a branch takes the last inputs of its equation.
    of = dict(zip(reversed(body.invars), reversed(given), strict=False))
    written = str if has_values else (lambda value: "")
    read = lambda x: written(x.val) if isinstance(x, Literal) else of.get(x, "")
    for equation in body.eqns:
        inputs = list(map(read, equation.invars))
        inner = inner_jaxprs(equation)
        inside = [_digests(each, inputs, has_values=has_values) for each in inner]
        settings = [(name, str(equation.params.get(name))) for name in _OF_VALUES]
        made = repr((equation.primitive.name, settings, inside, inputs))
        for number, output in enumerate(equation.outvars):
            of[output] = hashlib.sha256(f"{number} {made}".encode()).hexdigest()
    return [read(x) for x in body.outvars]


def drawn_shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of the random numbers that a jaxpr draws, in the order of its equations."""
    shapes = []
    for equation in equations(jaxpr):
        if equation.primitive.name in _DRAWS:
            shapes += [drawn.aval.shape for drawn in equation.outvars]
    return shapes


def linear_solve(equation: Any) -> tuple[Any, int, int]:
    """Returns the jaxpr by which a ``custom_linear_solve`` solves, the number of its constants, and where they start."""
    counts = equation.params["const_lengths"]
    solve = equation.params["jaxprs"].solve
    return solve, counts.solve, counts.matvec + counts.vecmat
