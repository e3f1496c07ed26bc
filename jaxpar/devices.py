"""The devices that JAX has found, the GPUs of this machine that it cannot use, and what a function is traced for.

Where JAX cannot start on a GPU, because a plugin is missing or a variable leads to other libraries, it prints a warning and
runs on the CPU, where a run takes many times longer. Here that is an error, unless the CPU was asked for.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxpar._compat import backend_errors
from jaxpar.gpus import GPUS, gpu_nodes
from jaxpar.runtime.output import version_of

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
INSTALL = "Install JAX for the driver that nvidia-smi shows: pip install 'jax[cuda13]', or 'jax[cuda12]' before 580"
OF_NO_DEVICE = ("visible", "no supported", "no_device")  # in JAX's errors
ON_CPU = "set JAX_PLATFORMS=cpu to run on the CPU"

# Names of GPUs by the driver: NVIDIA H100 80GB HBM3, NVIDIA GH200 480GB, NVIDIA H20, NVIDIA B200, NVIDIA GB300.
HOPPER = r"\bG?H\d{2,3}\b"
HOPPER_OR_LATER = r"\bG?[HB]\d{2,3}\b"


class DeviceError(ValueError):
    """JAX cannot use the devices of this machine."""


def found_devices() -> list[jax.Device]:
    """Returns ``jax.devices()``, all devices of this run.

    Raises:
        DeviceError: JAX cannot start on the platform that it is told to use.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # what JAX_PLATFORMS names is not there
        why = str(error) or f"no plugin of JAX for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}"
        raise DeviceError(
            f"JAX must be able to use the devices that it is told to use; got: {why}. "
            f"{_remedy(why, os.environ)}, or {ON_CPU}."
        ) from error


def started_devices() -> list[jax.Device]:
    """Returns ``found_devices()``, on which a run is to train.

    Raises:
        DeviceError: JAX cannot start on the platform that it is told to use, or runs on the CPU of a machine with a GPU
            though neither JAX_PLATFORMS nor fake devices ask for it.
    """
    devices = found_devices()
    if found := unused_gpus(devices[0].platform, gpu_nodes(), os.environ):
        why, remedy = found
        raise DeviceError(
            f"JAX must use the GPU of a machine that has one, unless it is told to run on the CPU; got a GPU, "
            f"{', '.join(gpu_nodes())}, and JAX on the {devices[0].platform}: {why}. {remedy}, or {ON_CPU}."
        )
    return devices


def unused_gpus(
    platform: str, nodes: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, str] | None:
    """Returns why JAX does not use the GPUs of this machine, and the remedy without a full stop; None if all is as asked.

    Args:
        platform: What JAX runs on.
        nodes: The GPUs of this machine, as ``gpu_nodes`` returns them.
        environment: The environment variables.
    """
    if platform != "cpu" or not nodes or cpu_is_asked_for(environment):
        return None
    why = _reason()
    return why, _remedy(why, environment)


def cpu_is_asked_for(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX is told to run on the CPU: by JAX_PLATFORMS, by fake devices, or in the program."""
    fake = int(jax.config.values["jax_num_cpu_devices"]) > 0
    fake |= "xla_force_host_platform_device_count" in environment.get("XLA_FLAGS", "")
    return fake or bool(jax.config.values["jax_platforms"])


def _reason() -> str:
    """Returns JAX's own reason why it cannot use a GPU."""
    if given := backend_errors().get("cuda"):
        return " ".join(given.split()).rstrip(".")
    installed = [f"{name} {version}" for name in PLUGINS if (version := version_of(name))]
    if not installed:
        return "its CUDA plugin is not installed"
    return f"{', '.join(installed)} did not start beside jaxlib {version_of('jaxlib')}, as JAX's lines above say"


def _remedy(why: str, environment: Mapping[str, str]) -> str:
    if not any(map(version_of, PLUGINS)):
        return INSTALL
    visible, is_hidden = (
        environment.get("CUDA_VISIBLE_DEVICES"),
        any(each in why.lower() for each in OF_NO_DEVICE),
    )
    if visible is not None and is_hidden:
        return (
            f"Unset CUDA_VISIBLE_DEVICES, which is {visible!r}, or name GPUs that nvidia-smi lists"
        )
    if path := environment.get("LD_LIBRARY_PATH"):
        return f"Unset LD_LIBRARY_PATH, which is {path!r}: it can lead to other CUDA libraries than those installed with JAX"
    return "See whether nvidia-smi works, then python -m jaxpar doctor"


def describe_devices() -> str:
    """Returns what a run trains on: "8 NVIDIA H100 80GB HBM3, in 2 processes"."""
    devices, count = jax.devices(), jax.process_count()
    kinds = sorted({"CPU" if each.platform == "cpu" else each.device_kind for each in devices})
    is_fake = kinds == ["CPU"] and len(devices) > count
    of_cpu = "fake CPU devices" if is_fake else f"CPU{'s' * (len(devices) > 1)}"
    what = of_cpu if kinds == ["CPU"] else ", ".join(kinds)
    return f"{len(devices)} {what}" + (f", in {count} processes" if count > 1 else "")


def are_gpus(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether the devices of a mesh are GPUs, also those that exist for the compiler alone."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"


# The devices for which a function is traced ----------------------------------------------------------------------------------


def traced_platform() -> str:
    """Returns the platform for which this is traced: that of the mesh, which may exist for the compiler alone, or JAX's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(device, "platform", None) or jax.default_backend()


def on_gpus() -> bool:
    """Returns whether this is traced for GPUs."""
    return traced_platform() in ("gpu", "cuda", "rocm")


def on_hopper(*, or_later: bool = False) -> bool:
    """Returns whether this is traced for NVIDIA GPUs of the architecture Hopper, or of a later one."""
    names = HOPPER_OR_LATER if or_later else HOPPER
    return on_gpus() and re.search(names, traced_kind()) is not None


def traced_kind() -> str:
    """Returns the name of the device for which this is traced, such as "NVIDIA H100 80GB HBM3"."""
    return _of_traced_device("device_kind") or ""


def num_multiprocessors() -> int:
    """Returns how many multiprocessors the GPU has for which this is traced; those of an H100 where it does not say."""
    return _of_traced_device("num_cores") or GPUS["h100"].multiprocessors


def _of_traced_device(name: str) -> Any:
    """Returns an attribute of the device for which this is traced; None if it lacks it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return getattr(device, name, None)
    own_name = "core_count" if name == "num_cores" else name
    return getattr(jax.local_devices()[0], own_name, None)
