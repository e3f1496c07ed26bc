"""Equations that call a jaxpr: checkpoints, jits, and functions with a derivative of their own."""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from jaxpar._compat.jaxprs import equations, held_primitive, is_jaxpr, params_of

# The primitive of jax.checkpoint, and the class of the one that is held under ``jax_remat3``.
_REMAT = "remat2"
_REMAT_3 = "RematTraced"
# The parameter that holds the jaxpr of a call; eval_jaxpr is of JAX 0.11.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    _REMAT: "jaxpr",
}
_OF_ANY_CALL = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


def call_name(equation: Any) -> str:
    """Returns the name of an equation's primitive, the same for each kind of ``jax.checkpoint``."""
    held = held_primitive(equation)
    if type(held).__name__ == _REMAT_3:
        return _REMAT
    return equation.primitive.name


def is_remat(equation: Any) -> bool:
    """Returns whether an equation is a ``jax.checkpoint``."""
    return call_name(equation) == _REMAT


def called(equation: Any) -> Any:
    """Returns the closed jaxpr of a call that can be inlined; None for other equations, and for jits that set shardings."""
    key = CALLS.get(call_name(equation))
    params = params_of(equation)
    if key not in params or _sets_shardings(params):
        return None
    jaxpr = params[key]
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def _sets_shardings(params: dict[str, Any]) -> bool:
    inputs = params.get("in_shardings", ())
    outputs = params.get("out_shardings", ())
    return any(isinstance(s, jax.sharding.Sharding) for s in (*inputs, *outputs))


def inlined(equation: Any) -> Any:
    """Returns the jaxpr of a call, also of one with a derivative of its own; None for other equations."""
    held = held_primitive(equation)
    if held is not None and not is_remat(equation):
        return _expanded(held)
    name = call_name(equation)
    is_call = name in CALLS or name == "composite" or name.startswith("custom_")
    if not is_call:
        return None
    params = params_of(equation)
    held = [params[key] for key in _OF_ANY_CALL if key in params]
    return held[0] if held and is_jaxpr(held[0]) else None


def _expanded(held: Any) -> Any:
    """Returns the jaxpr of a primitive that is written in others, as searchsorted is since JAX 0.12; None if it fails."""
    try:
        return jax.make_jaxpr(held.expand)(*jax.tree.unflatten(held.in_tree, held.in_avals_flat))
    except Exception:  # it is no public interface
        return None


def constraint_of(equation: Any) -> Any:
    """Returns the sharding of an equation that only constrains one, also as a ``jax.custom_vjp``; None for other equations."""
    own = [equation]
    if equation.primitive.name.startswith("custom_vjp_call"):
        own = list(equations(equation.params["call_jaxpr"]))
    names = {inner.primitive.name for inner in own}
    return own[-1].params["sharding"] if names == {"sharding_constraint"} else None
