"""The links that the groups of a mesh axis use: their bandwidth and latency in a cluster."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.mesh import DATA, STAGE, TENSOR
from jaxpar.planner.cluster import Cluster


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
        inner = {TENSOR: 1, STAGE: self.sizes[TENSOR], DATA: self.sizes[TENSOR] * self.sizes[STAGE]}[axis]
        return max(1, (self.cluster.fast_devices or self.cluster.devices_per_node) // inner)

    def crosses(self, axis: str) -> bool:
        """Returns whether groups along an axis span several nodes."""
        return self.sizes[axis] > self.together(axis)

    def rate(self, axis: str) -> int | float:
        """Returns the bytes a second of each device in a ring; across nodes its members in a node share their network cards."""
        cards = self.together(axis) * self.cluster.network_bandwidth
        bandwidth = min(self.cluster.node_bandwidth, cards) if self.crosses(axis) else self.cluster.node_bandwidth
        return bandwidth * self.share

    def latency(self, axis: str) -> int | float:
        """Returns the latency of a collective in seconds: up and down a tree."""
        steps = 2 * math.ceil(math.log2(max(2, self.sizes[axis])))
        return steps * self.cluster.latency(crosses_nodes=self.crosses(axis))

    def crossings(self, axis: str) -> list[bool]:
        """Returns, for each member of a group along an axis, whether the next one (cyclically) is on another node."""
        node = [member // self.together(axis) for member in range(self.sizes[axis])]
        return [here != there for here, there in zip(node, [*node[1:], *node[:1]], strict=True)]

    def message(self, num_bytes: int | float, axis: str, *, crosses: bool | None = None) -> int | float:
        """Returns the seconds of a message to a neighbour along an axis.

        Args:
            num_bytes: Its bytes.
            axis: The mesh axis.
            crosses: Whether the neighbour is on another node; None: where some neighbours are, to those.
        """
        crosses = self.crosses(axis) if crosses is None else crosses
        bandwidth = self.cluster.bandwidth(crosses_nodes=crosses) * self.share
        return num_bytes / bandwidth + self.cluster.latency(crosses_nodes=crosses)
