"""The processes and devices of a run."""

import os

import jax


def use_fake_devices(num_devices: int) -> None:
    """Gives this process ``num_devices`` CPU devices in place of its real ones; call it before JAX first touches a device.

    The devices are threads: programs, shardings and collectives are those of real devices, only the speed is not. XLA's CPU
    client waits for ever when all its threads hold programs that wait for one another, so it gets twice as many threads as
    devices (``PJRT_NPROC``).

    Args:
        num_devices: At least 1.

    Raises:
        RuntimeError: JAX has started already with other devices.
    """
    if not isinstance(num_devices, int) or isinstance(num_devices, bool):
        raise TypeError(f"num_devices must be an integer; got {num_devices!r}. Write use_fake_devices(8).")
    if num_devices < 1:
        raise ValueError(f"num_devices must be positive; got {num_devices}. Write use_fake_devices(8).")
    threads = int(os.environ.get("PJRT_NPROC", "0"))
    os.environ["PJRT_NPROC"] = str(max(threads, 2 * num_devices))
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise RuntimeError(
            f"fake devices must be asked for before JAX starts; got {num_devices} asked after it started with "
            f"{jax.device_count()} {jax.default_backend()} devices. Call use_fake_devices first in the program."
        ) from error
