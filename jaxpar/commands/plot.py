"""`python -m jaxpar plot runs/a runs/b`: compares the losses of runs, from their metrics.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxpar.commands.cli import call, make_folder
from jaxpar.metrics.log import read_metrics
from jaxpar.plot import plot_curves, render_curves
from jaxpar.plot.charts import Curve
from jaxpar.runtime.printable import printable, printable_lines


def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional], metric: str = "loss", out: Path | None = None
) -> None:
    """Prints a table that compares the loss curves of runs, with a sketch of each; --out also plots them.

    Args:
        runs: Folders with a metrics.jsonl, which every recipe writes, or such files.
        metric: The column to plot: loss, test_loss, grad_norm, step_seconds, or another.
        out: File for the plot: .png, .svg or .pdf; needs matplotlib.
    """
    if not runs:
        raise ValueError("plot must get one run or more; got none. Name the folders of runs: plot runs/a runs/b.")
    curves = {_name(run, runs): read_curve(run, metric) for run in runs}
    print(printable_lines(render_curves(curves, name=metric)))
    if out is not None:
        make_folder(out.absolute().parent, "--out's folder")
        plot_curves(curves, out, name=metric)
        print(f"wrote {out}")


def read_curve(run: Path, metric: str) -> Curve:
    """Returns the steps of a run that have a metric, and the values of the metric.

    Raises:
        ValueError: The file or the metric does not exist.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(
            f"a run must be a folder with a metrics.jsonl; got {run}, which has none. Name a recipe's --out-dir."
        )
    try:
        found = read_metrics(path)
        lines = [line for line in found if metric in line]
        curve = [int(line["step"]) for line in lines], [float(line[metric]) for line in lines]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"a metrics.jsonl must hold a line a step, each an object of numbers; got {path}, which does not "
            f"({type(error).__name__}). Name one that a recipe has written."
        ) from error
    if not lines:
        columns = sorted({printable(name) for line in found for name in line} - {"step"})
        raise ValueError(f"--metric must be in {path}; got {metric!r}. It has {', '.join(columns) or 'no lines yet'}.")
    return curve


def _name(run: Path, runs: Sequence[Path]) -> str:
    """Returns the last part of a run's path, or the complete path if that part is not unique."""
    folder = run.parent if run.name == "metrics.jsonl" else run
    names = [(other.parent if other.name == "metrics.jsonl" else other).name for other in runs]
    return folder.name if names.count(folder.name) == 1 else str(folder)


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    call(plot, args, "plot")
