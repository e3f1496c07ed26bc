"""Equations and jaxprs: bound to other inputs, rewritten, evaluated."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import extend_axis_env_nd
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.source_info_util import current_name_stack, user_context
from jaxtyping import PyTree

from jaxpar._compat.calls import CALLS, call_name
from jaxpar._compat.jaxprs import is_jaxpr, opened, params_of, with_params

Change = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
_HOLDS_JAXPRS = (*CALLS, "cond", "scan", "shard_map", "while")


def bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation for other inputs, under the mesh that is set now, with the user's source line."""
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)
    info = equation.source_info
    names = current_name_stack() + info.name_stack
    source = user_context(info.traceback, name_stack=names)
    mesh = jax.sharding.get_abstract_mesh()
    with source, equation.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        outputs = primitive.bind(*inputs, **params)
    return list(outputs) if primitive.multiple_results else [outputs]


def rewrite(jaxpr: Any, change: Change) -> Any:
    """Returns a jaxpr with ``change(equations, outputs)`` in place of its equations, and so in loops, branches and calls."""
    inner = opened(jaxpr)
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=rewrite(inner, change))
    rewritten_inside = [_rewrite_inside(equation, change) for equation in jaxpr.eqns]
    return jaxpr.replace(eqns=change(rewritten_inside, jaxpr.outvars))


def _rewrite_inside(equation: Any, change: Change) -> Any:
    if call_name(equation) not in _HOLDS_JAXPRS:
        return equation

    def of_param(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of_param, value))
        return rewrite(value, change) if is_jaxpr(value) else value

    params = params_of(equation)
    changed = {name: of_param(value) for name, value in params.items()}
    return with_params(equation, changed)


def evaluate(closed: Any, leaves: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a closed jaxpr."""
    return jaxpr_as_fun(closed)(*leaves)


def rewritten(
    function: Callable[..., PyTree],
    change: Callable,
    *args: PyTree,
    run: Callable = evaluate,
) -> PyTree:
    """Returns ``function(*args)``, computed by ``run(jaxpr, leaves)``, such as ``evaluate``, after ``rewrite``."""
    trace = jax.make_jaxpr(function, return_shape=True)
    closed, shapes = trace(*args)
    return _evaluate(rewrite(closed, change), shapes, args, run)


def closure_converted(
    function: Callable[..., PyTree],
    *args: PyTree,
) -> tuple[Callable[..., PyTree], list[jax.Array]]:
    """Returns ``(converted, tracers)``: ``converted(tracers, *args)`` is the function with the tracers that it closes over.

    A model made inside ``jax.jit`` closes over such values; a ``jax.custom_vjp`` in a scan must not.
    """
    trace = jax.make_jaxpr(function, return_shape=True)
    closed, shapes = trace(*args)
    constants = list(closed.consts)
    indices = [i for i, constant in enumerate(constants) if isinstance(constant, Tracer)]
    given = [constants[i] for i in indices]

    def converted(tracers: Sequence[jax.Array], *args: PyTree) -> PyTree:
        for i, value in zip(indices, tracers, strict=True):
            constants[i] = value
        return _evaluate(closed.replace(consts=constants), shapes, args)

    return converted, given


def _evaluate(
    closed: Any,
    shapes: PyTree,
    args: tuple,
    run: Callable = evaluate,
) -> PyTree:
    outputs = run(closed, jax.tree.leaves(args))
    arrays = map(jnp.asarray, outputs)  # constants are NumPy arrays
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def axes_named(sizes: Mapping[str, int]) -> AbstractContextManager:
    """Returns the context in which a function may be traced that sends over axes of these sizes, as in ``jax.shard_map``."""
    return extend_axis_env_nd([*sizes.items()])


def trace_context(default_value: Any) -> Any:
    """Returns a setting ``s`` of traces, ``s.value`` in them and ``with s(value)`` around: no trace is cached for another."""
    return jax.make_user_context(default_value)
