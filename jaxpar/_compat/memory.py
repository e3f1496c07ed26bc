"""Arrays in memory: on the device or the host, the order of their dims, and arrays without initial values."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint


def row_major(array: jax.Array) -> jax.Array:
    """Returns an array whose last dim XLA must keep contiguous in memory, then the one before it, and so on."""
    dims = tuple(range(array.ndim))
    return with_layout_constraint(array, Layout(dims))


def is_on_host(aval: Any) -> bool:
    """Returns whether a traced array is in the memory of the host, where a policy of ``jax.checkpoint`` may put it."""
    space = getattr(aval, "memory_space", None)
    return getattr(space, "name", "") == "Host"


def is_computed(value: Any) -> bool:
    """Returns whether an array has its values already, without waiting for them; a number always has."""
    is_ready = getattr(value, "is_ready", None)
    return is_ready is None or bool(is_ready())


def empty(shape: Sequence[int], dtype: Any, number: int) -> jax.Array:
    """Returns an array without initial values on a CPU, and zeros on other devices.

    ``jax.lax.empty`` writes zeros on a CPU too. The custom call behind ``jax.lax.dce_sink`` does
    nothing, so none are written.

    Args:
        shape: Its shape on one device: XLA replicates the result over an automatic axis.
        dtype: Its dtype.
        number: Another for each array of a program; XLA takes equal calls for one array, and then
            copies it.
    """
    result = jax.ShapeDtypeStruct(shape, dtype)
    sink = jax.ffi.ffi_call("dce_sink", result)
    return jax.lax.platform_dependent(
        cpu=lambda: sink(np.int32(number)),
        default=lambda: jnp.zeros(shape, dtype),
    )
