"""A cluster's nodes, devices, memory, arithmetic and links, and the seconds of collectives over a mesh axis on them.

Fast links join the devices of a node, and a network joins the nodes; each device has its share of the node's network cards. The
presets are from datasheets (``jaxpar/gpus.py``).

    ring    reduce-scatter and all-gather in n - 1 steps each; an all-reduce is both (Patarasuk and Yuan 2009)
    tree    an all-reduce up and down two binary trees, 2 log2 n steps, for small arrays on many devices (Sanders et al. 2009)

The faster of the two is taken, as NCCL does. Most steps of a ring over nodes are inside a node, and have its latency.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from jaxpar.fields import check_kind, check_one_of, is_flag
from jaxpar.gpus import GPUS as DATASHEETS
from jaxpar.inspect.collectives import ring_bytes
from jaxpar.mesh import FROM_SLOWEST

GPUS = tuple(DATASHEETS)
_TREE_SHARE = 0.9  # of a ring's bandwidth


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The rates of the kernels of jaxpar's own steps, measured on a device, where they differ from those of others.

    Attributes:
        product_share: The share of the peak that large matrix products reach.
        attention_shares: A head_dim, and the shares of fused attention with it, forward and backward.
        grouped_shares: Rates of products of rows with the weights of experts, and of those that give the gradients of the
            weights, over that of one product.
        chain_bytes: Bytes that fused chains of operations read and write, over those with which they begin and end.
        fp8_rate: Rate of products of factors in FP8 over that in 16 bits, their rounding not included.
    """

    product_share: float
    attention_shares: tuple[tuple[int, float, float], ...]
    grouped_shares: tuple[float, float]
    chain_bytes: float
    fp8_rate: float

    def attention(self, head_dim: int) -> tuple[float, float]:
        """Returns the shares of fused attention, of the nearest head_dim that was measured."""
        _, *shares = min(self.attention_shares, key=lambda each: abs(each[0] - head_dim))
        return shares[0], shares[1]


