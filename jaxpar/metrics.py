"""What a run says while it trains: a line a step in metrics.jsonl, and a progress line where a person watches.

Metrics are fetched one step late, so that the host never waits for the step that it has just sent. Only the first process
writes and prints.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxpar.exporters import Watcher

Number = int | float


class MetricsLog:
    """Writes ``metrics.jsonl``: ``step loss grad_norm step_seconds`` and a rate, one JSON object a line, a line a step.

    Args:
        out_dir: Where the file goes; a run that resumes appends to it, after the lines of steps before ``first_step``.
        num_steps: The step at which the run ends.
        items_per_step: What a step works through, for the rate.
        items: Their name, as in ``rows_per_second``.
        first_step: The step at which this run begins.
        watchers: What else is to see each line, on the first process: Prometheus, TensorBoard, a trace (``exporters.py``).
    """

    def __init__(
        self,
        out_dir: Path,
        num_steps: int,
        *,
        items_per_step: Number,
        items: str = "rows",
        first_step: int = 0,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.path = Path(out_dir) / "metrics.jsonl"
        self.last: dict[str, Number] = {}
        self._items_per_step, self._items = items_per_step, items
        self._num_steps, self._first_step = num_steps, first_step
        self._is_first_process = jax.process_index() == 0
        self._watchers = tuple(watchers) if self._is_first_process else ()
        self._pending: tuple[int, Mapping[str, jax.Array | Number]] | None = None
        self._file: IO[str] | None = None

    def __enter__(self) -> "MetricsLog":
        if self._is_first_process:
            kept = read_metrics(self.path, before=self._first_step) if self._first_step else []
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", buffering=1)
            self._file.writelines(map(_line, kept))
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (self._is_first_process and console.is_terminal),
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=self._num_steps, completed=self._first_step, told="")
        for watcher in self._watchers:
            watcher.open(self._first_step)
        self._then = time.perf_counter()
        return self

    def log(self, step: int, metrics: Mapping[str, jax.Array | Number]) -> None:
        """Takes the metrics of ``step`` as they come from the train step, and writes those of the step before."""
        self.flush()
        self._pending = (step, metrics)
        for watcher in self._watchers:
            watcher.dispatched(step, metrics)

    def flush(self) -> None:
        """Writes the metrics that were taken last, once their step has ended."""
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        ordered = {"loss": metrics["loss"], **metrics}
        values = {name: float(np.asarray(value)) for name, value in ordered.items()}
        now = time.perf_counter()
        seconds, self._then = now - self._then, now
        rate = self._items_per_step / seconds
        self.last = {"step": step, **values, "step_seconds": seconds, f"{self._items}_per_second": rate}
        if self._file is not None:
            self._file.write(_line(self.last))
        for watcher in self._watchers:
            watcher.written(self.last)
        told = f"loss {values['loss']:.5g}  {rate:,.0f} {self._items}/s"
        self._progress.update(self._task, completed=step + 1, told=told)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, SystemExit):  # a run that stops when asked is resumed after its last line
            self.flush()
        self._progress.stop()
        if self._file is not None:
            self._file.close()
        for watcher in self._watchers:
            watcher.close()


def _line(values: Mapping[str, Number]) -> str:
    """Returns values as a line of JSON, which has no NaN and no infinity: they become null."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in values.items()}) + "\n"


def read_metrics(path: Path, *, before: int | None = None) -> list[dict[str, Number]]:
    """Returns the lines of a metrics.jsonl, all or those of steps ``before`` one; a line cut short by a crash is left out.

    A value that was not finite comes back as NaN.
    """
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if before is None or line["step"] < before:
            lines.append({name: math.nan if value is None else value for name, value in line.items()})
    return lines
