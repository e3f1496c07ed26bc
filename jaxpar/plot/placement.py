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
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from jaxpar.plot.figure import check_format, figure_to
from jaxpar.plot.sheet import CELL_HEIGHT, LEFT, MAX_CELL, NODE_MARGIN, Sheet
from jaxpar.plot.topology import DATA, MEANINGS, STAGE, TENSOR, Topology, rectangles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {TENSOR: "#c0392b", STAGE: "#1f4e9c", DATA: "#2e7d32"}
GREY, PAPER = "0.35", {"fc": "white", "lw": 0, "pad": 0.6}


def plot_placement(
    axes: Mapping[str, int],
    devices_per_node: int = 8,
    *,
    path: str | PathLike[str],
    title: str | None = None,
) -> None:
    """Draws which GPU of which node holds which replica, stage and tensor shard, and the links that each axis uses.

    GPUs of one colour hold the same weights. If there are very many replicas, only the first and the last are drawn.

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
    sheet = Sheet(Topology.of(axes, devices_per_node))
    with figure_to(path, sheet.size, asked_by="plot_placement") as figure:
        panel = figure.add_subplot()
        _draw(panel, sheet)
        summary = sheet.topology.summary()
        figure.suptitle(f"{title}\n{summary}" if title else summary, x=0.01, ha="left", fontsize=11)
        figure.legend(handles=list(_legend(sheet.topology)), loc="outside lower left", frameon=False, fontsize=9)


def _draw(panel: "Axes", sheet: Sheet) -> None:
    """Draws nodes, then links, then GPUs on them."""
    width, height = sheet.extent
    panel.set_xlim(0, width)
    panel.set_ylim(height, 0)
    panel.set_aspect("equal")
    panel.set_axis_off()
    _draw_nodes(panel, sheet)
    _draw_links(panel, sheet)
    for index, replica in enumerate(sheet.replicas):
        if replica is None:
            _draw_left_out(panel, sheet, index)
        else:
            _draw_replica(panel, sheet, index, replica)


def _draw_nodes(panel: "Axes", sheet: Sheet) -> None:
    """Draws a box around the GPUs of each node, with its number."""
    topology = sheet.topology
    boxes: dict[tuple, list[tuple[float, float, float, float]]] = {}
    for index, replica in enumerate(sheet.replicas):
        for part, (node, stages, shards) in enumerate(rectangles(topology, replica) if replica is not None else ()):
            left, top = sheet.cell(index, stages[0], shards[0])
            right, bottom = sheet.cell(index, stages[-1], shards[-1])
            key = (node,) if sheet.together > 1 else (node, index, part)
            boxes.setdefault(key, []).append((left, top, right + 1, bottom + CELL_HEIGHT))
    for key, parts in boxes.items():
        lefts, tops, rights, bottoms = zip(*parts, strict=True)
        _draw_node(panel, sheet, key[0], (min(lefts), min(tops), max(rights), max(bottoms)))


def _draw_node(panel: "Axes", sheet: Sheet, node: int, box: tuple[float, float, float, float]) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, top, right, bottom = box
    style = {"boxstyle": f"round,pad={NODE_MARGIN},rounding_size=0.08", "fc": "0.93", "ec": "0.6", "lw": 0.8}
    panel.add_patch(FancyBboxPatch((left, top), right - left, bottom - top, **style))
    corner = right + NODE_MARGIN, bottom + NODE_MARGIN + 0.16
    _write(panel, sheet, corner, f"node {node}", 0.8, color=GREY, ha="right", bbox=PAPER)


def _draw_links(panel: "Axes", sheet: Sheet) -> None:
    """Draws the hops of each axis: inside a replica between cells, and between replicas downward or across."""
    topology = sheet.topology
    of_one = replace(topology, data=1)
    for index, replica in enumerate(sheet.replicas):
        if replica is None:
            continue
        for axis in (STAGE, TENSOR):
            for (_, *a), (_, *b) in of_one.hops(axis):
                ends = _centre(sheet, index, *a), _centre(sheet, index, *b)
                _draw_link(panel, sheet, axis, *ends, topology.node(replica, *a) != topology.node(replica, *b))
        below, beside = index + sheet.columns, index + 1
        for stage in range(topology.stage) if sheet.shows(below) else ():
            across = topology.node(replica, stage, 0) != topology.node(sheet.replicas[below] or 0, stage, 0)
            ends = _centre(sheet, index, stage, topology.tensor - 1), _centre(sheet, below, stage, 0)
            _draw_link(panel, sheet, DATA, *ends, across)
        if beside % sheet.columns and sheet.shows(beside):
            across = topology.node(replica, 0, 0) != topology.node(sheet.replicas[beside] or 0, 0, 0)
            x, y = _centre(sheet, index, topology.stage - 1, 0)
            middle = (y + _centre(sheet, index, 0, topology.tensor - 1)[1]) / 2
            _draw_link(panel, sheet, DATA, (x + 0.5, middle), (sheet.tile(beside)[0], middle), across)


def _centre(sheet: Sheet, index: int, stage: int, shard: int) -> tuple[float, float]:
    x, y = sheet.cell(index, stage, shard)
    return x + 0.5, y + CELL_HEIGHT / 2


def _draw_link(
    panel: "Axes", sheet: Sheet, axis: str, a: tuple[float, float], b: tuple[float, float], across: bool
) -> None:
    thick = max(1.0, 3.2 * sheet.inches / MAX_CELL)
    width = {TENSOR: 1.6 * thick, STAGE: thick, DATA: 0.8 * thick}[axis]
    style = (0, (1.6, 0.9)) if across else "-"
    panel.plot(*zip(a, b, strict=True), color=COLOURS[axis], lw=width, linestyle=style, zorder=2, solid_capstyle="butt")


def _draw_replica(panel: "Axes", sheet: Sheet, index: int, replica: int) -> None:
    """Draws the cells of a replica and their names; stages are named above, shards on the left."""
    topology = sheet.topology
    for stage in range(topology.stage):
        left, top = sheet.cell(index, stage, 0)
        if topology.stage > 1 and index < sheet.columns:
            _write(panel, sheet, (left + 0.5, top - 0.24), f"stage {stage}", 1.05, color=COLOURS[STAGE], ha="center")
        for shard in range(topology.tensor):
            _draw_cell(panel, sheet, index, (replica, stage, shard))
    x, y = sheet.tile(index)
    if not sheet.is_plain:
        _write(panel, sheet, (x - 0.18, y - 0.24), f"replica {replica}", LEFT - 0.2, weight="bold", ha="right")
    for shard in range(topology.tensor if topology.tensor > 1 and index % sheet.columns == 0 else 0):
        left, top = sheet.cell(index, 0, shard)
        at = left - 0.18, top + CELL_HEIGHT / 2
        _write(panel, sheet, at, f"shard {shard}", LEFT - 0.2, color=COLOURS[TENSOR], ha="right")


def _draw_cell(panel: "Axes", sheet: Sheet, index: int, at: tuple[int, int, int]) -> None:
    from matplotlib.patches import Rectangle

    x, y = sheet.cell(index, *at[1:])
    colour = _colour(sheet.topology, *at[1:])
    panel.add_patch(Rectangle((x, y), 1, CELL_HEIGHT, fc=colour, ec="0.25", lw=0.5, zorder=3))
    number = sheet.topology.device(*at)
    name = f"GPU {number}" if sheet.inches > 0.45 else f"{number}"
    lines = f"{name}\nreplica {at[0]}" if sheet.is_plain else name
    _write(panel, sheet, (x + 0.5, y + CELL_HEIGHT / 2), lines, 0.9, ha="center", zorder=4)


def _write(panel: "Axes", sheet: Sheet, at: tuple[float, float], text: str, width: float, **style: Any) -> None:
    """Writes text in a font small enough for ``width``, which is in widths of a cell."""
    longest = max(map(len, text.split("\n")))
    points = min(9.0, 72 * width * sheet.inches / (0.6 * longest))
    panel.text(*at, text, fontsize=points, **{"va": "center", **style})


def _draw_left_out(panel: "Axes", sheet: Sheet, index: int) -> None:
    """Writes once how many replicas are not drawn."""
    if index and sheet.replicas[index - 1] is None:
        return
    width, height = sheet.tile_extent
    x, y = sheet.tile(index)
    missing = sheet.topology.data - sum(replica is not None for replica in sheet.replicas)
    name = f"... {missing} more replicas, alike ..."
    _write(panel, sheet, (x + width / 2, y + height / 2), name, width, color=GREY, ha="center")


def _colour(topology: Topology, stage: int, shard: int) -> tuple[float, float, float]:
    """Returns a colour for each part of the model: a hue for each stage, paler for later shards."""
    from colorsys import hls_to_rgb

    hue = (0.58 + stage / topology.stage) % 1 if topology.stage > 1 else 0.58
    lightness = 0.66 + 0.22 * shard / max(1, topology.tensor - 1)
    return hls_to_rgb(hue, lightness, 0.55)


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
