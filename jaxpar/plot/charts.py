"""Charts of runs and plans: losses as curves, as text too; the memory of a device and the time of a step as stacked bars."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from os import PathLike
from typing import Any

from jaxpar.plot.figure import figure_to, panels

BARS = "▁▂▃▄▅▆▇█"
SKETCH_WIDTH = 40
LINE_COLOURS = ("#1b6ca8", "#d95f02", "#1b9e77", "#b0308c", "#7a6a00", "#5b5b5b")
STYLES = ("-", "--", "-.", ":")

Curve = tuple[Sequence[int], Sequence[float]]
Bars = Mapping[str, Mapping[str, int | float]]  # the parts of each bar
MEMORY_COLOURS = {
    "params": "#5b92d0",
    "optimizer": "#bfaede",
    "gradients": "#f2b45c",
    "activations": "#8fca8b",
    "working": "#b9b9b9",
}
OTHERS = ("#dc8a62", "#7fc7c4", "#d48fb8")
GIB = 2**30
TIME_COLOURS = ("#5b92d0", "#bfaede", "#f2b45c", "#c9c9c9", "#8fca8b", "#dc8a62", "#7fc7c4")


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
        at, lowest = min(
            zip(steps, values, strict=True), key=lambda pair: (not math.isfinite(pair[1]), pair[1])
        )
        rows.append(
            [
                run,
                str(len(values)),
                f"{values[0]:.5g}",
                f"{lowest:.5g}",
                str(at + 1),
                f"{values[-1]:.5g}",
            ]
        )
        rows[-1].append(_sketch(values, width, scale))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _sketch(values: Sequence[float], width: int, scale: tuple[float, float]) -> str:
    """Returns a bar for the mean of each part of the values, ! where it is not finite."""
    low, high = scale
    parts = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    means = [sum(part) / len(part) for part in parts]
    height = lambda mean: round((len(BARS) - 1) * (mean - low) / (high - low)) if high > low else 0
    return "".join(BARS[height(mean)] if math.isfinite(mean) else "!" for mean in means)


def plot_curves(
    runs: Mapping[str, Curve], path: str | PathLike[str], *, name: str = "loss"
) -> None:
    """Draws the curves of runs on the same axes, each named with its last value.

    Args:
        runs: For each run its steps and its values, NaN where one was not finite.
        path: The file; its suffix selects the format: .svg, .png or .pdf.
        name: Name of the values.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The suffix is not a known format.
    """
    with figure_to(path, (8.0, 5.0), asked_by="plot_curves") as figure:
        panel = figure.add_subplot()
        for (run, (steps, values)), color, line in zip(
            runs.items(), cycle(LINE_COLOURS), cycle(STYLES), strict=False
        ):
            label = f"{run}: {values[-1]:.4g} at the end"
            panel.plot(
                [step + 1 for step in steps],
                values,
                color=color,
                linestyle=line,
                linewidth=1.4,
                label=label,
            )
        panel.set(
            title=f"{name} of {len(runs)} runs, step by step", xlabel="steps taken", ylabel=name
        )
        panel.grid(axis="y", color="0.9")
        panel.legend(loc="best", frameon=False)


def plot_memory(
    bytes_by_stage: Bars,
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
    sizes = {
        name: {kind: n / GIB for kind, n in parts.items()} for name, parts in bytes_by_stage.items()
    }
    others, names = cycle(OTHERS), list(sizes)
    with figure_to(
        path, (min(15.0, 3.2 + 0.75 * len(names)), 4.8), asked_by="plot_memory"
    ) as figure:
        panel = figure.add_subplot()
        totals = _stack(
            "plot_memory", panel.bar, sizes, lambda kind: MEMORY_COLOURS.get(kind) or next(others)
        )
        for at, total in enumerate(totals):
            panel.text(
                at,
                total + 0.01 * memory_bytes / GIB,
                f"{total:.3g}",
                ha="center",
                va="bottom",
                fontsize=8,
            )
        panel.axhline(memory_bytes / GIB, color="#c0392b", linestyle="--", linewidth=1.2)
        has = f"a device has {memory_bytes / GIB:.3g} GiB"
        panel.text(
            len(names) - 0.5,
            memory_bytes / GIB,
            has,
            ha="right",
            va="bottom",
            color="#c0392b",
            fontsize=8,
        )
        panel.set_ylim(0, 1.15 * max(*totals, memory_bytes / GIB))
        panel.set_ylabel("GiB on one device")
        panel.set_title(title or "What one device of each stage holds", loc="left", fontsize=11)
        panel.tick_params(axis="x", length=0, rotation=0 if len(names) < 9 else 45)
        handles, labels = panel.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)


def plot_step_time(
    seconds_by_plan: Bars, *, path: str | PathLike[str], title: str | None = None
) -> None:
    """Draws the seconds of a step by part, a bar for each plan.

    Args:
        seconds_by_plan: For each bar its parts, from left to right.
        path: The file; its suffix selects the format: .svg, .png or .pdf.
        title: Title above the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are no bars, or the suffix is not a known format.
    """
    colours = cycle(TIME_COLOURS)
    with figure_to(
        path, (9.5, 1.6 + 0.42 * len(seconds_by_plan)), asked_by="plot_step_time"
    ) as figure:
        panel = figure.add_subplot()
        totals = _stack("plot_step_time", panel.barh, seconds_by_plan, lambda _: next(colours))
        for at, total in enumerate(totals):
            panel.text(total, at, f" {total:.3g} s", va="center", fontsize=8)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.1 * max(totals) or 1)
        panel.set_xlabel("seconds of a step")
        panel.set_title(title or "Where the time of a step goes", loc="left", fontsize=11)
        panel.tick_params(axis="y", length=0, labelsize=8)
        figure.legend(loc="outside right center", frameon=False)


def plot_loss(
    path: str | PathLike[str], lines: Sequence[Mapping[str, float]], unigram_loss: float, unit: str
) -> None:
    """Draws the loss of each step of a language model and that on the text held out, beside that of frequencies alone.

    Args:
        path: The file.
        lines: The lines of metrics.jsonl.
        unigram_loss: The loss on the text held out of a model that knows only how frequent tokens are in the text learned from,
            in nats a token.
        unit: What a token is, such as byte.
    """
    figure, axes = panels(1, 1, (8, 5))
    steps, of_steps = ([line[name] for line in lines] for name in ("step", "loss"))
    tested = [line for line in lines if "test_loss" in line]
    axes.plot(
        [step + 1 for step in steps],
        of_steps,
        color="#1b9e77",
        linewidth=1,
        label="text learned from, one step",
    )
    if tested:
        held_out = [[line["step"] + 1 for line in tested], [line["test_loss"] for line in tested]]
        label = f"text held out; at the end {tested[-1]['test_loss']:.3f}"
        axes.plot(*held_out, color="#d95f02", marker="o", markersize=4, label=label)
    axes.axhline(
        unigram_loss,
        color="#808080",
        linestyle="--",
        label=f"knowing frequencies alone: {unigram_loss:.3f}",
    )
    axes.set(
        title="The loss as the model learns",
        xlabel="steps taken",
        ylabel=f"cross-entropy (nats a {unit})",
    )
    axes.set_ylim(0, 1.05 * max(*filter(math.isfinite, of_steps), unigram_loss, 0.0))
    axes.legend(loc="best")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _stack(
    asked_by: str, draw: Callable[..., Any], bars: Bars, colour: Callable[[str], str]
) -> list[float]:
    """Draws bars of parts by a panel's ``bar`` or ``barh``, without parts that are 0 everywhere; returns their lengths."""
    if not bars:
        raise ValueError(f"{asked_by} must get one bar or more; got none.")
    until = [0.0] * len(bars)
    for part in dict.fromkeys(part for parts in bars.values() for part in parts):
        lengths, own = [parts.get(part, 0) for parts in bars.values()], colour(part)
        if max(lengths) > 0:
            draw(list(bars), lengths, 0.7, until, color=own, label=part, edgecolor="white")
        until = [start + length for start, length in zip(until, lengths, strict=True)]
    return until
