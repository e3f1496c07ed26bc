"""How benchmarks measure: all candidates in turn, again and again, so that a busy machine is busy for each of them."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats of one candidate, and the median of its ratios to the reference of the same round.

    Process CPU seconds sum all threads: on fake devices, which share the cores, they say what a step costs.
    """

    wall_seconds: float
    cpu_seconds: float
    cpu_ratio: float
    wall_ratio: float


def measure(candidates: dict[str, Callable], *, reference: str, repeats: int) -> dict[str, Timing]:
    """Times each candidate, a function of no arguments, ``repeats`` times in turn after one run to warm up."""
    for run in candidates.values():
        jax.block_until_ready(run())
    rounds = [{name: _once(run) for name, run in candidates.items()} for _ in range(repeats)]
    timings = {}
    for name in candidates:
        wall, cpu = zip(*(row[name] for row in rounds), strict=True)
        ratios = [[row[name][i] / row[reference][i] for row in rounds] for i in (0, 1)]
        timings[name] = Timing(*map(statistics.median, (wall, cpu, ratios[1], ratios[0])))
    return timings


def _once(run: Callable) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return time.perf_counter() - wall, time.process_time() - cpu


def machine() -> dict[str, str]:
    """What ran this: processor, cores, versions, devices."""
    return {
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}",
    }


def report(title: str, timings: dict[str, Timing], extra: dict[str, dict], out: Path | None) -> None:
    """Prints a table, and writes it as JSON where asked."""
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    columns = list(next(iter(extra.values())))
    table = Table("run", "CPU s", "of one device", "wall s", "of one device", *columns, title=title, caption=facts)
    for name, t in timings.items():
        figures = (f"{t.cpu_seconds:.2f}", f"{t.cpu_ratio:.3f}", f"{t.wall_seconds:.2f}", f"{t.wall_ratio:.2f}")
        table.add_row(name, *figures, *(str(extra.get(name, {}).get(column, "")) for column in columns))
    Console(width=120).print(table)
    if out is not None:
        rows = {name: asdict(t) | extra.get(name, {}) for name, t in timings.items()}
        out.write_text(json.dumps({"title": title, "machine": machine(), "rows": rows}, indent=2) + "\n")
