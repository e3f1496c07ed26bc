"""The report of a recipe's run: report.html in --out-dir, written when the run ends, stops or fails."""

from typing import Any

import cli
import jax

from jaxpar.report import ReportWriter, step_data
from jaxpar.schedule import Schedule


def watcher(
    flags: cli.SharedFlags,
    compiled: jax.stages.Compiled,
    state: Any,
    mesh: jax.sharding.Mesh,
    schedule: Schedule | None = None,
) -> ReportWriter:
    """Returns what a MetricsLog tells of the run, so that it writes the report.

    Args:
        flags: The run's flags.
        compiled: The compiled training step.
        state: The shapes and shardings of the state that it takes.
        mesh: The run's mesh.
        schedule: The schedule of its pipeline, if it has one.
    """
    data = lambda: step_data(compiled, state, mesh, schedule=schedule, num_steps=flags.steps)
    return ReportWriter(flags.out_dir, data)
