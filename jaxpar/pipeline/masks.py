"""Masks of idle ops: a result is selected by ``where``, never multiplied by 0, since that of an idle op may be NaN.

An idle op computes with values that no microbatch has: slots that were not written, or were written for another op. Most
operations may do so, and what they return is discarded. ``is_maskable`` finds those that may not.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._compat import has_known_trips, has_side_effects, with_inner

HOST_CALLBACKS = ("pure_callback", "io_callback", "debug_callback")
Mask = jax.Array | bool  # True: known to be on when the step is traced


def is_maskable(equations: Iterable[Any]) -> bool:
    """Returns whether an idle stage may run jaxpr equations and discard what they return; otherwise it must skip them.

    It must skip side effects and calls of the host, which others would see and which may raise, and a ``while`` loop whose
    number of trips depends on values, which may never end. A kernel is taken to do nothing of the kind.
    """

    def must_be_skipped(equation: Any) -> bool:
        if equation.primitive.name == "while" and not has_known_trips(equation):
            return True
        return equation.primitive.name in HOST_CALLBACKS or has_side_effects(equation)

    return not any(must_be_skipped(inner) for equation in equations for inner in with_inner(equation))


def both(a: Mask, b: Mask) -> Mask:
    """Returns the mask that is on where both are."""
    return b if a is True else a if b is True else a & b


def where(mask: Mask, new: Sequence, old: Sequence) -> list:
    """Returns the arrays ``new`` where the mask is on, else ``old``."""
    return list(new) if mask is True else [jnp.where(mask, n, o) for n, o in zip(new, old, strict=True)]


def masked(mask: Mask, arrays: Sequence) -> list:
    """Returns the arrays where the mask is on, else zeros."""
    return where(mask, arrays, [jnp.zeros((), a.dtype) for a in arrays])
