"""The time of a run's steps, from its metrics."""

import statistics
from pathlib import Path

import jax

from jaxpar.metrics.log import read_metrics


def pace(
    out_dir: Path, first_step: int, run_seconds: float, *, items_per_step: float, items: str
) -> str:
    """Returns a line on the steps of a run, those after a resume alone; "" if there were none, or on another process.

    Args:
        out_dir: The folder of the run.
        first_step: The step at which it began.
        run_seconds: The seconds of its loop.
        items_per_step: The items that a step processes.
        items: Their name.
    """
    lines = read_metrics(out_dir / "metrics.jsonl") if jax.process_index() == 0 else []
    seconds = [line["step_seconds"] for line in lines if line["step"] >= first_step]
    if not seconds:
        return ""
    median = statistics.median(seconds)
    return (
        f"{len(seconds)} steps in {run_seconds:.1f} s, evaluations included; a step takes {median * 1e3:.0f} ms (median), "
        f"{items_per_step / median:,.0f} {items}/s"
    )
