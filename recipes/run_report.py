"""The report of a recipe's run, report.html in --out-dir, written when the run ends, stops or fails; its median step."""

import statistics
from pathlib import Path
from typing import Any

import cli
import jax

from jaxpar.metrics.log import read_metrics
from jaxpar.report import ReportWriter, step_data
from jaxpar.schedule import Schedule


def watcher(
    flags: cli.SharedFlags,
    compiled: jax.stages.Compiled,
    state: Any,
    mesh: jax.sharding.Mesh,
    schedule: Schedule | None = None,
) -> ReportWriter:
    """Returns the watcher of a MetricsLog that writes the report.

    Args:
        flags: The run's flags.
        compiled: The compiled training step.
        state: The shapes and shardings of the state that it takes.
        mesh: The run's mesh.
        schedule: The schedule of its pipeline, if it has one.
    """
    data = lambda: step_data(compiled, state, mesh, schedule=schedule, num_steps=flags.steps)
    return ReportWriter(flags.out_dir, data)


def median_seconds(out_dir: Path, *, first_step: int) -> float | None:
    """Returns the median time of the run's steps from ``first_step`` on; None without any, and on other processes."""
    lines = read_metrics(out_dir / "metrics.jsonl") if jax.process_index() == 0 else []
    seconds = [line["step_seconds"] for line in lines if line["step"] >= first_step]
    return statistics.median(seconds) if seconds else None
