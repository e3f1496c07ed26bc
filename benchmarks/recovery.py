"""How long does a run of two processes stop when one of them is killed? From the SIGKILL to the end of the next step.

    python benchmarks/recovery.py [--repeats 3]

`python -m jaxpar launch --max-restarts` trains house prices on this machine; once it has saved, SIGKILL ends one process, and
the launcher restarts both from the newest checkpoint. Part of the time is compilation, which a compilation cache would save;
it is read from the log. Target: 15 s beside compilation.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import report
import tyro

ROOT = report.HERE.parent
POLL_SECONDS = 0.01
SECONDS = 180  # for a start


@dataclass(frozen=True)
class Config(report.Options):
    """What to run."""

    processes: int = 2
    """Processes of the run."""
    repeats: int = 3
    """Kills, each in a run of its own."""


def main(config: Config) -> None:
    record = report.Record.start("recovery", config)
    repeats = 1 if config.smoke else config.repeats
    kills = [kill_one(config.processes) for _ in range(repeats)]
    columns = {
        "from kill to first step s": ".1f",
        "of it compilation s": ".1f",
        "beside compilation s": ".1f",
    }
    medians = [statistics.median(kill[part] for kill in kills) for part in range(2)]
    figures = (*medians, statistics.median(total - compiling for total, compiling in kills))
    table = report.Table(
        title=f"{config.processes} processes, one of which is killed; medians of {repeats}",
        columns=columns,
        rows=[dict(zip(columns, figures, strict=True))],
        mesh=f"data {config.processes}",
    )
    record.tables.append(table)
    record.finish(config.out)


def kill_one(processes: int) -> tuple[float, float]:
    """Returns the seconds from a kill to the first step after it, and how many of them are compilation."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        launcher = start(processes, folder)
        try:
            wait_until(lambda: any((folder / "run" / "checkpoints").glob("[0-9]*")), launcher)
            progress = folder / "logs" / "start-1" / "progress.json"
            os.kill(worker_of(launcher.pid), signal.SIGKILL)
            began = time.monotonic()
            wait_until(lambda: progress.exists() and progress.stat().st_size > 0, launcher)
            seconds = time.monotonic() - began
            log = (folder / "logs" / "start-1" / "0.log").read_text()
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.communicate(timeout=SECONDS)
    return seconds, float(re.search(r"compiled in ([\d.]+) s", log)[1])


def start(processes: int, folder: Path) -> subprocess.Popen:
    """Starts and returns the launcher of a run that saves every 200 steps."""
    launch = ("-n", processes, "--log-dir", folder / "logs", "--max-restarts", 1)
    recipe = (
        "recipes/house_prices.py",
        "--mesh.data",
        processes,
        "--batch-size",
        2 * processes,
        "--steps",
        10**6,
    )
    args = map(str, (*launch, *recipe, "--checkpoint-every", 200, "--out-dir", folder / "run"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxpar", "launch", *args]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def worker_of(launcher: int) -> int:
    """Returns the last process that a launcher has started."""
    return max(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


def wait_until(condition: Callable[[], bool], launcher: subprocess.Popen) -> None:
    """Waits until the condition holds; raises if the launcher ends before, or after ``SECONDS``."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.kill()
            raise RuntimeError(f"the run must continue; it printed:\n{launcher.communicate()[0]}")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
