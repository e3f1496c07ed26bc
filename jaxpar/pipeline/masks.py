"""Masks of idle ops: a result is selected by ``where``, never multiplied by 0, since that of an idle op may be NaN."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Mask = jax.Array | bool  # True: known to be on when the step is traced


def both(a: Mask, b: Mask) -> Mask:
    """Returns the mask that is on where both are."""
    return b if a is True else a if b is True else a & b


def where(mask: Mask, new: Sequence, old: Sequence) -> list:
    """Returns the arrays ``new`` where the mask is on, else ``old``."""
    return list(new) if mask is True else [jnp.where(mask, n, o) for n, o in zip(new, old, strict=True)]


def masked(mask: Mask, arrays: Sequence) -> list:
    """Returns the arrays where the mask is on, else zeros."""
    return where(mask, arrays, [jnp.zeros((), a.dtype) for a in arrays])
