"""Pictures of a classifier of images of digits: the loss, under- and overfitting, and right and wrong predictions."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from digits_sweep import Errors
from jaxpar.metrics.log import read_metrics
from jaxpar.plot.figure import panels, running_mean
from jaxpar.schedule import Schedule, lockstep_form, make_schedule, plot_timeline

ORANGE, GREEN, RED, GREY = "#d95f02", "#1b9e77", "#c1121f", "#808080"


def plot_course(folder: Path, schedule: Schedule, name: str) -> None:
    """Draws a run's losses so far, and the timelines of its pipeline's schedule, of this name, and others; on process 0."""
    if jax.process_index() != 0:
        return
    if lines := read_metrics(folder / "metrics.jsonl"):
        plot_loss(folder / "loss.png", lines)
    if schedule.num_stages > 1:
        names = dict.fromkeys(("gpipe", name, "zb-h1"))  # the bubble, and schedules that reduce it
        sizes = schedule.num_stages, schedule.num_microbatches
        schedules = [make_schedule(each, *sizes, form=lockstep_form(each)) for each in names]
        plot_timeline(schedules, folder / "timeline.png", timing="lockstep")


def plot_loss(path: Path, lines: list[dict[str, float]]) -> None:
    """Draws the loss of each step beside that on the digits held out, and the share of those read wrong."""
    figure, (losses, wrong) = panels(1, 2, (13, 5))
    tested = [line for line in lines if "test_loss" in line]
    taken, tested_after = ([line["step"] + 1 for line in some] for some in (lines, tested))
    of_steps = np.array([line["loss"] for line in lines])
    losses.plot(
        taken, of_steps, color=GREEN, linewidth=1, alpha=0.35, label="digits learned from, one step"
    )
    mean, held_out = running_mean(of_steps, 10, 9), [line["test_loss"] for line in tested]
    losses.plot(taken, mean, color=GREEN, linewidth=2, label="the same, mean of 20 steps around")
    losses.plot(tested_after, held_out, color=ORANGE, linewidth=2, label="digits held out")
    losses.axhline(np.log(10), color=GREY, linestyle="--", label="guessing: ln 10")
    losses.set(title="The loss as the model learns", xlabel="steps taken", yscale="log")
    losses.set(ylabel="cross-entropy (nats, log scale)")
    losses.legend(loc="best")

    errors = np.array([1 - line["test_accuracy"] for line in tested])
    at_end = f"; at the end {errors[-1]:.1%}" if tested else ""
    wrong.plot(tested_after, errors, color=ORANGE, linewidth=2, label=f"digits held out{at_end}")
    wrong.axhline(0.9, color=GREY, linestyle="--", label="guessing: 90%")
    wrong.set(
        title="Digits read wrong",
        xlabel="steps taken",
        ylabel="share of the digits held out",
        ylim=(0, 1),
    )
    wrong.yaxis.set_major_formatter("{x:.0%}")
    wrong.legend(loc="best")
    figure.savefig(path, dpi=120)


def plot_errors(path: Path, sizes: Errors, rows: Errors) -> None:
    """Draws training and test error over the model's size, and over the number of digits to learn from."""
    figure, (by_size, by_rows) = panels(1, 2, (13, 5.5))
    _errors(by_size, sizes)
    by_size.set(title=f"A larger model, {sizes.num_rows[0]} digits to learn from")
    _note(
        by_size,
        0.02,
        0.1,
        "left: underfitting\ntoo few units even for the\ndigits that it learns from",
    )
    _note(
        by_size,
        0.62,
        0.5,
        "right: overfitting\nknows the digits it learned\nfrom better than new ones",
    )
    by_size.set(xlabel="units in each hidden layer (parameters in all)")
    by_size.set_xticks(
        sizes.sizes, [f"{s}\n({n:,})" for s, n in zip(sizes.sizes, sizes.num_params, strict=True)]
    )
    _errors(by_rows, rows)
    by_rows.set(title=f"More digits to learn from, {rows.num_params[0]:,} parameters")
    _note(by_rows, 0.03, 0.6, "left: overfitting\nknows a few digits by heart")
    _note(by_rows, 0.62, 0.3, "right: more digits\nclose the gap")
    by_rows.set(xlabel="digits to learn from")
    by_rows.set_xticks(rows.sizes, [f"{n:,}" for n in rows.sizes])
    figure.savefig(path, dpi=120)


def _errors(axes: Any, errors: Errors) -> None:
    train, test = errors.train.mean(axis=1), errors.test.mean(axis=1)
    axes.fill_between(
        errors.sizes, train, test, color=ORANGE, alpha=0.12, label="the gap: overfitting"
    )
    for each, mean, color, name in (
        (errors.test, test, ORANGE, "test error: digits held out"),
        (errors.train, train, GREEN, "training error: digits learned from"),
    ):
        axes.plot(errors.sizes, mean, color=color, marker="o", linewidth=2, label=name)
        axes.vlines(
            errors.sizes, each.min(axis=1), each.max(axis=1), color=color, alpha=0.5, linewidth=4
        )
    axes.set(xscale="log", ylim=(-0.02, 1), ylabel="share of digits read wrong")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(
        loc="upper right", title=f"mean of {errors.train.shape[1]} runs; bars: best to worst"
    )


def _note(axes: Any, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, transform=axes.transAxes, fontstyle="italic", color="#404040")


def plot_predictions(path: Path, images: np.ndarray, labels: np.ndarray, read: np.ndarray) -> None:
    """Draws some of the digits held out, and those read wrong, each with the model's prediction."""
    columns, wrong = 12, np.flatnonzero(read != labels)
    some, mistakes = np.arange(min(2 * columns, len(labels))), wrong[: 2 * columns]
    num_rows = [-(-len(part) // columns) for part in (some, mistakes)]
    figure = panels(0, 0, (13, 1.25 * sum(num_rows) + 1.6))[0]
    blocks = figure.subfigures(
        2 if len(mistakes) else 1, 1, height_ratios=[n + 0.6 for n in num_rows if n], squeeze=False
    )
    shown = "All" if len(mistakes) == len(wrong) else f"{len(mistakes)} of the"
    titles = (
        f"The first {len(some)} of {len(labels)} digits held out, and what the model reads",
        f"{shown} {len(wrong)} that it reads wrong (and what they are)",
    )
    for block, part, title, n in zip(blocks.flat, (some, mistakes), titles, num_rows, strict=False):
        block.suptitle(title, fontsize="large")
        for axes in (grid := block.subplots(n, columns, squeeze=False)).flat:
            axes.axis("off")
        for axes, i in zip(grid.flat, part, strict=False):
            axes.imshow(images[i].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            right = read[i] == labels[i]
            told = f"{read[i]}" if right else f"{read[i]} (is {labels[i]})"
            axes.set_title(
                told, color=GREEN if right else RED, fontweight="bold", fontsize="medium", pad=3
            )
    figure.savefig(path, dpi=120)
