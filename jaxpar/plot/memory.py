"""Bytes on a device of each stage as stacked bars, beside the memory that it has."""

from collections.abc import Mapping
from os import PathLike

from jaxpar.plot.figure import check_format, figure_to

COLOURS = {
    "params": "#5b92d0",
    "optimizer": "#bfaede",
    "gradients": "#f2b45c",
    "activations": "#8fca8b",
    "working": "#b9b9b9",
}
OTHERS = ("#dc8a62", "#7fc7c4", "#d48fb8")
GIB = 2**30


def plot_memory(
    bytes_by_stage: Mapping[str, Mapping[str, int | float]],
    memory_bytes: int | float,
    *,
    path: str | PathLike[str],
    title: str | None = None,
) -> None:
    """Draws the bytes on one device of each stage, by kind, and the memory that it has.

    Args:
        bytes_by_stage: For each bar its parts, from bottom to top.
        memory_bytes: Memory of a device.
        path: The file; its suffix selects the format: .svg, .png or .pdf.
        title: Title above the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are no bars, or the suffix is not a known format.
    """
    check_format(path)
    if not bytes_by_stage:
        raise ValueError("plot_memory must get one bar or more; got none.")
    kinds = list(dict.fromkeys(kind for parts in bytes_by_stage.values() for kind in parts))
    others = iter(OTHERS * len(kinds))
    names = list(bytes_by_stage)
    with figure_to(path, (min(15.0, 3.2 + 0.75 * len(names)), 4.8), asked_by="plot_memory") as figure:
        panel = figure.add_subplot()
        below = [0.0] * len(names)
        for kind in kinds:
            heights = [bytes_by_stage[name].get(kind, 0) / GIB for name in names]
            panel.bar(
                names, heights, 0.7, below, color=COLOURS.get(kind) or next(others), label=kind, edgecolor="white"
            )
            below = [low + height for low, height in zip(below, heights, strict=True)]
        for at, total in enumerate(below):
            panel.text(at, total + 0.01 * memory_bytes / GIB, f"{total:.3g}", ha="center", va="bottom", fontsize=8)
        panel.axhline(memory_bytes / GIB, color="#c0392b", linestyle="--", linewidth=1.2)
        has = f"a device has {memory_bytes / GIB:.3g} GiB"
        panel.text(len(names) - 0.5, memory_bytes / GIB, has, ha="right", va="bottom", color="#c0392b", fontsize=8)
        panel.set_ylim(0, 1.15 * max(*below, memory_bytes / GIB))
        panel.set_ylabel("GiB on one device")
        panel.set_title(title or "What one device of each stage holds", loc="left", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="x", length=0, rotation=0 if len(names) < 9 else 45)
        handles, labels = panel.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