# One H100 of 700 W with cuDNN 9.19, in `tests/data/measured.json`. The shares of attention and of products of experts are those
# of single kernels; of large products and of bytes those with which the steps are planned best; that of products in
# FP8 the one with which two linear maps are.
_H100 = Measured(
    product_share=0.75,
    attention_shares=((64, 0.41, 0.34), (128, 0.58, 0.45)),
    grouped_shares=(0.45, 0.7),
    chain_bytes=1.3,
    fp8_rate=1.9,
)
# The shares of the peak that kernels reach. That of large products is calibrated on the steps of `docs/published.md`, for A100
# and H100, whose clocks fall under load, and assumed to be as for H100 for others. That of fused attention: Dao 2023, arXiv
# 2307.08691, up to 335 TFLOP/s on H100 and 50% of the peak and more on A100.
_KERNELS: dict[str, dict[str, Any]] = {
    "a100": {"product_share": 0.82, "attention_share": 0.5},
    "other": {
        "product_share": 0.68,
        "attention_share": 0.34,
        "fp8_rate": 1.7,
        "memory_share": 0.83,
        "measured": _H100,
    },
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of equal nodes of equal devices.

    Attributes:
        num_nodes: Nodes.
        devices_per_node: Devices of a node.
        memory_bytes: Memory of a device.
        peak_flops: Peak of a device in dense 16-bit matrix products, operations per second.
        memory_bandwidth: Bandwidth of a device's own memory, bytes per second.
        node_bandwidth: Bandwidth from a device to others of its node, one way, bytes per second.
        network_bandwidth: A device's share of its node's network, one way, bytes per second.
        node_latency_seconds: Latency of a message inside a node.
        network_latency_seconds: Latency of a message between nodes.
        multiprocessors: Multiprocessors of a device, each of which computes a tile of a matrix product at a time.
        product_share: The share of the peak that large matrix products reach.
        attention_share: The share of it that fused attention reaches.
        memory_share: The share of the memory's bandwidth that kernels reach.
        launch_seconds: Seconds to launch a kernel.
        fp8_rate: Rate of large matrix products in FP8 over that in 16 bits; 1 for devices without FP8.
        fast_devices: Devices that the fast links join, if more than a node.
        measured: The rates of jaxpar's own kernels, where they were measured.
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
    measured: Measured | None = None
    name: str = "device"

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field in ("name", "measured"):
                continue
            check_kind(
                (Real, None), "a number", "Give one above 0.", **{f"{field} of a cluster": value}
            )
            if value is not None and not value > 0:
                raise ValueError(f"{field} of a cluster must be positive; got {value}.")

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    def bandwidth(self, *, crosses_nodes: bool) -> int | float:
        """Returns the bytes per second that a device sends, inside its node or to another."""
        return self.network_bandwidth if crosses_nodes else self.node_bandwidth

    def latency(self, *, crosses_nodes: bool) -> int | float:
        """Returns the latency of a message, in seconds."""
        return self.network_latency_seconds if crosses_nodes else self.node_latency_seconds


def cluster(gpu: str, num_nodes: int = 1, devices_per_node: int = 8) -> Cluster:
    """Returns a cluster of GPUs by name.

    Args:
        gpu: One of ``GPUS``.
        num_nodes: Nodes.
        devices_per_node: GPUs of a node.
    """
    check_one_of(GPUS, "" if is_flag("gpu") else "Or describe yours as a Cluster(...).", gpu=gpu)
    datasheet = {
        name: value
        for name, value in vars(DATASHEETS[gpu]).items()
        if name not in ("driver_name", "target")
    }
    kernels = _KERNELS.get(gpu.split("-")[0], _KERNELS["other"])
    return Cluster(num_nodes=num_nodes, devices_per_node=devices_per_node, **datasheet, **kernels)


@dataclass(frozen=True)
class Links:
    """The links of a mesh on a cluster, whose devices are on the mesh in ``make_mesh``'s order.

    Attributes:
        cluster: The machines.
        sizes: The size of each mesh axis.
        share: The share of a link's bandwidth that collectives reach.
    """

    cluster: Cluster
    sizes: Mapping[str, int]
    share: int | float

    def together(self, axis: str) -> int:
        """Returns how many members of a group along an axis share a node."""
        inner = math.prod(
            self.sizes.get(faster, 1) for faster in FROM_SLOWEST[FROM_SLOWEST.index(axis) + 1 :]
        )
        return max(1, (self.cluster.fast_devices or self.cluster.devices_per_node) // inner)

    def crosses(self, axis: str) -> bool:
        """Returns whether groups along an axis span several nodes."""
        return self.sizes[axis] > self.together(axis)

    def rate(self, axis: str) -> int | float:
        """Returns the bytes per second of each device in a ring; across nodes, members in a node share its network cards."""
        cards = self.together(axis) * self.cluster.network_bandwidth
        bandwidth = (
            min(self.cluster.node_bandwidth, cards)
            if self.crosses(axis)
            else self.cluster.node_bandwidth
        )
        return bandwidth * self.share

    def latency(self, axis: str) -> int | float:
        """Returns the latency of a collective in seconds: up and down a tree."""
        steps = 2 * math.ceil(math.log2(max(2, self.sizes[axis])))
        return steps * self.cluster.latency(crosses_nodes=self.crosses(axis))

    def crossings(self, axis: str) -> list[bool]:
        """Returns, for each member of a group along an axis, whether the next one (cyclically) is on another node."""
        node = [member // self.together(axis) for member in range(self.sizes[axis])]
        return [here != there for here, there in zip(node, [*node[1:], *node[:1]], strict=True)]

    def message(
        self, num_bytes: int | float, axis: str, *, crosses: bool | None = None
    ) -> int | float:
        """Returns the seconds of a message to a neighbour along an axis.

        Args:
            num_bytes: Its bytes.
            axis: The mesh axis.
            crosses: Whether the neighbour is on another node; None: where some neighbours are, to those.
        """
        crosses = self.crosses(axis) if crosses is None else crosses
        bandwidth = self.cluster.bandwidth(crosses_nodes=crosses) * self.share
        return num_bytes / bandwidth + self.cluster.latency(crosses_nodes=crosses)


def collective_seconds(links: Links, axis: str, kind: str, payload_bytes: int) -> float:
    """Returns the seconds of one collective over an axis.

    Args:
        links: The links of the mesh.
        axis: The mesh axis.
        kind: XLA's name: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        payload_bytes: Bytes of the complete array, or of a message.
    """
    size = links.sizes[axis]
    if kind == "collective-permute":
        return links.message(payload_bytes, axis)
    if size == 1:
        return 0.0
    if kind == "all-to-all":  # what leaves a node takes the device's own card
        inside, cluster = min(size, links.together(axis)), links.cluster
        near = (inside - 1) / size * payload_bytes / cluster.node_bandwidth
        far = (size - inside) / size * payload_bytes / cluster.network_bandwidth
        return max(near, far) / links.share + cluster.latency(crosses_nodes=links.crosses(axis))
    moved = ring_bytes(kind, payload_bytes, size) / links.rate(axis)
    if kind != "all-reduce":
        return moved + _round_seconds(links, axis)
    return min(moved + 2 * _round_seconds(links, axis), moved / _TREE_SHARE + links.latency(axis))


def _round_seconds(links: Links, axis: str) -> float:
    """Returns the latency of a message once around the ring."""
    size, together = links.sizes[axis], links.together(axis)
    between = math.ceil(size / together) if links.crosses(axis) else 0
    inside, across = (links.cluster.latency(crosses_nodes=crosses) for crosses in (False, True))
    return (size - 1 - min(between, size - 1)) * inside + between * across
