"""A picture of the mesh on its nodes: a cell is a GPU, a box a node, a tile of cells a replica, lines are links of an axis.

    replica 0    stage 0      stage 1
               +-------+    +-------+
      shard 0  | GPU 0 | -> | GPU 4 |
               |   |   |    |   |   |
      shard 1  | GPU 1 | -> | GPU 5 |
               |   |   |    |   |   |
    replica 1  |   |   |    |   |   |
      shard 0  | GPU 2 | -> | GPU 6 |
               |   |   |    |   |   |
      shard 1  | GPU 3 | -> | GPU 7 |
               +-------+    +-------+
               node 0       node 1

Of many GPUs the first stage is large, and all stages are small below it, joined by their messages.
"""

from collections.abc import Iterator, Mapping
from colorsys import hls_to_rgb
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from os import PathLike
from typing import TYPE_CHECKING, Any

from jaxpar.plot.figure import figure_to
from jaxpar.plot.topology import (
    CELL_HEIGHT,
    LEFT,
    LEGEND,
    MAX_CELL,
    MEANINGS,
    NODE_MARGIN,
    Sheet,
    Topology,
    rectangles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"tensor": "#c0392b", "stage": "#1f4e9c", "data": "#2e7d32"}
Point = tuple[float, float]
GREY, PAPER = "0.35", {"fc": "white", "lw": 0, "pad": 0.6}
DASHED = (0, (1.6, 0.9))  # from node to node
MANY_DEVICES = 64
MAX_SMALL, COLUMNS = 16, 4
GAP_X, GAP_Y, ABOVE = 0.16, 0.95, 0.35  # in widths and heights of a small stage
SMALL_WIDTH, SMALL_HEIGHT = 2.15, 0.56  # in inches


def plot_placement(
    axes: Mapping[str, int],
    devices_per_node: int = 8,
    *,
    path: str | PathLike[str],
    title: str | None = None,
) -> None:
    """Draws which GPU of which node holds which replica, stage and tensor shard, and the links that each axis uses.

    GPUs of one colour hold the same weights. Of many GPUs the first stage is drawn large, all stages small below it.

    Args:
        axes: Sizes of ``data``, ``stage`` and ``tensor``: a dict, or a mesh's ``shape``.
        devices_per_node: Devices of a node, which fast links join.
        path: The file; its suffix selects the format: .svg, .png or .pdf.
        title: Title above the picture, before the sizes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: A size is below 1, an axis is unknown, or the suffix is not a known format.
    """
    topology = Topology.of(axes, devices_per_node)
    stages = _small_stages(topology)
    shown = topology
    if stages:
        shown = replace(topology, data=topology.in_group, stage=1, replica=1)
    sheet = Sheet(shown)
    rows = -(-len(stages) // COLUMNS)
    width, height = sheet.size
    heights = height - LEGEND, SMALL_HEIGHT * (rows * (1 + GAP_Y) + ABOVE)
    if stages:
        width = max(width, COLUMNS * SMALL_WIDTH * (1 + GAP_X))
        height = sum(heights) + LEGEND + 0.1
    with figure_to(path, (width, height), asked_by="plot_placement") as figure:
        if stages:
            large, small = figure.subplots(2, height_ratios=heights)
            draw(large, sheet)
            _draw_stages(small, topology, stages, rows)
        else:
            draw(figure.add_subplot(), sheet)
        summary = topology.summary()
        heading = f"{title}\n{summary}" if title else summary
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
        handles = list(_legend(topology))
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=9)


