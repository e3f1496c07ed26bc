"""`python -m jaxpar doctor`: the versions, devices and settings of this machine, on one page to paste into an issue.

It shows only the environment variables that are listed here, none of which is a secret.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxpar.commands.cli import call
from jaxpar.runtime.distributed import GPU_FLAGS
from jaxpar.runtime.output import printable, version_of

PACKAGES = (
    "jaxpar", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flax", "optax", "orbax-checkpoint", "numpy", "jaxtyping", "tyro", "matplotlib",
)  # fmt: skip
SETTINGS = (
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_ENABLE_X64", "JAX_COMPILATION_CACHE_DIR",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION", "PJRT_NPROC", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_NET", "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)  # fmt: skip
CLUSTERS = {
    "jax": ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    "SLURM": (
        "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_GPUS_ON_NODE",
    ),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "JOBSET_NAME", "HOSTNAME"),
    "TPU": ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "MEGASCALE_NUM_SLICES"),
}  # fmt: skip
GIB = 2**30


def doctor() -> None:
    """Prints a report on this machine: versions, devices, collectives, settings, disk and shared memory, cluster variables."""
    print(report(os.environ))


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    call(doctor, args, "doctor")


def report(environment: Mapping[str, str]) -> str:
    """Returns the report.

    Args:
        environment: The environment variables to read.
    """
    import jax

    try:
        backend, (devices, local) = jax.default_backend(), _devices()
    except RuntimeError as error:  # a driver that is too old, a GPU in use
        backend, devices, local = "none", [f"none: {error}"], 0
    sections = {
        "versions": _versions(),
        "machine": _machine(),
        "devices": devices + _driver(),
        "collectives": _collectives(),
        "set": [f"{name}={printable(environment[name])}" for name in SETTINGS if name in environment]
        or ["none of the relevant variables"],
        "to look at": advice(environment, backend, local) or ["nothing"],
        "disk": _disk(),
        "cluster": _cluster(environment),
    }
    return "\n".join(f"{name}\n" + "\n".join(f"  {line}" for line in lines) for name, lines in sections.items())


def _versions() -> list[str]:
    found = [f"{package} {version}" for package in PACKAGES if (version := version_of(package))]
    if version_of("jaxpar") is None:
        import jaxpar

        found.insert(0, f"jaxpar {jaxpar.__version__} (not installed: run from its folder)")
    return [f"python {platform.python_version()}", *found]


def _machine() -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [f"{platform.platform()}, {platform.machine()}", f"{cores} cores for this process"]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()}
        lines.append(f"memory: {kib['MemTotal'] / 2**20:.1f} GiB, {kib['MemAvailable'] / 2**20:.1f} GiB free")
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return lines
    for name, limit in (("open files", resource.RLIMIT_NOFILE), ("locked memory", resource.RLIMIT_MEMLOCK)):
        soft = resource.getrlimit(limit)[0]
        lines.append(f"limit of {name}: {'none' if soft == resource.RLIM_INFINITY else f'{soft:,}'}")
    return lines


def _devices() -> tuple[list[str], int]:
    """Returns lines about the devices, and the number of those in this process."""
    import jax

    local = jax.local_devices()
    kinds = ", ".join(sorted({device.device_kind for device in local}))
    lines = [f"backend {jax.default_backend()}: {len(local)} of {jax.device_count()} devices are here, each a {kinds}"]
    lines.append(f"process {jax.process_index()} of {jax.process_count()}")
    limits = {(device.memory_stats() or {}).get("bytes_limit", 0) for device in local} - {0}
    lines += [f"memory that JAX may use on a device: {limit / GIB:.1f} GiB" for limit in sorted(limits)]
    return lines, len(local)


def _driver() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return ["no nvidia-smi"]
    query = ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi failed: {error}"]


def _collectives() -> list[str]:
    import jax

    cpu = getattr(jax.config, "jax_cpu_collectives_implementation", "unknown")
    nccl = [p for p in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if version_of(p)]
    return [
        f"between processes on CPUs: {cpu}",
        f"between GPUs: NCCL of {', '.join(nccl)}" if nccl else "between GPUs: no NCCL package found",
    ]


def advice(environment: Mapping[str, str], backend: str, num_devices: int) -> list[str]:
    """Returns warnings about the settings, for a backend and the number of its devices in this process."""
    flags, found = environment.get("XLA_FLAGS", ""), []
    given = environment.get("PJRT_NPROC", "")
    threads = int(given) if given.isdecimal() else 0
    unset = [flag for flag in GPU_FLAGS if flag.split("=")[0] not in flags]
    if backend == "gpu" and num_devices > 1 and unset:
        found.append(f"XLA_FLAGS without {' '.join(unset)}: collectives may not overlap with computation")
    if backend == "gpu" and environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("0", "false"):
        found.append("XLA_PYTHON_CLIENT_PREALLOCATE=false: memory fragments sooner; unset it for training")
    if environment.get("NCCL_P2P_DISABLE") == "1" or environment.get("NCCL_IB_DISABLE") == "1":
        found.append("NCCL_P2P_DISABLE or NCCL_IB_DISABLE is 1: the fast links are not used")
    if backend == "cpu" and num_devices > 1 and threads < 2 * num_devices:
        found.append(f"PJRT_NPROC under {2 * num_devices}, twice the devices: fake devices can deadlock")
    if backend == "cpu" and shutil.which("nvidia-smi"):
        found.append(
            "there is a GPU, but JAX runs on the CPU: install jax[cuda12] or jax[cuda13], or see JAX_PLATFORMS"
        )
    return found


def _disk() -> list[str]:
    lines = []
    for name, path in (("this folder", Path.cwd()), ("shared memory", Path("/dev/shm"))):
        if path.exists():
            usage = shutil.disk_usage(path)
            small = " (NCCL and data loaders need more)" if name == "shared memory" and usage.total < GIB else ""
            lines.append(f"{name}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free{small}")
    return lines


def _cluster(environment: Mapping[str, str]) -> list[str]:
    found = []
    for cluster, names in CLUSTERS.items():
        values = [f"{name}={printable(environment[name])}" for name in names if name in environment]
        if values and (cluster != "Kubernetes" or "KUBERNETES_SERVICE_HOST" in environment):
            found.append(f"{cluster}: {', '.join(values)}")
    return found or [f"no variables of {', '.join(CLUSTERS)} found: one process"]
