"""Data of a run's metrics: a curve for each column of metrics.jsonl, thinned out for a browser, and a row of its values."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Number = int | float
MAX_POINTS = 4000


def metrics(lines: Sequence[Mapping[str, Number]]) -> dict[str, Any]:
    """Returns the curves of a run as plain values, None where a value is not finite.

    Args:
        lines: The lines of metrics.jsonl, as ``read_metrics`` returns them.

    Returns:
        "num_steps_done"; "curves": for each column its "steps" taken and "values", each the mean of "mean_of" lines; "rows":
        for each column its first, lowest, highest, median and last finite value, and how many are not finite.
    """
    names = list(dict.fromkeys(name for line in lines for name in line if name != "step"))
    columns = {name: [(int(line["step"]) + 1, line[name]) for line in lines if name in line] for name in names}
    return {
        "num_steps_done": int(lines[-1]["step"]) + 1 if lines else 0,
        "curves": {name: _curve(points) for name, points in columns.items()},
        "rows": {name: _row(points) for name, points in columns.items()},
    }


def _curve(points: list[tuple[int, Number]]) -> dict[str, Any]:
    """Returns means of consecutive points, at most ``MAX_POINTS``, each at the step of its last point."""
    each = -(-len(points) // MAX_POINTS)
    parts = [points[at : at + each] for at in range(0, len(points), each or 1)]
    means = [_mean([value for _, value in part]) for part in parts]
    return {"steps": [part[-1][0] for part in parts], "values": means, "mean_of": each}


def _mean(values: list[Number]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _row(points: list[tuple[int, Number]]) -> dict[str, Any]:
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    found: dict[str, Any] = {"num_not_finite": len(points) - len(finite), "first": None}
    if finite:
        values = [value for value, _ in finite]
        lowest, at = min(finite)
        found |= {"first": values[0], "lowest": lowest, "at_step": at, "highest": max(values)}
        found |= {"median": statistics.median(values), "last": values[-1]}
    return found
