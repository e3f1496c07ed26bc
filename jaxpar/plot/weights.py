"""How a weight [in, out] is split over ``tensor``: by column, by row, and mixed, one after the other.

column  each shard has some outputs of the map       y = [x W0, x W1], nothing is sent
row     each shard has some inputs of the map        y = x0 W0 + x1 W1, the shards add up
mixed   a column map, then a row map                 one sum for the pair
"""

from os import PathLike
from typing import TYPE_CHECKING

from jaxpar.plot.figure import check_format, figure_to

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#5b92d0", "#f2b45c", "#8fca8b", "#bfaede", "#dc8a62", "#7fc7c4", "#d48fb8", "#c9b458")
SUM = "#c0392b"


def plot_weight_cuts(tensor: int, *, path: str | PathLike[str]) -> None:
    """Draws how a weight is split by column, by row and mixed over the shards of ``tensor``, and what each split sends.

    Args:
        tensor: Shards, 1 to 8.
        path: The file; its suffix selects the format: .svg, .png or .pdf.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The number of shards is out of range, or the suffix is not a known format.
    """
    check_format(path)
    if not 1 <= tensor <= len(COLOURS):
        raise ValueError(f"tensor must be from 1 to {len(COLOURS)} to be drawn; got {tensor}. Choose fewer shards.")
    with figure_to(path, (10.5, 9.0), asked_by="plot_weight_cuts") as figure:
        column, row, mixed = figure.subplots(3, 1, gridspec_kw={"height_ratios": (1, 1, 1)})
        _column(column, tensor)
        _row(row, tensor)
        _mixed(mixed, tensor)
        figure.suptitle(f"A weight on {tensor} shards: one colour, one GPU; grey: whole on each\n", x=0.01, ha="left")


def _column(panel: "Axes", tensor: int) -> None:
    _panel(panel, "by column: each GPU has all inputs and a part of the outputs")
    _block(panel, 0, 1, 3, 2, ["0.85"], by="row", name="x  [batch, in]")
    _block(panel, 4, 0.5, 4, 3, COLOURS[:tensor], by="column", name="W  [in, out / tensor]")
    _signs(panel, {3.5: "·", 8.5: "="})
    _block(panel, 9, 1, 4, 2, COLOURS[:tensor], by="column", name="y  [batch, out / tensor]")
    panel.text(15.2, 2, "nothing is sent", va="center", fontsize=10)


def _row(panel: "Axes", tensor: int) -> None:
    _panel(panel, "by row: each GPU has a part of the inputs and all outputs")
    _block(panel, 0, 1, 3, 2, COLOURS[:tensor], by="column", name="x  [batch, in / tensor]")
    _block(panel, 4, 0.5, 4, 3, COLOURS[:tensor], by="row", name="W  [in / tensor, out]")
    _sums(panel, 9, tensor)
    _signs(panel, {3.5: "·", 8.5: "=", 13.5: "→"})
    _block(panel, 14, 1, 4, 2, ["0.85"], by="row", name="y  [batch, out]")
    _all_reduce(panel, 13.5)


def _mixed(panel: "Axes", tensor: int) -> None:
    _panel(panel, "mixed: column, then row, as in attention and MLP: one sum for the two")
    _block(panel, 0, 1, 2, 2, ["0.85"], by="row", name="x")
    _block(panel, 2.8, 0.9, 3.4, 2.2, COLOURS[:tensor], by="column", name="W up, by column")
    _block(panel, 7, 1, 3.4, 2, COLOURS[:tensor], by="column", name="h: stays where it is")
    _block(panel, 11.2, 0.3, 2, 3.4, COLOURS[:tensor], by="row", name="W down, by row")
    _block(panel, 14.4, 1, 2, 2, ["0.85"], by="row", name="y")
    _signs(panel, {2.4: "·", 6.6: "→", 10.8: "·", 13.7: "→"})
    _all_reduce(panel, 14.4)


def _panel(panel: "Axes", title: str) -> None:
    panel.set_xlim(-0.3, 18.5)
    panel.set_ylim(4.6, -0.4)
    panel.set_axis_off()
    panel.set_title(title, loc="left", fontsize=11)


def _block(
    panel: "Axes",
    x: int | float,
    y: int | float,
    width: int | float,
    height: int | float,
    colours: list[str] | tuple[str, ...],
    *,
    by: str,
    name: str,
) -> None:
    """Draws an array, each part in its colour."""
    from matplotlib.patches import Rectangle

    count = len(colours)
    for i, colour in enumerate(colours):
        across = (x + i * width / count, y, width / count, height)
        down = (x, y + i * height / count, width, height / count)
        left, top, w, h = across if by == "column" else down
        panel.add_patch(Rectangle((left, top), w, h, fc=colour, ec="0.25", lw=0.8))
        if count > 1:
            label = f"GPU {i}" if w >= 0.9 else f"{i}"
            panel.text(left + w / 2, top + h / 2, label, ha="center", va="center", fontsize=8)
    panel.text(x + width / 2, y + height + 0.15, name, ha="center", va="top", fontsize=9)


def _sums(panel: "Axes", x: int | float, tensor: int) -> None:
    """Draws the partial sum of each shard, one behind another."""
    from matplotlib.patches import Rectangle

    for i in reversed(range(tensor)):
        shift = 0.9 * i / tensor
        panel.add_patch(Rectangle((x + shift, 1 + shift - 0.4), 3, 1.6, fc=COLOURS[i], ec="0.25", lw=0.8))
    panel.text(x + 1.5, 1.4, "a part of the\nsum on each GPU", ha="center", va="center", fontsize=8)


def _signs(panel: "Axes", signs: dict[float, str]) -> None:
    for x, sign in signs.items():
        panel.text(x, 2, sign, ha="center", va="center", fontsize=18)


def _all_reduce(panel: "Axes", x: int | float) -> None:
    panel.text(x, 0.35, "all-reduce", ha="center", va="center", fontsize=9, color=SUM, weight="bold")
