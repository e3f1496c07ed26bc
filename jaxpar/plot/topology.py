"""Which device of which node holds which part of a model, and which links each axis uses: as numbers, as text and on paper.

Devices are numbered as ``jaxpar.make_mesh`` orders them, ``tensor`` fastest, node by node. Eight of them on two nodes of four,
data=2, stage=2, tensor=2:

    node  stage  replica 0  replica 1
    0     0      GPUs 0-1   GPUs 2-3
    1     1      GPUs 4-5   GPUs 6-7

In a drawing (``Sheet``) a replica's stages run from left to right, the shards of a stage from top to bottom. Replicas are below
one another, so that a node with parts of several is one box; with one stage also beside one another. Nothing here uses
matplotlib.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, product

MAX_LINES = 64
MEANINGS = {
    "tensor": "shards of one stage add up activations, in every layer",
    "data": "replicas add up gradients, once a step",
    "stage": "a stage hands activations to the next, gradients back",
}
LEGEND = 1.75  # of title and legend, in inches
# Lengths are in widths of a cell.
CELL_HEIGHT, CELL_GAP, NODE_GAP, NODE_MARGIN = 0.58, 0.2, 0.34, 0.1
TILE_GAP_X, TILE_GAP_Y, LEFT, TOP = 1.2, 0.75, 1.2, 0.5
RIGHT, MAX_CELLS, ASPECT = 0.25, 768, 1.25  # of the figure: width / height
MAX_WIDTH, MAX_HEIGHT, MAX_CELL = 10.5, 14.0, 0.85  # in inches


@dataclass(frozen=True)
class Topology:
    """A mesh on its nodes.

    Attributes:
        data: Replicas of the model, of all groups.
        stage: Pipeline stages of a replica.
        tensor: Shards of a stage.
        devices_per_node: Devices of a node, which fast links join.
        replica: Groups of replicas, each with devices one after another.

    Raises:
        ValueError: A size below 1.
    """

    data: int
    stage: int
    tensor: int
    devices_per_node: int
    replica: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an integer, 1 or more; got {name}={size!r}.")

    @classmethod
    def of(cls, axes: Mapping[str, int], devices_per_node: int) -> "Topology":
        """Returns the topology of a mesh, given its axes (``mesh.shape``, or a dict); an axis that is left out has size 1.

        All replicas are drawn alike, those of ``data`` beside one another in each group of ``replica``.
        """
        drawn = ("replica", "data", "stage", "tensor")
        unknown = sorted(
            axis
            for axis, size in axes.items()
            if axis not in drawn and (axis != "context" or size > 1)
        )
        if unknown:
            raise ValueError(
                f"a mesh has the axes data, stage and tensor; got {unknown}. Leave the others out."
            )
        groups = axes.get("replica", 1)
        return cls(
            groups * axes.get("data", 1),
            axes.get("stage", 1),
            axes.get("tensor", 1),
            devices_per_node,
            groups,
        )

    @property
    def in_group(self) -> int:
        """Replicas of a group."""
        return self.data // self.replica

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.stage * self.tensor

    @property
    def num_nodes(self) -> int:
        """Nodes that hold the devices."""
        return math.ceil(self.num_devices / self.devices_per_node)

    def device(self, data: int, stage: int, tensor: int) -> int:
        """Returns the number of a device from its coordinates on the mesh."""
        group, replica = divmod(data, self.in_group)
        return ((group * self.stage + stage) * self.in_group + replica) * self.tensor + tensor

    def node(self, data: int, stage: int, tensor: int) -> int:
        """Returns the node of a device."""
        return self.device(data, stage, tensor) // self.devices_per_node

    def hops(self, axis: str) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """Returns the pairs of neighbours along an axis, as coordinates (data, stage, tensor); rings are left open."""
        to_d, to_s, to_t = (int(name == axis) for name in ("data", "stage", "tensor"))
        starts = product(
            range(self.data - to_d), range(self.stage - to_s), range(self.tensor - to_t)
        )
        return [((d, s, t), (d + to_d, s + to_s, t + to_t)) for d, s, t in starts]

    def crossing(self, axis: str) -> tuple[int, int]:
        """Returns how many hops along an axis stay inside a node, and how many cross from node to node."""
        hops = self.hops(axis)
        inside = sum(self.node(*a) == self.node(*b) for a, b in hops)
        return inside, len(hops) - inside

    def summary(self) -> str:
        """Returns the sizes in one line."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        groups = f"replica={self.replica} x " if self.replica > 1 else ""
        axes = f"{groups}data={self.in_group} x stage={self.stage} x tensor={self.tensor}"
        return f"{axes}: {self.num_devices} GPUs on {nodes} of {self.devices_per_node}"

    def links(self, axis: str) -> str:
        """Returns in words which links an axis uses."""
        inside, across = self.crossing(axis)
        if not inside + across:
            return "not used (size 1)"
        if not across:
            return "inside nodes"
        return (
            "across nodes"
            if not inside
            else f"{inside} of {inside + across} hops inside nodes, {across} across"
        )


