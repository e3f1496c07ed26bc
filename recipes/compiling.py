"""Compiles a recipe's training step, and prints what it costs."""

import hashlib
import time
from typing import Any

import cli
import jax
import run_status

from jaxpar.pipeline import check_permutes
from jaxpar.planner import cluster, roofline
from jaxpar.report.data import inspect_pipeline
from jaxpar.runtime.coordination import check_agreement
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.schedule import Schedule


def compile_step(flags: cli.SharedFlags, train_step: Any, state: Any, batch: Any) -> jax.stages.Compiled:
    """Returns the training step compiled for this state and batch, and prints the time, which no step's time includes.

    Every later batch must have the shapes and shardings of this one, as those of ``jaxpar.shard_batch`` do. In a run of several
    processes all must have the same flags and the same program; otherwise they would wait for one another forever.
    """
    start = time.perf_counter()
    with (
        run_status.phase("compiling", then="preparing the first step"),
        Watchdog(flags.budget) as watchdog,
        watchdog.phase("compile"),
    ):
        lowered = train_step.lower(state, batch)
        if jax.process_count() > 1:
            with cli.checks():
                check_agreement("train", {"flags": cli.as_json(flags), "program": _digest(lowered.as_text())})
        compiled = lowered.compile()
        with cli.checks():
            check_permutes(compiled)
    cli.say(f"compiled in {time.perf_counter() - start:.1f} s")
    return compiled


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def say_cost(
    flags: cli.SharedFlags, compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, schedule: Schedule | None = None
) -> None:
    """Prints the cost of a compiled step on each device: collectives by mesh axis, memory, FLOPs; for GPUs also its roofline.

    Args:
        flags: The run's flags.
        compiled: The step.
        mesh: Its mesh.
        schedule: The schedule of its pipeline, which determines how often a step takes each branch.
    """
    report = inspect_pipeline(compiled, mesh, schedule)
    cli.say(report.render())
    if flags.compile_for:
        cli.say("\n" + roofline(report, cluster(flags.compile_for, *cli.num_gpus(flags))).render())
