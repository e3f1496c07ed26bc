"""`python -m jaxpar doctor`: the versions, devices and settings of this machine, on one page to paste into an issue.

It shows only the environment variables that are listed in doctor.json, none of which is a secret.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxpar
from jaxpar.commands.cli import call
from jaxpar.devices import DeviceError, found_devices, unused_gpus
from jaxpar.gpus import gpu_nodes
from jaxpar.runtime.distributed import GPU_FLAGS
from jaxpar.runtime.output import printable, version_of
from jaxpar.runtime.process_env import read_process_env

# What is shown of packages, environment variables, and those of each kind of cluster.
PACKAGES, SETTINGS, CLUSTERS = json.loads(
    Path(__file__).with_name("doctor.json").read_text()
).values()
GIB = 2**30


def doctor() -> None:
    """Prints a report on this machine: versions, devices, collectives, settings, disk and shared memory, cluster variables."""
    for section in sections(os.environ):  # each at once, since a wrong XLA_FLAGS ends the process
        print(section, flush=True)


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    call(doctor, args, "doctor")


def report(environment: Mapping[str, str]) -> str:
    """Returns the report.

    Args:
        environment: The environment variables to read.
    """
    return "\n".join(sections(environment))


def sections(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields the sections of the report, those first for which JAX need not start."""
    yield _section("versions", _versions())
    yield _section("machine", _machine())
    yield _section("set", _set(SETTINGS, environment) or ["none of the relevant variables"])
    try:
        found_devices()
        backend, local = jax.default_backend(), jax.local_devices()
        devices = _devices(local)
    except (DeviceError, RuntimeError) as error:  # a driver that is too old, a GPU in use
        backend, local, devices = "none", [], [f"none: {error}"]
    yield _section("devices", devices + _driver())
    yield _section("collectives", _collectives())
    yield _section("to look at", advice(environment, backend, len(local)) or ["nothing"])
    yield _section("disk", _disk())
    yield _section("cluster", _cluster(environment))


def _section(name: str, lines: Iterable[str]) -> str:
    return "\n".join([name, *(f"  {line}" for line in lines)])


def _set(names: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={printable(environment[name])}" for name in names if name in environment]


def _versions() -> list[str]:
    found = [f"{package} {version}" for package in PACKAGES if (version := version_of(package))]
    if version_of("jaxpar") is None:
        found.insert(0, f"jaxpar {jaxpar.__version__} (not installed: run from its folder)")
    return [f"python {platform.python_version()}", *found]


def _machine() -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [f"{platform.platform()}, {platform.machine()}", f"{cores} cores for this process"]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kib = {
            line.split(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()
        }
        lines.append(
            f"memory: {kib['MemTotal'] / 2**20:.1f} GiB, {kib['MemAvailable'] / 2**20:.1f} GiB free"
        )
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return lines
    for name, limit in (
        ("open files", resource.RLIMIT_NOFILE),
        ("locked memory", resource.RLIMIT_MEMLOCK),
    ):
        soft = resource.getrlimit(limit)[0]
        lines.append(
            f"limit of {name}: {'none' if soft == resource.RLIM_INFINITY else f'{soft:,}'}"
        )
    return lines


def _devices(local: list[Any]) -> list[str]:
    kinds = ", ".join(sorted({device.device_kind for device in local}))
    limits = {(device.memory_stats() or {}).get("bytes_limit", 0) for device in local} - {0}
    return [
        f"backend {jax.default_backend()}: {len(local)} of {jax.device_count()} devices are here, each a {kinds}",
        f"process {jax.process_index()} of {jax.process_count()}",
        *(
            f"memory that JAX may use on a device: {limit / GIB:.1f} GiB"
            for limit in sorted(limits)
        ),
    ]


def _driver() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return ["no nvidia-smi"]
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,driver_version,memory.total,memory.used",
        "--format=csv,noheader",
    ]
    try:
        return subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi failed: {error}"]


def _collectives() -> list[str]:
    cpu = getattr(jax.config, "jax_cpu_collectives_implementation", "unknown")
    nccl = [p for p in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if version_of(p)]
    return [
        f"between processes on CPUs: {cpu}",
        f"between GPUs: NCCL of {', '.join(nccl)}"
        if nccl
        else "between GPUs: no NCCL package found",
    ]


def advice(environment: Mapping[str, str], backend: str, num_devices: int) -> list[str]:
    """Returns warnings about the settings, for a backend and the number of its devices in this process."""
    flags, found = environment.get("XLA_FLAGS", ""), []
    try:
        read_process_env(environment)
    except ValueError as error:
        found.append(str(error))
    given = environment.get("PJRT_NPROC", "")
    threads = int(given) if given.isdecimal() else 0
    unset = [flag for flag in GPU_FLAGS if flag.split("=")[0] not in flags]
    if backend == "gpu" and num_devices > 1 and unset:
        found.append(
            f"XLA_FLAGS without {' '.join(unset)}: collectives may not overlap with computation"
        )
    if backend == "gpu" and environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in (
        "0",
        "false",
    ):
        found.append(
            "XLA_PYTHON_CLIENT_PREALLOCATE=false: memory fragments sooner; unset it for training"
        )
    if environment.get("NCCL_P2P_DISABLE") == "1" or environment.get("NCCL_IB_DISABLE") == "1":
        found.append("NCCL_P2P_DISABLE or NCCL_IB_DISABLE is 1: the fast links are not used")
    if backend == "cpu" and num_devices > 1 and threads < 2 * num_devices:
        found.append(
            f"PJRT_NPROC under {2 * num_devices}, twice the devices: fake devices can deadlock"
        )
    if unused := unused_gpus(backend, gpu_nodes(), environment):
        found += [f"there is a GPU, but JAX runs on the CPU: {unused[0]}", f"{unused[1]}."]
    elif backend == "cpu" and gpu_nodes():
        found.append("there is a GPU, but JAX_PLATFORMS or fake devices ask for the CPU")
    return found


def _disk() -> list[str]:
    lines = []
    for name, path in (("this folder", Path.cwd()), ("shared memory", Path("/dev/shm"))):
        if path.exists():
            usage = shutil.disk_usage(path)
            small = (
                " (NCCL and data loaders need more)"
                if name == "shared memory" and usage.total < GIB
                else ""
            )
            lines.append(
                f"{name}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free{small}"
            )
    return lines


def _cluster(environment: Mapping[str, str]) -> list[str]:
    found = {cluster: ", ".join(_set(names, environment)) for cluster, names in CLUSTERS.items()}
    if "KUBERNETES_SERVICE_HOST" not in environment:
        found.pop("Kubernetes")  # any machine may have a HOSTNAME
    lines = [f"{cluster}: {values}" for cluster, values in found.items() if values]
    return lines or [f"no variables of {', '.join(CLUSTERS)} found: one process"]
