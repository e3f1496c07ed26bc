"""What a run and its methods are given by a loop: functions that can be called, settings by name, and a step that trains."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar.fields import brief, check_at_least, check_kind
from jaxpar.run.flags import RunFlags
from jaxpar.train import TrainState, TrainStep

STEP = (
    "a run compiles a training step, a jitted (state, batch) -> (state, metrics) whose metrics have a loss; got {got}. Make it "
    "with jaxpar.make_train_step(value_and_grad, optimizer)."
)


def check_arguments(
    flags: object,
    settings: object,
    items_per_step: object,
    learning_rate: object,
    **functions: object,
) -> None:
    """Raises TypeError for an argument of a run of another kind than it has.

    Args:
        flags: The flags.
        settings: The settings.
        items_per_step: The items of a step.
        learning_rate: The schedule, or a number.
        **functions: The functions that it calls.
    """
    is_flags = isinstance(flags, RunFlags) or (
        isinstance(flags, type) and issubclass(flags, RunFlags)
    )
    if not is_flags:
        raise TypeError(
            f"flags of a run must be those of BasicFlags.of; got a {type(flags).__name__}. Write BasicFlags.of(steps=1000)."
        )
    check_kind(
        (Mapping, None), "a dict by name", 'Write {"learning_rate": 0.1}, say.', settings=settings
    )
    check_kind(
        (int, float, None),
        "a number",
        "Give the rows of a batch, say.",
        items_per_step=items_per_step,
    )
    if not callable(learning_rate):
        kinds, rule = (int, float, np.ndarray, jax.Array, None), "a number, or a schedule of optax"
        check_kind(kinds, rule, "Give that of the optimizer.", learning_rate=learning_rate)
    for name, function in functions.items():
        check_function(function, f"{name} of a run", "Leave it out, or give one such as print.")


def check_function(function: object, name: str, remedy: str) -> None:
    """Raises TypeError unless something can be called."""
    if not callable(function):
        raise TypeError(f"{name} must be a function; got {brief(repr(function))}. {remedy}")


def check_call(num_steps: int, call: object) -> None:
    """Raises TypeError or ValueError unless a function can be called every so many steps."""
    check_kind((int,), "a number of steps", "Choose one such as 100.", num_steps=num_steps)
    check_at_least(1, num_steps=num_steps)
    check_function(call, "what run.every calls", "Write a function call(step, state, metrics).")


def lowered(train_step: Any, state: Any, batch: Any) -> jax.stages.Lowered:
    """Returns a training step lowered for a state and a batch; raises TypeError for another function."""
    if not callable(getattr(train_step, "lower", None)):
        raise TypeError(STEP.format(got=f"a {type(train_step).__name__}"))
    try:
        found = train_step.lower(state, batch)
    except Exception as error:
        if not isinstance(train_step, TrainStep):
            error.add_note(
                STEP.format(got=f"a {type(train_step).__name__} that cannot be traced with a state")
            )
        raise
    returned = found.out_info
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not any(isinstance(part, TrainState) for part in parts):
        raise TypeError(
            STEP.format(
                got=f"one that returns no state, but {brief(repr(jax.tree.structure(returned)))}"
            )
        )
    return found
