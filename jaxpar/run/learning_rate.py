"""The learning rate of a step, as a metric."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.sharding import fetch
from jaxpar.train import TrainState

RELATIVE_ERROR = 1e-3  # of a rate that was computed in float32 or bfloat16


def rate_after(
    learning_rate: optax.ScalarOrSchedule,
) -> Callable[[int, TrainState, Mapping[str, Any]], Any]:
    """Returns a function that returns the learning rate of a step, of the state and the metrics after it.

    Skipped steps do not count for the optimizer's schedule.
    """
    if not callable(learning_rate):
        return lambda step, state, metrics: learning_rate

    @jax.jit
    def rate(step: jax.Array, num_skipped: jax.Array, skipped: jax.Array) -> jax.Array:
        return jnp.asarray(
            learning_rate(step - (num_skipped - skipped.astype(num_skipped.dtype))), jnp.float32
        )

    return lambda step, state, metrics: rate(
        np.int32(step), state.num_skipped, jnp.asarray(metrics.get("skipped", 0))
    )


def remark_on_rate(opt_state: Any, logged: Any) -> str:
    """Returns what to say where an optimizer's state has another learning rate than the one that is logged; "" elsewhere.

    Only ``optax.inject_hyperparams`` keeps the rate. An optimizer that has several is not compared.

    Args:
        opt_state: The state after a step, on the mesh; every process must call this.
        logged: The learning rate that the run logs for that step.
    """
    found = optax.tree.get_all_with_path(opt_state, "learning_rate")
    rates = [value for _, value in found if isinstance(value, jax.Array) and value.size == 1]
    if len(rates) != 1:
        return ""
    kept, shown = float(fetch(rates[0]).reshape(())), float(logged)
    if np.isclose(kept, shown, rtol=RELATIVE_ERROR, atol=0.0, equal_nan=True):
        return ""
    return (
        f"the learning rate of this step is {kept:g} in the optimizer's state (optax.inject_hyperparams), and {shown:g} in "
        "metrics.jsonl, as Run(learning_rate=...) says. Give both the same one."
    )
