"""What can be read off a traced function. All use of JAX's jaxprs is here, since their interface still moves."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jaxtyping import PyTree


def varies_with(function: Callable[[PyTree], jax.Array], inputs: PyTree) -> bool:
    """Returns whether the derivative of ``function`` with respect to the floats of ``inputs`` can be other than zero.

    Args:
        function: A function with one array as its result.
        inputs: Arrays or ShapeDtypeStructs.
    """
    leaves, treedef = jax.tree.flatten(inputs)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    floats = [leaves[i] for i in places]

    def tangent(floats: list, tangents: list, leaves: list) -> jax.Array:
        def of_floats(*floats: jax.Array) -> jax.Array:
            merged = dict(enumerate(leaves)) | dict(zip(places, floats, strict=True))
            return function(jax.tree.unflatten(treedef, list(merged.values())))

        return jax.jvp(of_floats, floats, tangents)[1]

    jaxpr = jax.make_jaxpr(tangent)(floats, floats, leaves).jaxpr
    reached = set(jaxpr.invars[len(floats) : 2 * len(floats)])
    for equation in jaxpr.eqns:
        if any(isinstance(v, Var) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return any(isinstance(v, Var) and v in reached for v in jaxpr.outvars)