def _legend(topology: Topology) -> Iterator:
    """Yields a line for each axis in use, in its colour, and a patch that explains the colours of GPUs."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    hops = {axis: topology.crossing(axis) for axis in MEANINGS}
    for axis, (inside, across) in hops.items():
        if inside + across:
            name = f"{axis}, {topology.links(axis)}: {MEANINGS[axis]}"
            style = "-" if inside else DASHED
            yield Line2D([], [], color=COLOURS[axis], lw=3, linestyle=style, label=name)
    if any(across for _, across in hops.values()):
        name = "dashed: from node to node; solid: inside a node"
        yield Line2D([], [], color=GREY, lw=3, linestyle=DASHED, label=name)
    yield Patch(fc="0.9", ec="0.25", label="GPUs of one colour hold the same weights")


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
    from matplotlib.patches import FancyBboxPatch

    topology = sheet.topology
    boxes: dict[tuple, list[tuple[Point, Point]]] = {}
    for index, replica in enumerate(sheet.replicas):
        if replica is None:
            continue
        for part, (node, stages, shards) in enumerate(rectangles(topology, replica)):
            first = sheet.cell(index, stages[0], shards[0])
            x, y = sheet.cell(index, stages[-1], shards[-1])
            end = x + 1, y + CELL_HEIGHT
            key = (node,) if sheet.together > 1 else (node, index, part)
            boxes.setdefault(key, []).append((first, end))
    style = {
        "boxstyle": f"round,pad={NODE_MARGIN},rounding_size=0.08",
        "fc": "0.93",
        "ec": "0.6",
        "lw": 0.8,
    }
    for (node, *_), parts in boxes.items():
        firsts, ends = zip(*parts, strict=True)
        left, top = map(min, zip(*firsts, strict=True))
        right, bottom = map(max, zip(*ends, strict=True))
        box = FancyBboxPatch((left, top), right - left, bottom - top, **style)
        panel.add_patch(box)
        # Links over data pass on the right.
        corner = left - NODE_MARGIN, bottom + NODE_MARGIN + 0.16
        _write(panel, sheet, corner, f"node {node}", 0.8, color=GREY, ha="left", bbox=PAPER)


def _draw_links(panel: "Axes", sheet: Sheet) -> None:
    """Draws the hops of stages and shards between cells, and a link between replicas for each pair of nodes."""
    topology = sheet.topology
    of_one = replace(topology, data=1)  # for the coordinates, not the numbers
    for index, replica in enumerate(sheet.replicas):
        if replica is None:
            continue
        for axis in ("stage", "tensor"):
            for (_, *a), (_, *b) in of_one.hops(axis):
                across = topology.node(replica, *a) != topology.node(replica, *b)
                ends = _centre(sheet, index, *a), _centre(sheet, index, *b)
                _draw_link(panel, sheet, axis, *ends, across=across)
        for to in _next_replicas(sheet, index):
            for start, end, across in _between(sheet, index, to):
                _draw_link(panel, sheet, "data", start, end, across=across)


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
    last_stage = sheet.topology.stage - 1
    last_shard = sheet.topology.tensor - 1
    x, y = sheet.cell(index, last_stage, last_shard)
    to_x, to_y = sheet.tile(to)
    is_beside = sheet.tile(index)[1] == to_y
    parts = [rectangles(sheet.topology, sheet.replicas[each] or 0) for each in (index, to)]
    for (node, stages, shards), (to_node, to_stages, to_shards) in product(*parts):
        across = node != to_node
        margin = NODE_MARGIN if across and not sheet.is_plain else 0.0
        if is_beside:
            both = _both(shards, to_shards)
            touch = stages[-1] == last_stage and to_stages[0] == 0
        else:
            both = _both(stages, to_stages)
            touch = shards[-1] == last_shard and to_shards[0] == 0
        if not both or not touch:
            continue
        ends = both[0], both[-1]
        if is_beside:
            middle = sum(_centre(sheet, index, 0, shard)[1] for shard in ends) / 2
            yield (x + 1 + margin, middle), (to_x - margin, middle), across
        else:
            middle = sum(_centre(sheet, index, stage, 0)[0] for stage in ends) / 2
            yield (middle, y + CELL_HEIGHT + margin), (middle, to_y - margin), across


def _centre(sheet: Sheet, index: int, stage: int, shard: int) -> Point:
    x, y = sheet.cell(index, stage, shard)
    return x + 0.5, y + CELL_HEIGHT / 2


def _both(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, min(a.stop, b.stop))


def _draw_link(panel: "Axes", sheet: Sheet, axis: str, *points: Point, across: bool) -> None:
    thick = max(1.0, 3.2 * sheet.inches / MAX_CELL)
    width = {"tensor": 1.6 * thick, "stage": thick, "data": 1.2 * thick}[axis]
    panel.plot(
        *zip(*points, strict=True),
        solid_capstyle="butt",
        color=COLOURS[axis],
        lw=width,
        linestyle=DASHED if across else "-",
        zorder=2,
    )


def _draw_replica(panel: "Axes", sheet: Sheet, index: int, replica: int) -> None:
    """Draws the cells of a replica and their names; stages are named above, shards on the left."""
    topology = sheet.topology
    write = partial(_write, panel, sheet)
    for stage in range(topology.stage):
        left, top = sheet.cell(index, stage, 0)
        if topology.stage > 1 and index < sheet.columns:
            at = left + 0.5, top - 0.24
            write(at, f"stage {stage}", 1.05, color=COLOURS["stage"], ha="center")
        for shard in range(topology.tensor):
            _draw_cell(panel, sheet, index, (replica, stage, shard))
    x, y = sheet.tile(index)
    if not sheet.is_plain:
        at = x - 0.18, y - 0.24
        write(at, f"replica {replica}", LEFT - 0.2, weight="bold", ha="right")
    if topology.tensor == 1 or index % sheet.columns:
        return
    for shard in range(topology.tensor):
        left, top = sheet.cell(index, 0, shard)
        at = left - 0.18, top + CELL_HEIGHT / 2
        write(at, f"shard {shard}", LEFT - 0.2, color=COLOURS["tensor"], ha="right")


def _draw_cell(panel: "Axes", sheet: Sheet, index: int, at: tuple[int, int, int]) -> None:
    from matplotlib.patches import Rectangle

    topology = sheet.topology
    replica, stage, shard = at
    corner = sheet.cell(index, stage, shard)
    colour = colour_of(topology, stage, shard)
    box = Rectangle(corner, 1, CELL_HEIGHT, fc=colour, ec="0.25", lw=0.5, zorder=3)
    panel.add_patch(box)
    number = topology.device(*at)
    name = f"GPU {number}" if sheet.inches > 0.45 else f"{number}"
    lines = f"{name}\nreplica {replica}" if sheet.is_plain else name
    centre = _centre(sheet, index, stage, shard)
    _write(panel, sheet, centre, lines, 0.9, ha="center", zorder=4)


def _write(
    panel: "Axes",
    sheet: Sheet,
    at: Point,
    text: str,
    width: float,
    **style: Any,
) -> None:
    """Writes text in a font small enough for ``width``, which is in widths of a cell."""
    longest = max(map(len, text.split("\n")))
    points = min(9.0, 72 * width * sheet.inches / (0.6 * longest))
    style.setdefault("va", "center")
    panel.text(*at, text, fontsize=points, **style)


def _draw_left_out(panel: "Axes", sheet: Sheet, index: int) -> None:
    """Writes once how many replicas are not drawn."""
    if index and sheet.replicas[index - 1] is None:
        return
    width, height = sheet.tile_extent
    x, y = sheet.tile(index)
    shown = [replica for replica in sheet.replicas if replica is not None]
    missing = sheet.topology.data - len(shown)
    name = f"... {missing} more replicas, alike ..."
    middle = x + width / 2, y + height / 2
    _write(panel, sheet, middle, name, width, color=GREY, ha="center")


def colour_of(topology: Topology, stage: int, shard: int) -> tuple[float, float, float]:
    """Returns the colour of a part of the model: a hue for each stage; paler for later shards."""
    hue = (0.58 + stage / topology.stage) % 1
    lightness = 0.66 + 0.22 * shard / max(1, topology.tensor - 1)
    return hls_to_rgb(hue, lightness, 0.55)


def _small_stages(topology: Topology) -> list[int | None]:
    """Returns the stages that are drawn small, group by group; none where each GPU can be drawn with its links.

    None marks the place of those that are left out.
    """
    if topology.num_devices <= MANY_DEVICES or topology.stage == 1 or topology.data == 1:
        return []
    count = topology.replica * topology.stage
    if count <= MAX_SMALL:
        return list(range(count))
    return [*range(MAX_SMALL - 2), None, count - 1]


def _draw_stages(panel: "Axes", topology: Topology, stages: list[int | None], rows: int) -> None:
    """Draws every stage as a map of its replicas and shards, and the way of the messages to the next one of its group."""
    panel.set_axis_off()
    panel.set_xlim(-0.02, COLUMNS * (1 + GAP_X) - GAP_X + 0.02)
    panel.set_ylim(rows * (1 + GAP_Y), -ABOVE)
    corners = [_corner(index) for index in range(len(stages))]
    for (x, y), number in zip(corners, stages, strict=True):
        if number is None:
            missing = topology.replica * topology.stage - len(stages) + 1
            text = f"... {missing} more\nstages, alike ..."
            panel.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=GREY, fontsize=9)
        else:
            _draw_small(panel, topology, number, (x, y))
    _draw_messages(panel, topology, corners)


def _corner(index: int) -> Point:
    """Returns the top left corner of a small stage; every other row runs from right to left, so that neighbours touch."""
    row, column = divmod(index, COLUMNS)
    if row % 2:
        column = COLUMNS - 1 - column
    return column * (1 + GAP_X), row * (1 + GAP_Y)


def _draw_small(panel: "Axes", topology: Topology, index: int, corner: Point) -> None:
    """Draws a stage as a map: a column a replica, a row a shard; its number above, those of its GPUs and nodes below."""
    from matplotlib.patches import Rectangle

    x, y = corner
    group, stage = divmod(index, topology.stage)
    count = topology.in_group
    width, height = 1 / count, 1 / topology.tensor
    for replica, shard in product(range(count), range(topology.tensor)):
        at = x + replica * width, y + shard * height
        colour = colour_of(topology, stage, shard)
        box = Rectangle(at, width, height, fc=colour, ec="white", lw=0.4, zorder=2)
        panel.add_patch(box)
    first = group * count, stage, 0
    last = (group + 1) * count - 1, stage, topology.tensor - 1
    ends = first, last
    nodes = sorted({topology.node(*end) for end in ends})
    where = f"node{'s' if len(nodes) > 1 else ''} {'-'.join(map(str, nodes))}"
    name = f"stage {stage}" if topology.replica == 1 else f"group {group}, stage {stage}"
    panel.text(x, y - 0.06, name, weight="bold", fontsize=8, va="bottom")
    gpus = f"GPUs {topology.device(*first)}-{topology.device(*last)}, {where}"
    panel.text(x, y + 1.06, gpus, fontsize=8, va="top", color=GREY)


def _draw_messages(panel: "Axes", topology: Topology, corners: list[Point]) -> None:
    for (index, (x, y)), (to, (to_x, to_y)) in pairwise(enumerate(corners)):
        stage, to_stage = index % topology.stage, to % topology.stage
        if to_stage == 0:
            continue
        across = topology.node(0, stage, 0) != topology.node(0, to_stage, 0)
        if y == to_y:
            right = min(x, to_x) + 1
            ends = (right, right + GAP_X), (y + 0.5, y + 0.5)
        else:  # clear of the labels, which are on the left
            ends = (x + 0.93, x + 0.93), (y + 1, to_y)
        panel.plot(
            *ends,
            color=COLOURS["stage"],
            lw=2.2,
            linestyle=DASHED if across else "-",
            zorder=1,
        )
