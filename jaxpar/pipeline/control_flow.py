"""Conditions and loops of a stage, in the form that is fast where the program masks idle ops: on GPUs."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._compat import COND_COPIES_ON_GPU
from jaxpar.pipeline.masks import Mask

SOME_STAGES = "some_stages"  # in the names of operations that other stages do not run at the same time (deadlock.py)
ONCE = f"{SOME_STAGES}/once"  # in those of a loop of one trip or none


def do_if(on: Mask, op: Callable[[Any], Any], carry: Any, *, masks: bool) -> Any:
    """Returns ``op(carry)`` where ``on``, else ``carry``."""
    if masks and COND_COPIES_ON_GPU:  # a loop of one trip or none updates its carry in place
        once = lambda pending: (jnp.zeros((), bool), op(pending[1]))
        with jax.named_scope(ONCE):
            return jax.lax.while_loop(lambda pending: pending[0], once, (on, carry))[1]
    return jax.lax.cond(on, op, lambda carry: carry, carry)


def for_range(start: int, stop: Any, body: Callable[[Any, Any], Any], carry: Any, *, back: bool) -> Any:
    """Returns the carry after ``carry = body(i, carry)`` for each i from ``start`` to ``stop``, or back from its end."""
    if isinstance(stop, int) and start >= stop:
        return carry
    at = lambda i, carry: body(start + stop - 1 - i if back else i, carry)
    with nullcontext() if isinstance(stop, int) else jax.named_scope(SOME_STAGES):
        return jax.lax.fori_loop(start, stop, at, carry)
