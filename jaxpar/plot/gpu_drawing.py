"""Draws the GPUs of replicas on their nodes, with the links of each axis, for ``placement`` and ``overview``."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from jaxpar.plot.gpu_positions import CELL_HEIGHT, LEFT, MAX_CELL, NODE_MARGIN, Sheet
from jaxpar.plot.topology import DATA, STAGE, TENSOR, Topology, rectangles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {TENSOR: "#c0392b", STAGE: "#1f4e9c", DATA: "#2e7d32"}
GREY, PAPER = "0.35", {"fc": "white", "lw": 0, "pad": 0.6}


def draw(panel: "Axes", sheet: Sheet) -> None:
    """Draws nodes, then links, then GPUs on them."""
    width, height = sheet.extent
    panel.set_xlim(0, width)
    panel.set_ylim(height, 0)
    panel.set_aspect("equal", anchor="NW")
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
    corner = left - NODE_MARGIN, bottom + NODE_MARGIN + 0.16  # links over data pass on the right
    _write(panel, sheet, corner, f"node {node}", 0.8, color=GREY, ha="left", bbox=PAPER)


def _draw_links(panel: "Axes", sheet: Sheet) -> None:
    """Draws the hops of stages and shards between cells, and a link between replicas for each pair of nodes."""
    topology = sheet.topology
    of_one = replace(topology, data=1)
    for index, replica in enumerate(sheet.replicas):
        if replica is None:
            continue
        for axis in (STAGE, TENSOR):
            for (_, *a), (_, *b) in of_one.hops(axis):
                ends = _centre(sheet, index, *a), _centre(sheet, index, *b)
                _draw_link(panel, sheet, axis, *ends, across=topology.node(replica, *a) != topology.node(replica, *b))
        for to in _next_replicas(sheet, index):
            for start, end, across in _between(sheet, index, to):
                _draw_link(panel, sheet, DATA, start, end, across=across)


def _next_replicas(sheet: Sheet, index: int) -> Iterator[int]:
    """Yields the tiles to which a tile's data links lead: the next one in its row, and from a row's first the one below."""
    beside, below = index + 1, index + sheet.columns
    if beside % sheet.columns and sheet.shows(beside):
        yield beside
    if index % sheet.columns == 0 and sheet.shows(below):
        yield below


def _between(sheet: Sheet, index: int, to: int) -> Iterator[tuple[tuple, tuple, bool]]:
    """Yields the data links from a tile to the next one beside or below it: the ends of each, and whether it joins two nodes.

    A link stands for all pairs of GPUs at the same place of two replicas. It leads from the edge of a node to that of a node
    of the other replica, between stages (below) or shards (beside) that both of them hold.
    """
    topology, last = sheet.topology, (sheet.topology.stage - 1, sheet.topology.tensor - 1)
    margin = 0.0 if sheet.is_plain else NODE_MARGIN
    (x, y), (to_x, to_y) = sheet.cell(index, *last), sheet.tile(to)
    is_beside = sheet.tile(index)[1] == to_y
    parts = (rectangles(topology, sheet.replicas[each] or 0) for each in (index, to))
    for (node, stages, shards), (to_node, to_stages, to_shards) in product(*parts):
        if is_beside and stages[-1] == last[0] and to_stages[0] == 0 and (both := _both(shards, to_shards)):
            middle = sum(sheet.cell(index, 0, shard)[1] for shard in (both[0], both[-1])) / 2 + CELL_HEIGHT / 2
            yield (x + 1 + margin, middle), (to_x - margin, middle), node != to_node
        elif not is_beside and shards[-1] == last[1] and to_shards[0] == 0 and (both := _both(stages, to_stages)):
            middle = sum(sheet.cell(index, stage, 0)[0] for stage in (both[0], both[-1])) / 2 + 0.5
            yield (middle, y + CELL_HEIGHT + margin), (middle, to_y - margin), node != to_node


def _both(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _centre(sheet: Sheet, index: int, stage: int, shard: int) -> tuple[float, float]:
    x, y = sheet.cell(index, stage, shard)
    return x + 0.5, y + CELL_HEIGHT / 2


def _draw_link(panel: "Axes", sheet: Sheet, axis: str, *points: tuple[float, float], across: bool) -> None:
    thick = max(1.0, 3.2 * sheet.inches / MAX_CELL)
    width = {TENSOR: 1.6 * thick, STAGE: thick, DATA: 1.2 * thick}[axis]
    style = (0, (1.6, 0.9)) if across else "-"
    panel.plot(
        *zip(*points, strict=True), color=COLOURS[axis], lw=width, linestyle=style, zorder=2, solid_capstyle="butt"
    )


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
    colour = colour_of(sheet.topology, *at[1:])
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


def colour_of(topology: Topology, stage: int, shard: int) -> tuple[float, float, float]:
    """Returns the colour of a part of the model: a hue for each stage; paler for later shards."""
    from colorsys import hls_to_rgb

    hue = (0.58 + stage / topology.stage) % 1
    lightness = 0.66 + 0.22 * shard / max(1, topology.tensor - 1)
    return hls_to_rgb(hue, lightness, 0.55)
