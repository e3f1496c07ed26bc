"""The position of each GPU of a mesh in a drawing, and the size of the drawing. Does not use matplotlib.

A replica's stages run from left to right, the shards of a stage from top to bottom, replicas below and beside one another.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from jaxpar.plot.topology import Topology

LEGEND = 1.75  # of title and legend, in inches
# Lengths are in widths of a cell.
CELL_HEIGHT, CELL_GAP, NODE_GAP, NODE_MARGIN = 0.58, 0.2, 0.34, 0.1
TILE_GAP_X, TILE_GAP_Y, LEFT, TOP = 1.2, 0.75, 1.2, 0.5
RIGHT, MAX_CELLS, MAX_WIDTH, MAX_CELL, ASPECT = 0.25, 768, 10.5, 0.85, 1.25  # of the figure: inches, width / height


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
        """The number of complete replicas on a node."""
        in_node = self.topology.devices_per_node // (self.topology.stage * self.topology.tensor)
        aligned = in_node and self.topology.devices_per_node % (self.topology.stage * self.topology.tensor) == 0
        return min(in_node, self.topology.data) if aligned else 1

    @cached_property
    def is_plain(self) -> bool:
        """Whether a replica is one device, so that its cell has room for its name."""
        return self.topology.stage * self.topology.tensor == 1

    @cached_property
    def columns(self) -> int:
        """Number of tiles in a row, which keeps nodes together and the drawing near ``ASPECT``."""
        count = len(self.replicas)
        fitting = [n for n in range(1, count + 1) if n % self.together == 0 or self.together % n == 0]
        return min(fitting, key=lambda n: abs(math.log(self._extent(n)[0] / self._extent(n)[1] / ASPECT)))

    @cached_property
    def extent(self) -> tuple[float, float]:
        """Width and height of all tiles, in widths of a cell."""
        return self._extent(self.columns)

    @cached_property
    def inches(self) -> float:
        """The width of a cell in inches."""
        return min(MAX_CELL, MAX_WIDTH / self.extent[0])

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
        gap = CELL_GAP * 2 if self.is_plain else TILE_GAP_X
        return LEFT + column * (width + gap), TOP + row * (height + TILE_GAP_Y)

    def cell(self, index: int, stage: int, shard: int) -> tuple[float, float]:
        """Returns the top left corner of a cell of the index-th tile."""
        x, y = self.tile(index)
        gaps_x, gaps_y = self._gaps_left[stage], self._gaps_above[shard]
        return x + stage * (1 + CELL_GAP) + gaps_x * NODE_GAP, y + shard * (CELL_HEIGHT + CELL_GAP) + gaps_y * NODE_GAP

    @cached_property
    def _gaps_left(self) -> list[int]:
        """Number of borders between nodes to the left of each stage, in any replica."""
        node, replicas = self.topology.node, range(min(self.topology.data, self.topology.devices_per_node))
        borders = [any(node(r, s, 0) != node(r, s - 1, 0) for r in replicas) for s in range(1, self.topology.stage)]
        return list(accumulate(borders, initial=0))

    @cached_property
    def _gaps_above(self) -> list[int]:
        """Number of borders between nodes above each shard, in any replica."""
        node, replicas = self.topology.node, range(min(self.topology.data, self.topology.devices_per_node))
        borders = [any(node(r, 0, t) != node(r, 0, t - 1) for r in replicas) for t in range(1, self.topology.tensor)]
        return list(accumulate(borders, initial=0))

    @cached_property
    def tile_extent(self) -> tuple[float, float]:
        """Width and height of the cells of a replica."""
        last = self.topology.stage - 1, self.topology.tensor - 1
        gaps_x, gaps_y = self._gaps_left[-1], self._gaps_above[-1]
        return (
            1 + last[0] * (1 + CELL_GAP) + gaps_x * NODE_GAP,
            CELL_HEIGHT + last[1] * (CELL_HEIGHT + CELL_GAP) + gaps_y * NODE_GAP,
        )

    def _extent(self, columns: int) -> tuple[float, float]:
        rows = math.ceil(len(self.replicas) / columns)
        width, height = self.tile_extent
        gap = CELL_GAP * 2 if self.is_plain else TILE_GAP_X
        return LEFT + columns * width + (columns - 1) * gap + RIGHT, TOP + rows * (height + TILE_GAP_Y)
