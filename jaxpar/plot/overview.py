"""A drawing of many GPUs: the first replica large, and all replicas small below it, joined by the ring over ``data``."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from jaxpar.plot.gpu_drawing import COLOURS, GREY, colour_of, draw
from jaxpar.plot.gpu_positions import Sheet
from jaxpar.plot.topology import DATA, Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY_DEVICES, FEW_REPLICAS = 64, 4
MAX_SMALL, COLUMNS = 16, 4
GAP_X, GAP_Y, ABOVE = 0.22, 0.75, 0.42  # in widths and heights of a small replica
SMALL_WIDTH, SMALL_HEIGHT, LEGEND = 3.2, 0.8, 1.7  # in inches


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
        return self.first.size[1] - LEGEND, self.rows * SMALL_HEIGHT * (1 + GAP_Y) + 0.2

    @cached_property
    def size(self) -> tuple[float, float]:
        """Width and height of the figure in inches, with room for title and legend."""
        return max(self.first.size[0], COLUMNS * SMALL_WIDTH * (1 + GAP_X)), sum(self.heights) + LEGEND + 0.4


def draw_overview(figure: "Figure", paper: Overview) -> None:
    """Draws the first replica with its links, and below it every replica as a map of its stages and shards."""
    large, small = figure.subplots(2, height_ratios=paper.heights)
    draw(large, paper.first)
    small.set_axis_off()
    small.set_xlim(-0.02, COLUMNS * (1 + GAP_X))
    small.set_ylim(paper.rows * (1 + GAP_Y), -ABOVE)
    for index, number in enumerate(paper.replicas):
        x, y = (index % COLUMNS) * (1 + GAP_X), (index // COLUMNS) * (1 + GAP_Y)
        if number is None:
            missing = paper.topology.data - len(paper.replicas) + 1
            name = f"... {missing} more replicas, alike ..."
            small.text(x + 0.5, y + 0.5, name, ha="center", va="center", color=GREY, fontsize=9)
            continue
        _draw_small(small, paper.topology, number, (x, y))
        if index + 1 < len(paper.replicas):
            _draw_ring(small, index, (x, y))


def _draw_small(panel: "Axes", topology: Topology, replica: int, corner: tuple[float, float]) -> None:
    """Draws a replica as a map: a column a stage, a row a shard, with the numbers of its GPUs and nodes above."""
    from matplotlib.patches import Rectangle

    x, y = corner
    width, height = 1 / topology.stage, 1 / topology.tensor
    for stage in range(topology.stage):
        for shard in range(topology.tensor):
            at = x + stage * width, y + shard * height
            panel.add_patch(Rectangle(at, width, height, fc=colour_of(topology, stage, shard), ec="white", lw=0.4))
    last = topology.stage - 1, topology.tensor - 1
    devices = topology.device(replica, 0, 0), topology.device(replica, *last)
    nodes = sorted({topology.node(replica, 0, 0), topology.node(replica, *last)})
    where = f"node{'s' if len(nodes) > 1 else ''} {'-'.join(map(str, nodes))}"
    panel.text(x, y - 0.08, f"replica {replica}", weight="bold", fontsize=8, va="bottom")
    panel.text(
        x + 1, y - 0.08, f"GPUs {devices[0]}-{devices[1]}, {where}", fontsize=8, va="bottom", ha="right", color=GREY
    )


def _draw_ring(panel: "Axes", index: int, corner: tuple[float, float]) -> None:
    """Draws the link from a small replica to the next one; at the end of a row it leads to the beginning of the next row."""
    x, y = corner
    style = {"color": COLOURS[DATA], "lw": 2.2, "linestyle": (0, (1.6, 0.9)), "zorder": 1}
    if (index + 1) % COLUMNS:
        panel.plot([x + 1, x + 1 + GAP_X], [y + 0.5, y + 0.5], **style)
        return
    middle, between = y + 1 + 0.15, 0.3  # of the labels above a replica
    panel.plot([x + 0.5, x + 0.5, between, between], [y + 1, middle, middle, y + 1 + GAP_Y], **style)
