"""The rates of NVIDIA's GPUs by their datasheets, and their names and memory as the driver reports them, from ``gpus.toml``."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU by its datasheet, with its share of a node's network.

    Attributes:
        name: Such as h100.
        driver_name: As the driver reports it, and JAX as ``device_kind``.
        peak_flops: Peak in dense 16-bit matrix products, operations a second.
        memory_bytes: Memory, as the driver reports it: 79.1 GiB of an H100 "of 80 GB".
        memory_bandwidth: Of the memory, bytes a second.
        node_bandwidth: To other GPUs of the node, one way, bytes a second.
        network_bandwidth: To other nodes, one way, bytes a second.
        multiprocessors: Streaming multiprocessors.
        target: What XLA's compiler knows of it besides; None: it is that of another one, with another network.
    """

    name: str
    driver_name: str
    peak_flops: float
    memory_bytes: int
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    multiprocessors: int
    target: Mapping[str, Any] | None = None


def gpu_nodes() -> list[str]:
    """Returns the device files of NVIDIA's GPUs on this machine, such as /dev/nvidia0."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


GPUS = {
    name: Gpu(name, **sheet)
    for name, sheet in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}


def gpu_of(device_kind: str) -> Gpu | None:
    """Returns the GPU to which the driver gives this name, "NVIDIA H100 80GB HBM3" say; None without a datasheet of it."""
    return next((gpu for gpu in GPUS.values() if gpu.driver_name == device_kind), None)
