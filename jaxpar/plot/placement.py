"""A picture of the mesh on its nodes: a cell is a GPU, a box a node, a tile of cells a replica, lines are links of an axis.

    replica 0    stage 0   stage 1
               +----------------------+
      shard 0  | GPU 0 -> GPU 2       |
               |   |        |         |  node 0
      shard 1  | GPU 1 -> GPU 3       |
               +----------------------+

A replica's stages run from left to right, the shards of a stage from top to bottom, replicas below and beside one another.
"""

from collections.abc import Iterator, Mapping
from os import PathLike

from jaxpar.plot.figure import check_format, figure_to
from jaxpar.plot.gpu_drawing import COLOURS, GREY, draw
from jaxpar.plot.gpu_positions import Sheet
from jaxpar.plot.overview import Overview, draw_overview, needs_overview
from jaxpar.plot.topology import MEANINGS, Topology


def plot_placement(
    axes: Mapping[str, int],
    devices_per_node: int = 8,
    *,
    path: str | PathLike[str],
    title: str | None = None,
) -> None:
    """Draws which GPU of which node holds which replica, stage and tensor shard, and the links that each axis uses.

    GPUs of one colour hold the same weights. Of many GPUs the first replica is drawn large, all replicas small below it.

    Args:
        axes: Sizes of ``data``, ``stage`` and ``tensor``: a dict, or a mesh's ``shape``.
        devices_per_node: Devices of a node, which fast links join.
        path: The file; its suffix selects the format: .svg, .png or .pdf.
        title: Title above the picture, before the sizes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: A size is below 1, an axis is unknown, or the suffix is not a known format.
    """
    check_format(path)
    topology = Topology.of(axes, devices_per_node)
    paper = Overview(topology) if needs_overview(topology) else Sheet(topology)
    with figure_to(path, paper.size, asked_by="plot_placement") as figure:
        if isinstance(paper, Overview):
            draw_overview(figure, paper)
        else:
            draw(figure.add_subplot(), paper)
        summary = topology.summary()
        figure.suptitle(f"{title}\n{summary}" if title else summary, x=0.01, ha="left", fontsize=11)
        figure.legend(handles=list(_legend(topology)), loc="outside lower left", frameon=False, fontsize=9)


def _legend(topology: Topology) -> Iterator:
    """Yields a line for each axis in use, in its colour, and a patch that explains the colours of GPUs."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = [axis for axis in MEANINGS if sum(topology.crossing(axis))]
    for axis in used:
        inside, _ = topology.crossing(axis)
        name = f"{axis}, {topology.links(axis)}: {MEANINGS[axis]}"
        yield Line2D([], [], color=COLOURS[axis], lw=3, linestyle="-" if inside else (0, (1.6, 0.9)), label=name)
    if any(topology.crossing(axis)[1] for axis in used):
        name = "dashed: from node to node; solid: inside a node"
        yield Line2D([], [], color=GREY, lw=3, linestyle=(0, (1.6, 0.9)), label=name)
    yield Patch(fc="0.9", ec="0.25", label="GPUs of one colour hold the same weights")
