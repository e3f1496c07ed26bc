"""A drawing of many GPUs: the first replica large, and all replicas small below it, joined by the ring over ``data``."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from jaxpar.plot.gpu_drawing import COLOURS, GREY, colour_of, draw
from jaxpar.plot.gpu_positions import LEGEND, Sheet
from jaxpar.plot.topology import DATA, Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY_DEVICES, FEW_REPLICAS = 64, 4
MAX_SMALL, COLUMNS = 16, 4
GAP_X, GAP_Y, ABOVE, MARGIN = 0.16, 0.95, 0.35, 0.08  # in widths and heights of a small replica
SMALL_WIDTH, SMALL_HEIGHT = 2.15, 0.56  # in inches


def needs_overview(topology: Topology) -> bool:
    """Returns whether a mesh has too many GPUs to draw each of them with its links."""
    return (
        topology.num_devices > MANY_DEVICES and topology.data >= FEW_REPLICAS and topology.stage * topology.tensor > 1
    )


@dataclass(frozen=True)
class Overview:
    """The size of the drawing, and the replicas that are drawn small."""

    topology: Topology

    @cached_property
    def first(self) -> Sheet:
        """The sheet of the first replica."""
        return Sheet(replace(self.topology, data=1))

    @cached_property
    def replicas(self) -> list[int | None]:
        """The replicas that are drawn small, in order; None marks the place of those that are left out."""
        count = self.topology.data
        if count <= MAX_SMALL:
            return list(range(count))
        return [*range(MAX_SMALL - 2), None, count - 1]

    @cached_property
    def rows(self) -> int:
        """The number of rows of small replicas."""
        return -(-len(self.replicas) // COLUMNS)

    @cached_property
    def heights(self) -> tuple[float, float]:
        """The heights of the large replica and of the small ones, in inches."""
        return self.first.size[1] - LEGEND, self.rows * SMALL_HEIGHT * (1 + GAP_Y) + SMALL_HEIGHT * ABOVE

    @cached_property
    def size(self) -> tuple[float, float]:
        """Width and height of the figure in inches, with room for title and legend."""
        return max(self.first.size[0], COLUMNS * SMALL_WIDTH * (1 + GAP_X)), sum(self.heights) + LEGEND + 0.1


def draw_overview(figure: "Figure", paper: Overview) -> None:
    """Draws the first replica with its links, and below it every replica as a map of its stages and shards."""
    large, small = figure.subplots(2, height_ratios=paper.heights)
    draw(large, paper.first)
    small.set_axis_off()
    small.set_xlim(-MARGIN - 0.02, COLUMNS * (1 + GAP_X) - GAP_X + 0.02)
    small.set_ylim(paper.rows * (1 + GAP_Y), -ABOVE)
    corners = [_corner(index) for index in range(len(paper.replicas))]
    for corner, number in zip(corners, paper.replicas, strict=True):
        if number is None:
            missing = paper.topology.data - len(paper.replicas) + 1
            text = f"... {missing} more\nreplicas, alike ..."
            small.text(corner[0] + 0.5, corner[1] + 0.5, text, ha="center", va="center", color=GREY, fontsize=9)
        else:
            _draw_small(small, paper.topology, number, corner)
    _draw_ring(small, corners)


def _corner(index: int) -> tuple[float, float]:
    """Returns the top left corner of a small replica; every other row runs from right to left, so that neighbours touch."""
    row, column = divmod(index, COLUMNS)
    return (COLUMNS - 1 - column if row % 2 else column) * (1 + GAP_X), row * (1 + GAP_Y)


def _draw_small(panel: "Axes", topology: Topology, replica: int, corner: tuple[float, float]) -> None:
    """Draws a replica as a map: a column a stage, a row a shard; its number above, those of its GPUs and nodes below."""
    from matplotlib.patches import Rectangle

    x, y = corner
    width, height = 1 / topology.stage, 1 / topology.tensor
    for stage in range(topology.stage):
        for shard in range(topology.tensor):
            at = x + stage * width, y + shard * height
            panel.add_patch(
                Rectangle(at, width, height, fc=colour_of(topology, stage, shard), ec="white", lw=0.4, zorder=2)
            )
    last = topology.stage - 1, topology.tensor - 1
    devices = topology.device(replica, 0, 0), topology.device(replica, *last)
    nodes = sorted({topology.node(replica, 0, 0), topology.node(replica, *last)})
    where = f"node{'s' if len(nodes) > 1 else ''} {'-'.join(map(str, nodes))}"
    panel.text(x, y - 0.06, f"replica {replica}", weight="bold", fontsize=8, va="bottom")
    panel.text(x, y + 1.06, f"GPUs {devices[0]}-{devices[1]}, {where}", fontsize=8, va="top", color=GREY)


def _draw_ring(panel: "Axes", corners: list[tuple[float, float]]) -> None:
    """Draws the ring over ``data``: from each small replica to the next one, and from the last back to the first."""
    style = {"color": COLOURS[DATA], "lw": 2.2, "linestyle": (0, (1.6, 0.9)), "zorder": 1}
    line = lambda *points: panel.plot(*zip(*points, strict=True), **style)
    for (x, y), (to_x, to_y) in pairwise(corners):
        if y == to_y:
            left = min(x, to_x)
            line((left + 1, y + 0.5), (left + 1 + GAP_X, y + 0.5))
        else:  # clear of the labels, which are on the left
            line((x + 0.93, y + 1), (x + 0.93, to_y))
    (first_x, first_y), (x, y) = corners[0], corners[-1]
    back = [(-MARGIN, first_y + 0.5), (first_x, first_y + 0.5)]
    under = y + 1 + 0.5 * GAP_Y
    end = (
        [(x, y + 0.5), (-MARGIN, y + 0.5)] if x == first_x else [(x + 0.93, y + 1), (x + 0.93, under), (-MARGIN, under)]
    )
    line(*end, *back)