def render_placement(axes: Mapping[str, int], devices_per_node: int = 8) -> str:
    """Returns which GPU of which node holds which replica, stage and tensor shards, and the links that each axis uses.

    Args:
        axes: Sizes of ``data``, ``stage`` and ``tensor``: a dict, or a mesh's ``shape``.
        devices_per_node: Devices of a node, which fast links join.

    Example:
        >>> print(render_placement({"data": 2, "stage": 2, "tensor": 2}, 4))
        data=2 x stage=2 x tensor=2: 8 GPUs on 2 nodes of 4
        <BLANKLINE>
        node 0  stage 0  replica 0: GPUs 0-1  replica 1: GPUs 2-3
        node 1  stage 1  replica 0: GPUs 4-5  replica 1: GPUs 6-7
        <BLANKLINE>
        tensor  inside nodes: shards of one stage add up activations, in every layer
        data    inside nodes: replicas add up gradients, once a step
        stage   across nodes: a stage hands activations to the next, gradients back
    """
    topology = Topology.of(axes, devices_per_node)
    lines, half = _lines(topology), MAX_LINES // 2
    if len(lines) > MAX_LINES:
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more, alike ...", *lines[-half:]]
    links = [f"{axis:<6}  {topology.links(axis)}: {meaning}" for axis, meaning in MEANINGS.items()]
    return "\n".join([topology.summary(), "", *lines, "", *links])


def _lines(topology: Topology) -> list[str]:
    """Returns a line for each node and each stage with devices on it."""
    width = len(str(topology.num_devices - 1))
    node_width, stage_width = len(str(topology.num_nodes - 1)), len(str(topology.stage - 1))
    coordinates = product(range(topology.data), range(topology.stage), range(topology.tensor))
    in_order = sorted(coordinates, key=lambda at: topology.device(*at))
    lines = []
    for (node, stage), held in groupby(in_order, key=lambda at: (topology.node(*at), at[1])):
        parts = []
        for replica, shards in groupby(held, key=lambda at: at[0]):
            devices = [topology.device(*at) for at in shards]
            part = "" if len(devices) == topology.tensor else " (part)"
            parts.append(
                f"replica {replica:>{len(str(topology.data - 1))}}: {_range(devices, width)}{part}"
            )
        lines.append(f"node {node:>{node_width}}  stage {stage:>{stage_width}}  {'  '.join(parts)}")
    return lines


def _range(devices: list[int], width: int) -> str:
    first, last = devices[0], devices[-1]
    return f"GPU {first:>{width}}" if first == last else f"GPUs {first:>{width}}-{last:>{width}}"


def rectangles(topology: Topology, replica: int) -> list[tuple[int, range, range]]:
    """Returns the largest rectangular parts of a replica that are each on one node: (node, stages, shards)."""
    parts: list[tuple[int, range, range]] = []
    for stage in range(topology.stage):
        for node, shards in groupby(
            range(topology.tensor), key=lambda shard: topology.node(replica, stage, shard)
        ):
            first, *others = shards
            rows, start = range(first, first + 1 + len(others)), stage
            for part in [
                part for part in parts if part == (node, range(part[1].start, stage), rows)
            ]:
                parts.remove(part)
                start = part[1].start
            parts.append((node, range(start, stage + 1), rows))
    return parts


