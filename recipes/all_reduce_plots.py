"""The pictures of all_reduce.py: the server's bottleneck as devices are added, and the cost of stale gradients."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.runtime.extras import install_extra

COLORS = {
    "all-reduce": "#1f77b4",
    "ring": "#1b9e77",
    "ring, both ways": "#66c2a5",
    "1 server": "#c1121f",
    "4 servers": "#d95f02",
    "ZeRO-1": "#7570b3",
}
MARKS = dict(zip(COLORS, "osv^Dx", strict=True))


def check_installed() -> None:
    """Raises if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"the recipe's pictures need matplotlib; got none. {install_extra('plot')}.")


def plot_traffic(
    path: Path, rows: Sequence[Any], gradient_bytes: int, formula: Callable[[str, int], tuple[float, float]]
) -> None:
    """Draws the bytes through the busiest device's line, counted and by textbook formulas, and the time of a step."""
    figure, (lines, times) = _figure(1, 2, (13, 5.5))
    for way in dict.fromkeys(row.way for row in rows):
        own = [row for row in rows if row.way == way]
        sizes = [row.size for row in own]
        style = {"color": COLORS[way], "marker": MARKS[way], "label": way, "markersize": 7}
        lines.plot(sizes, [row.line_bytes / gradient_bytes for row in own], linestyle="none", **style)
        lines.plot(sizes, [formula(way, size)[1] for size in sizes], color=COLORS[way], linewidth=1, alpha=0.6)
        times.plot(sizes, [row.seconds * 1e3 for row in own], linewidth=1, **style)
    lines.set(title="Through the busiest device's line, in and out together", xlabel="devices", ylim=(0, None))
    lines.set(ylabel="times the bytes of the gradients, a step")
    lines.legend(title="marks: counted in the compiled program\nlines: by the book", loc="upper left")
    times.set(
        title="Time of a step on fake devices of one machine", xlabel="devices", ylabel="ms (fastest)", ylim=(0, None)
    )
    for axes in (lines, times):
        axes.set_xticks(sorted({row.size for row in rows}))
    _save(figure, path)


def plot_staleness(path: Path, curves: Mapping[int | None, tuple[np.ndarray, np.ndarray, float]]) -> None:
    """Draws the loss over gradients and over time, for each bound."""
    figure, (by_count, by_time) = _figure(1, 2, (13, 5.5))
    for (bound, (seconds, losses, staleness)), color in zip(
        curves.items(), ("#1f77b4", "#1b9e77", "#c1121f"), strict=True
    ):
        name = {None: "no bound", 0: "bound 0: synchronous"}.get(bound, f"bound {bound}")
        label = f"{name}; {staleness:.1f} stale in the mean"
        for axes, x in ((by_count, np.arange(1, len(losses) + 1)), (by_time, seconds)):
            axes.plot(x, losses, color=color, linewidth=1, alpha=0.25)
            axes.plot(x, _mean_before(losses, 20), color=color, linewidth=2, label=label)
    by_count.set(title="As many gradients", xlabel="gradients applied", ylabel="loss on all digits (nats, log scale)")
    by_time.set(title="As much time: the synchronous ones wait for the slow worker", xlabel="simulated seconds")
    for axes in (by_count, by_time):
        axes.set_yscale("log")
        axes.legend(loc="best")
    _save(figure, path)


def _mean_before(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the mean of each value and up to ``count - 1`` before it."""
    sums, last = np.concatenate([[0.0], np.cumsum(values)]), np.arange(1, len(values) + 1)
    first = np.maximum(last - count, 0)
    return (sums[last] - sums[first]) / (last - first)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained")
    for each in np.atleast_1d(axes):
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
