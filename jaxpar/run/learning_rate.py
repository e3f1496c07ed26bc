"""The learning rate of a step, as a metric."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.train import TrainState


def rate_after(learning_rate: optax.ScalarOrSchedule) -> Callable[[int, TrainState, Mapping[str, Any]], Any]:
    """Returns a function that returns the learning rate of a step, of the state and the metrics after it.

    Skipped steps do not count for the optimizer's schedule.
    """
    if not callable(learning_rate):
        return lambda step, state, metrics: learning_rate

    @jax.jit
    def rate(step: jax.Array, num_skipped: jax.Array, skipped: jax.Array) -> jax.Array:
        return jnp.asarray(learning_rate(step - (num_skipped - skipped.astype(num_skipped.dtype))), jnp.float32)

    return lambda step, state, metrics: rate(np.int32(step), state.num_skipped, jnp.asarray(metrics.get("skipped", 0)))
