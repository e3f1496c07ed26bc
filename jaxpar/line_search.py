"""The loss as a function of the params, for optimizers that evaluate it inside a step: line searches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def value_fn_of(value_and_grad: Callable[[PyTree], tuple[PyTree, PyTree]]) -> Callable[[PyTree], jax.Array]:
    """Returns the loss as a function of the params, whose derivative is the gradients of ``value_and_grad``.

    Args:
        value_and_grad: ``params -> (loss, gradients)``, or with metrics ``params -> ((loss, metrics), gradients)``.
    """

    def loss_and_grads(params: PyTree) -> tuple[jax.Array, PyTree]:
        value, grads = value_and_grad(params)
        return value[0] if isinstance(value, tuple) else value, grads

    value_fn = jax.custom_jvp(lambda params: loss_and_grads(params)[0])

    @value_fn.defjvp
    def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[jax.Array, jax.Array]:
        value, grads = loss_and_grads(*primals)
        along = jax.tree.map(lambda g, t: jnp.real(jnp.sum(g * t)).astype(value.dtype), grads, *tangents)
        return value, sum(jax.tree.leaves(along), jnp.zeros_like(value))

    return value_fn


def no_value_fn(params: PyTree) -> jax.Array:
    """Raises: the programs of ``executor="mpmd"`` cannot be evaluated inside the program of the update."""
    raise ValueError(
        "an optimizer that searches along a line must evaluate the loss inside the step, which then must be one program; got "
        'executor="mpmd". Use executor="spmd", or an optimizer without a line search (optax.lbfgs(linesearch=None)).'
    )
