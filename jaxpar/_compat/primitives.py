"""Primitives of jaxpar's own."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir


def operation(
    name: str,
    function: Callable[..., jax.Array],
    shape: Callable[..., Any],
) -> Primitive:
    """Returns a primitive that is one equation of a jaxpr, and that is compiled as a function of the same arguments.

    Args:
        name: Its name.
        function: ``function(*arrays, **params)`` returns an array.
        shape: ``shape(*avals, **params)`` returns its abstract value, such as one of the given
            ones with ``update``.
    """
    primitive = Primitive(name)
    primitive.def_abstract_eval(shape)

    def with_params(items: tuple, *arrays: Any) -> jax.Array:
        return function(*arrays, **dict(items))

    compiled = jax.jit(with_params, static_argnums=0)

    @primitive.def_impl
    def run(*arrays: Any, **params: Any) -> jax.Array:
        return compiled(tuple(params.items()), *arrays)

    lowering = mlir.lower_fun(function, multiple_results=False)
    mlir.register_lowering(primitive, lowering)
    return primitive
