"""Loss curves of several runs: as text, a table with a sketch of each; as a picture, all in one panel."""

import math
from collections.abc import Mapping, Sequence
from os import PathLike

from jaxpar.plot.figure import check_format, figure_to, panels

BARS = "▁▂▃▄▅▆▇█"
SKETCH_WIDTH = 40
COLOURS = ("#1b6ca8", "#d95f02", "#1b9e77", "#b0308c", "#7a6a00", "#5b5b5b")
STYLES = ("-", "--", "-.", ":")
GREEN, ORANGE, GREY = "#1b9e77", "#d95f02", "#808080"

Curve = tuple[Sequence[int], Sequence[float]]


def render_curves(runs: Mapping[str, Curve], *, name: str = "loss") -> str:
    """Returns a table of runs: number of points, first, lowest and last value, and a sketch, with one scale for all sketches.

    Steps are counted from 1, as in the report; those of ``runs`` and of metrics.jsonl from 0.

    Args:
        runs: For each run its steps and its values, NaN where one was not finite.
        name: Name of the values.

    Example:
        >>> print(render_curves({"a": ([0, 1, 2], [3.0, 2.0, 1.0]), "b": ([0, 1], [3.0, 2.5])}))
        run  points  first loss  lowest  at step  last
        a    3       3           1       3        1     █▅▁
        b    2       3           2.5     2        2.5   █▆
    """
    finite = [value for _, values in runs.values() for value in values if math.isfinite(value)]
    scale = (min(finite), max(finite)) if finite else (0.0, 0.0)
    longest = max((len(values) for _, values in runs.values()), default=1)
    rows = [["run", "points", f"first {name}", "lowest", "at step", "last", ""]]
    for run, (steps, values) in runs.items():
        width = max(1, round(min(SKETCH_WIDTH, longest) * len(values) / longest))
        at, lowest = min(zip(steps, values, strict=True), key=lambda pair: (not math.isfinite(pair[1]), pair[1]))
        rows.append([run, str(len(values)), f"{values[0]:.5g}", f"{lowest:.5g}", str(at + 1), f"{values[-1]:.5g}"])
        rows[-1].append(_sketch(values, width, scale))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _sketch(values: Sequence[float], width: int, scale: tuple[float, float]) -> str:
    """Returns a bar for the mean of each part of the values, ! where it is not finite."""
    low, high = scale
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    height = lambda mean: round((len(BARS) - 1) * (mean - low) / (high - low)) if high > low else 0
    return "".join(BARS[height(mean)] if math.isfinite(mean) else "!" for mean in means)


def plot_curves(runs: Mapping[str, Curve], path: str | PathLike[str], *, name: str = "loss") -> None:
    """Draws the curves of runs on the same axes, each named with its last value.

    Args:
        runs: For each run its steps and its values, NaN where one was not finite.
        path: The file; its suffix selects the format: .svg, .png or .pdf.
        name: Name of the values.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The suffix is not a known format.
    """
    check_format(path)
    with figure_to(path, (8.0, 5.0), asked_by="plot_curves") as figure:
        panel = figure.add_subplot()
        for i, (run, (steps, values)) in enumerate(runs.items()):
            style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)], "linewidth": 1.4}
            panel.plot([step + 1 for step in steps], values, label=f"{run}: {values[-1]:.4g} at the end", **style)
        panel.set(title=f"{name} of {len(runs)} runs, step by step", xlabel="steps taken", ylabel=name)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="0.9")
        panel.legend(loc="best", frameon=False)


def plot_loss(path: str | PathLike[str], lines: Sequence[Mapping[str, float]], entropy: float, unit: str) -> None:
    """Draws the loss of each step of a language model and that on the text held out, beside that of frequencies alone.

    Args:
        path: The file.
        lines: The lines of metrics.jsonl.
        entropy: The entropy of the frequencies of tokens, in nats.
        unit: What a token is, such as byte.
    """
    figure, axes = panels(1, 1, (8, 5))
    steps, of_steps = ([line[name] for line in lines] for name in ("step", "loss"))
    tested = [line for line in lines if "test_loss" in line]
    axes.plot([step + 1 for step in steps], of_steps, color=GREEN, linewidth=1, label="text learned from, one step")
    axes.plot(
        [line["step"] + 1 for line in tested],
        [line["test_loss"] for line in tested],
        color=ORANGE,
        marker="o",
        markersize=4,
        label=f"text held out; at the end {tested[-1]['test_loss']:.3f}" if tested else "text held out",
    )
    axes.axhline(entropy, color=GREY, linestyle="--", label=f"knowing frequencies alone: {entropy:.3f}")
    axes.set(title="The loss as the model learns", xlabel="steps taken", ylabel=f"cross-entropy (nats a {unit})")
    axes.set_ylim(0, 1.05 * max(*filter(math.isfinite, of_steps), entropy, 0.0))
    axes.legend(loc="best")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
