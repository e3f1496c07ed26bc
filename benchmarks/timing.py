"""Timing for benchmarks: all candidates run in turn, repeatedly, so that other load on the machine affects all of them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats of one candidate, and the median of its ratios to the reference of the same round.

    Process CPU seconds sum all threads: on fake devices, which share the cores, they measure the work of a step. The spread is
    that of the wall seconds, slowest less fastest over the median: differences that are smaller say nothing.
    """

    wall_seconds: float
    cpu_seconds: float
    cpu_ratio: float
    wall_ratio: float
    wall_spread: float


def measure(candidates: dict[str, Callable], *, reference: str, repeats: int) -> dict[str, Timing]:
    """Times each candidate, a function of no arguments, ``repeats`` times in turn after one run to warm up."""
    for run in candidates.values():
        jax.block_until_ready(run())
    rounds = [{name: _once(run) for name, run in candidates.items()} for _ in range(repeats)]
    timings = {}
    for name in candidates:
        wall, cpu = zip(*(row[name] for row in rounds), strict=True)
        ratios = [[row[name][i] / row[reference][i] for row in rounds] for i in (0, 1)]
        medians = map(statistics.median, (wall, cpu, ratios[1], ratios[0]))
        timings[name] = Timing(*medians, wall_spread=spread(wall))
    return timings


def spread(seconds: Sequence[float]) -> float:
    """Returns slowest less fastest, over the median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def _once(run: Callable) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return time.perf_counter() - wall, time.process_time() - cpu
