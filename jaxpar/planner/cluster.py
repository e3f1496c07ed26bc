"""A cluster's nodes, devices, memory, arithmetic and links. The presets are from datasheets (``jaxpar/gpus.py``).

Fast links join the devices of a node, and a network joins the nodes; each device has its share of the node's network cards.
"""

from dataclasses import dataclass

from jaxpar.gpus import GPUS as DATASHEETS

GPUS = tuple(DATASHEETS)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of equal nodes of equal devices.

    Attributes:
        num_nodes: Nodes.
        devices_per_node: Devices of a node.
        memory_bytes: Memory of a device.
        peak_flops: Peak of a device in dense 16-bit matrix products, operations a second.
        memory_bandwidth: Bandwidth of a device's own memory, bytes a second.
        node_bandwidth: Bandwidth from a device to others of its node, one way, bytes a second.
        network_bandwidth: A device's share of its node's network, one way, bytes a second.
        node_latency_seconds: Latency of a message inside a node.
        network_latency_seconds: Latency of a message between nodes.
        multiprocessors: Multiprocessors of a device, each of which computes a tile of a matrix product at a time.
        product_share: The share of the peak that large matrix products reach.
        attention_share: The share of it that fused attention reaches.
        memory_share: The share of the memory's bandwidth that kernels reach.
        launch_seconds: Seconds to launch a kernel.
        fp8_rate: Rate of large matrix products in FP8 over that in 16 bits; 1 for devices without FP8.
        fast_devices: Devices that the fast links join, if more than a node.
        name: Name of the devices, for display.
    """

    num_nodes: int = 1
    devices_per_node: int = 8
    memory_bytes: int | float
    peak_flops: int | float
    memory_bandwidth: int | float
    node_bandwidth: int | float
    network_bandwidth: int | float
    node_latency_seconds: int | float = 3e-6
    network_latency_seconds: int | float = 8e-6
    multiprocessors: int = 108
    product_share: int | float = 0.85
    attention_share: int | float = 0.5
    memory_share: int | float = 0.85
    launch_seconds: int | float = 4e-6
    fp8_rate: int | float = 1.0
    fast_devices: int | None = None
    name: str = "device"

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name" and value is not None and not value > 0:
                raise ValueError(f"{field} of a cluster must be positive; got {value}.")

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    def bandwidth(self, *, crosses_nodes: bool) -> int | float:
        """Returns the bytes a second that a device sends, inside its node or to another."""
        return self.network_bandwidth if crosses_nodes else self.node_bandwidth

    def latency(self, *, crosses_nodes: bool) -> int | float:
        """Returns the latency of a message, in seconds."""
        return self.network_latency_seconds if crosses_nodes else self.node_latency_seconds


# Multiprocessors (datasheets), and the shares of the peak that kernels reach. That of large products is calibrated on the
# published steps of `docs/plan.md`, for A100 and H100, whose clocks fall under load, and assumed to be as for H100 for others.
# That of fused attention: Dao 2023, arXiv 2307.08691, up to 335 TFLOP/s on H100 and 50% of the peak and more on A100.
_HOPPER = {"product_share": 0.68, "attention_share": 0.34, "fp8_rate": 1.7}
_KERNELS = {
    "a100": {"multiprocessors": 108, "product_share": 0.82, "attention_share": 0.5},
    "h100": {"multiprocessors": 132, **_HOPPER},
    "h200": {"multiprocessors": 132, **_HOPPER},
    "b200": {"multiprocessors": 148, **_HOPPER},
}


def cluster(gpu: str, num_nodes: int = 1, devices_per_node: int = 8) -> Cluster:
    """Returns a cluster of GPUs by name.

    Args:
        gpu: One of ``GPUS``.
        num_nodes: Nodes.
        devices_per_node: GPUs of a node.
    """
    if gpu not in DATASHEETS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}; got {gpu!r}. Or describe yours as a Cluster(...).")
    datasheet = DATASHEETS[gpu]
    return Cluster(
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        memory_bytes=datasheet.memory_bytes,
        peak_flops=datasheet.peak_flops,
        memory_bandwidth=datasheet.memory_bandwidth,
        node_bandwidth=datasheet.node_bandwidth,
        network_bandwidth=datasheet.network_bandwidth,
        name=gpu,
        **_KERNELS[gpu.split("-")[0]],
    )
