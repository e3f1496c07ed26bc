"""What JAX runs on: the client of a run of several processes, and devices for the compiler alone."""

from typing import Any

import jax
from jax._src import distributed, xla_bridge


def coordination() -> Any:
    """Returns the state of ``jax.distributed``.

    It has ``client`` (None until initialised), ``process_id`` and ``num_processes``.
    """
    return distributed.global_state


def has_started() -> bool:
    """Returns whether JAX has used a device, after which XLA reads no flags."""
    return xla_bridge.backends_are_initialized()


def backend_errors() -> dict[str, str]:
    """Returns why JAX cannot use a platform, such as "cuda", by its name; nothing before JAX has used a device."""
    return dict(xla_bridge._backend_errors)


def is_compile_only(device: jax.Device) -> bool:
    """Returns whether a device exists for the compiler alone."""
    client = type(device.client)
    return client.__name__ == "CompileOnlyPyClient"
