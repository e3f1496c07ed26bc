"""GPUs that exist for the compiler alone: a training step is compiled for them on a machine without any GPU.

    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=4, devices=jaxpar.compile_only_devices("h100", num_nodes=2))
    compiled = train_step.lower(jaxpar.abstract_state(...), shapes_of_a_batch).compile()
    jaxpar.inspect_step(compiled, mesh=mesh)

The compiled program is the one that those GPUs would run: its memory, copies, collectives and order of operations. Only the
choice of kernels differs, which XLA makes by measurement on a real GPU. It cannot be run here.
"""

import os
import warnings
from pathlib import Path
from string import Template

import jax
from jax.experimental import topologies

from jaxpar._compat import has_started
from jaxpar.devices import PLUGINS
from jaxpar.fields import arg, check_one_of
from jaxpar.gpus import GPUS, Gpu
from jaxpar.runtime.distributed import with_gpu_flags
from jaxpar.runtime.output import install_extra, version_of

# Kernels cannot be measured without a GPU.
NO_MEASUREMENT = "--xla_gpu_autotune_level=0"
CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


TARGETS = {
    name: gpu for name, gpu in GPUS.items() if gpu.target is not None
}  # those that the compiler knows


def target_text(gpu: Gpu) -> str:
    """Returns a GPU as the compiler reads it, with versions of the driver and the libraries that lack no feature."""
    text = Path(__file__).with_name("gpu_target.txtpb").read_text()
    return Template(text).substitute(vars(gpu), **gpu.target or {})


def compile_only_devices(
    gpu: str, *, num_nodes: int = 1, devices_per_node: int = 8
) -> list[jax.Device]:
    """Returns GPUs for ``make_mesh(devices=...)`` for which a step can be compiled, not run. No GPU is needed.

    It sets the flags of XLA for GPUs that ``initialize`` sets, for the compiler alone, so call it before other uses of GPUs.

    Args:
        gpu: a100-40gb, a100-80gb, h100, h200 or b200.
        num_nodes: The number of nodes.
        devices_per_node: The number of GPUs of a node.

    Raises:
        ImportError: The CUDA wheels for the installed JAX are missing; with ``jaxpar[gpu-compile]`` they are installed.
        ValueError: There is no such GPU, or a number is not a positive integer.
    """
    check_one_of([*TARGETS], "Choose the nearest one.", gpu=gpu)
    for name, number in (("num_nodes", num_nodes), ("devices_per_node", devices_per_node)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(
                f"{arg(name)} must be an integer of 1 or more; got {number!r}. Choose {arg(**{name: 1})} or more."
            )
    _check_plugin()
    set_compiler_flags()
    target, shape = target_text(TARGETS[gpu]), f"1x{num_nodes}x{devices_per_node}"
    return list(
        topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices
    )


def start_on_cpu() -> None:
    """Prepares a process that compiles for GPUs and runs nothing on them: it needs no GPU, and has the flags for them.

    Call it before JAX uses a device. JAX's own devices are then those of the CPU.
    """
    jax.config.update("jax_platforms", "cpu")
    set_compiler_flags()


def set_compiler_flags() -> None:
    """Adds to XLA_FLAGS those for programs that are compiled for GPUs and not run, unless it sets them.

    ``compile_only_devices`` does so; a program that uses a device earlier must call this first. Warns if JAX has used one.
    """
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = with_compiler_flags(given)
    if has_started() and len(os.environ["XLA_FLAGS"].split()) > len(given.split()):
        warnings.warn(
            "XLA reads its flags when JAX first uses a device, which it has; so those for GPUs are not in force, collectives "
            "may not overlap with computation, and compilation takes longer. Call jaxpar.compile_only_devices, or "
            "jaxpar.compile_only.set_compiler_flags, before JAX uses a device.",
            stacklevel=3,
        )


def with_compiler_flags(flags: str) -> str:
    """Returns XLA flags with those added for programs that are compiled for GPUs and not run, unless they set them.

    >>> with_compiler_flags("--xla_gpu_autotune_level=4").count("autotune_level")
    1
    """
    flags = with_gpu_flags(flags)
    return flags if NO_MEASUREMENT.split("=")[0] in flags else f"{flags} {NO_MEASUREMENT}"


def _check_plugin() -> None:
    found = {name: version for name in PLUGINS if (version := version_of(name))}
    if jax.__version__ not in found.values():
        got = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
        raise ImportError(
            f"compiling for GPUs needs JAX's CUDA plugin of JAX's own version, {jax.__version__}; got {got}. "
            f"{install_extra('gpu-compile')}, or jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}."
        )


def check_cudnn(otherwise: str = "") -> None:
    """Raises ImportError unless cuDNN is installed, which compiling ``flash_attention`` for NVIDIA GPUs needs.

    Args:
        otherwise: The setting with XLA's attention, for the message; by default the recipes' dtype.
    """
    if not any(map(version_of, CUDNN)):
        raise ImportError(
            "compiling flash attention needs cuDNN; got none. Install nvidia-cudnn-cu12, or choose "
            f"{otherwise or arg(dtype='float32')}, which has XLA's attention."
        )