@dataclass(frozen=True)
class Sheet:
    """The position of each replica, stage and shard in a drawing; y grows downwards."""

    topology: Topology

    @cached_property
    def replicas(self) -> list[int | None]:
        """The replicas that are drawn, in order; None marks those that are left out."""
        topology, together = self.topology, self.together
        room = max(1, MAX_CELLS // (topology.stage * topology.tensor))
        if topology.data <= max(room, 2 * together):
            return list(range(topology.data))
        first = max(together, room // together * together - together)
        return [*range(first), *[None] * together, *range(topology.data - together, topology.data)]

    @cached_property
    def together(self) -> int:
        """The number of replicas of a stage that share a node."""
        topology = self.topology
        data = topology.data if topology.stage == 1 else topology.in_group
        in_node, rest = divmod(topology.devices_per_node, topology.tensor)
        is_aligned = rest == 0 and (
            topology.stage == 1 or data % in_node == 0 or in_node % data == 0
        )
        return min(in_node, data) if is_aligned else 1

    @cached_property
    def is_plain(self) -> bool:
        """Whether a replica is one device, so that its cell has room for its name."""
        return self.topology.stage * self.topology.tensor == 1

    @property
    def _gap(self) -> float:
        return CELL_GAP * 2 if self.is_plain else TILE_GAP_X

    @cached_property
    def columns(self) -> int:
        """Number of tiles in a row, which keeps nodes together and the drawing near ``ASPECT``; with stages 1."""
        count = len(self.replicas) if self.topology.stage == 1 else 1
        fitting = [
            n for n in range(1, count + 1) if n % self.together == 0 or self.together % n == 0
        ]
        return min(
            fitting, key=lambda n: abs(math.log(self._extent(n)[0] / self._extent(n)[1] / ASPECT))
        )

    @cached_property
    def extent(self) -> tuple[float, float]:
        """Width and height of all tiles, in widths of a cell."""
        return self._extent(self.columns)

    @cached_property
    def inches(self) -> float:
        """The width of a cell in inches."""
        return min(MAX_CELL, MAX_WIDTH / self.extent[0], MAX_HEIGHT / self.extent[1])

    @cached_property
    def size(self) -> tuple[float, float]:
        """Width and height of the figure in inches, with room for title and legend."""
        width, height = self.extent
        return max(width * self.inches + 0.3, 7.0), height * self.inches + LEGEND

    def shows(self, index: int) -> bool:
        """Returns whether there is an index-th tile and it shows a replica."""
        return index < len(self.replicas) and self.replicas[index] is not None

    def tile(self, index: int) -> tuple[float, float]:
        """Returns the top left corner of the index-th tile's first cell."""
        row, column = divmod(index, self.columns)
        width, height = self.tile_extent
        return LEFT + column * (width + self._gap), TOP + row * (height + TILE_GAP_Y)

    def cell(self, index: int, stage: int, shard: int) -> tuple[float, float]:
        """Returns the top left corner of a cell of the index-th tile."""
        (x, y), (lefts, tops) = self.tile(index), self._edges
        return x + lefts[stage], y + tops[shard]

    @cached_property
    def _edges(self) -> tuple[list[float], list[float]]:
        """The left edge of each stage and the top of each shard in a tile; cells of two nodes are further apart."""
        topology, replicas = (
            self.topology,
            range(min(self.topology.data, self.topology.devices_per_node)),
        )

        def edges(count: int, step: float, node: Callable[[int, int], int]) -> list[float]:
            borders = (
                any(node(r, at) != node(r, at - 1) for r in replicas) for at in range(1, count)
            )
            return list(
                accumulate((step + NODE_GAP * is_border for is_border in borders), initial=0.0)
            )

        return (
            edges(
                topology.stage,
                1 + CELL_GAP,
                lambda replica, stage: topology.node(replica, stage, 0),
            ),
            edges(
                topology.tensor,
                CELL_HEIGHT + CELL_GAP,
                lambda replica, shard: topology.node(replica, 0, shard),
            ),
        )

    @cached_property
    def tile_extent(self) -> tuple[float, float]:
        """Width and height of the cells of a replica."""
        lefts, tops = self._edges
        return lefts[-1] + 1, tops[-1] + CELL_HEIGHT

    def _extent(self, columns: int) -> tuple[float, float]:
        rows = math.ceil(len(self.replicas) / columns)
        width, height = self.tile_extent
        return LEFT + columns * width + (columns - 1) * self._gap + RIGHT, TOP + rows * (
            height + TILE_GAP_Y
        )
