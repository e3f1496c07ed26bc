"""The picture of gpt.py: the loss during training, beside the loss of knowing frequencies alone."""

import importlib.util
from pathlib import Path

import numpy as np

from jaxpar.runtime.extras import install_extra

GREEN, ORANGE, GREY = "#1b9e77", "#d95f02", "#808080"


def check_installed() -> None:
    """Raises if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"the recipe's pictures need matplotlib; got none. {install_extra('plot')}.")


def plot_loss(path: Path, lines: list[dict[str, float]], entropy: float, unit: str) -> None:
    """Draws the loss of each step and that on the text held out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, of_steps = (np.array([line[name] for line in lines]) for name in ("step", "loss"))
    tested = [line for line in lines if "test_loss" in line]
    axes.plot(steps + 1, of_steps, color=GREEN, linewidth=1, label="text learned from, one step")
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
    axes.set_ylim(0, 1.05 * max(float(np.nanmax(of_steps)), entropy))
    axes.legend(loc="best")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
