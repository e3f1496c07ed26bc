"""The metrics of a run while it trains: one line per step in metrics.jsonl, and a progress bar on a terminal.

Metrics are fetched one step late, so the host never waits for the step that it has just dispatched. Only the first process
writes and prints.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar._compat import is_computed
from jaxpar.metrics.exporters import Watcher
from jaxpar.metrics.jumps import Jumps
from jaxpar.metrics.lines import LineFile, Number, line_of, lines_before
from jaxpar.runtime.output import is_terminal, tell

# Names that further metrics must not have: those that a training step and the log set.
OF_STEP = ("loss", "grad_norm", "skipped")
OF_LOG = ("step", "step_seconds")  # and a rate
MOST_TOLD = 10  # jumps of the loss; the report names further ones


class MetricsLog:
    """Writes ``metrics.jsonl``: ``step loss grad_norm step_seconds`` and a rate, one JSON object per line, one line per step.

    Lines that cannot be written to the disk wait in memory until it has room again, while the run continues. At the end of the
    ``with`` missing lines raise an OSError, or are reported if another exception ends it. A loss that jumps is reported too.

    Args:
        out_dir: The folder of the file; a resumed run appends to it, after the lines of steps before ``first_step``, and prints
            which of the last of these are missing.
        num_steps: The step at which the run ends.
        items_per_step: The number of items that a step processes, for the rate.
        items: Their name, as in ``rows_per_second``.
        first_step: The step at which this run begins.
        watchers: Other receivers of each line, on the first process: Prometheus, TensorBoard, a trace (``exporters.py``).
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
        self._ended: float | None = None  # when the pending step had, if it had when it was logged
        self._pause: tuple[float, float] | None = (
            None  # when that after the last step began and ended
        )
        self._file: LineFile | None = None
        self._jumps, self._num_told = Jumps(), 0

    def __enter__(self) -> "MetricsLog":
        if self._is_first_process:
            before = lines_before(self.path, self._first_step)
            self._file = LineFile(self.path, self._lines_taken(before))
        self._progress = self._progress_bar() if self._is_first_process and is_terminal() else None
        for watcher in self._watchers:
            watcher.open(self._first_step)
        self._then = time.perf_counter()
        return self

    def _lines_taken(self, before: Iterator[tuple[bytes, dict[str, Number]]]) -> Iterator[bytes]:
        """Yields the lines before this run's, with whose losses its own are compared; says if the last are missing."""
        done = 0
        for text, line in before:
            self._jumps.usual_before(line.get("loss"))
            done = int(line["step"]) + 1
            yield text
        if done < self._first_step:
            steps = "step" if done + 1 == self._first_step else f"steps {done + 1:,} to"
            tell(
                f"{self.path} has no lines of {steps} {self._first_step:,}, which were trained: the checkpoint has their "
                "updates, and their metrics are lost"
            )

    def log(self, step: int, metrics: Mapping[str, jax.Array | Number]) -> None:
        """Accepts the metrics of ``step`` as the train step returns them, and writes those of the previous step.

        Raises:
            TypeError: A metric is no number.
            ValueError: A step has donated a metric; a metric has the name of a column that the log adds, or there is no loss.
        """
        _check_kept(metrics)
        _check_numbers(metrics)
        if "loss" not in metrics:
            raise ValueError(
                "the metrics of a step must have its loss, which is watched, logged and drawn; got "
                f"{', '.join(map(str, metrics)) or 'none'}. Give those that the step returned, with yours beside them: "
                "metrics | {...}."
            )
        check_names(metrics, (*OF_LOG, f"{self._items}_per_second"))
        self.flush(metrics)
        is_done = _are_computed(metrics)  # as on a device for which the host waits
        self._pending = (step, metrics)
        self._ended = time.perf_counter() if is_done else None
        for watcher in self._watchers:
            watcher.dispatched(step, metrics)

    @contextlib.contextmanager
    def pause(self, metrics: Mapping[str, jax.Array | Number]) -> Iterator[None]:
        """Excludes the ``with`` block from every step's time, such as an evaluation after a step; call it before ``log``.

        Args:
            metrics: What the train step returned. The block begins when they are computed, and what it dispatches to the
                devices must be computed when it ends.
        """
        self.flush(metrics)
        jax.block_until_ready(metrics)
        began = (
            time.perf_counter() if self._pause is None else self._pause[0]
        )  # one pause with an earlier one of the step
        yield
        self._pause = (began, time.perf_counter())

    def flush(self, following: Mapping[str, jax.Array | Number] | None = None) -> None:
        """Writes the metrics that were accepted last, once their step has ended.

        Args:
            following: What the train step after it returned, if that is dispatched: if they are computed as soon as the host
                sees that its step has ended, the time of both steps is shared, since it is not known when the first one ended.
        """
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        ordered = {"loss": metrics["loss"], **metrics}
        _check_kept(ordered)
        values = {name: float(np.asarray(value).item()) for name, value in ordered.items()}
        ended = self._ended
        if ended is None:
            now = time.perf_counter()
            is_shared = following is not None and _are_computed(following)
            ended = (self._then + now) / 2 if is_shared else now
        ended, resumed = self._pause or (ended, ended)
        seconds, self._then, self._pause = ended - self._then, resumed, None
        rate = self._items_per_step / seconds
        self.last = {
            "step": step,
            **values,
            "step_seconds": seconds,
            f"{self._items}_per_second": rate,
        }
        if self._file is not None:
            self._file.write(line_of(self.last))
        if self._is_first_process:
            self._tell_jump(step + 1, values["loss"])
        for watcher in self._watchers:
            watcher.written(self.last)
        if self._progress is not None:
            shown = f"loss {values['loss']:.5g}  {rate:,.0f} {self._items}/s"
            self._progress.update(self._progress.task_ids[0], completed=step + 1, shown=shown)

    def _tell_jump(self, step: int, loss: float) -> None:
        """Reports a loss that is far above that of the steps before it."""
        usual = self._jumps.usual_before(loss)
        if usual is None or self._num_told == MOST_TOLD:
            return
        self._num_told += 1
        more = "" if self._num_told < MOST_TOLD else " Further jumps are in the report alone."
        tell(
            f"the loss of step {step} is {loss:.5g}, after a median of {usual:.5g} in the steps before "
            "it. Run the step again from the checkpoint before: if its loss is another then, a device "
            f"computes wrongly; if not, look at its rows.{more}"
        )

    def _progress_bar(self) -> Any:
        """Returns a progress bar that is shown; None where rich is not installed, which no training needs."""
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            return None
        progress = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        progress.start()
        progress.add_task("", total=self._num_steps, completed=self._first_step, shown="")
        return progress

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(
            error, SystemExit
        ):  # a run that stops on request resumes after its last line
            self.flush()
        if self._progress is not None:
            self._progress.stop()
        for watcher in self._watchers:
            watcher.close()
        if self._file is not None and (missing := self._file.close()):
            if error is None:
                raise missing
            tell(missing.strerror or str(missing))


OF_A_MODEL = "that of a model"


def foreign_config(folder: Path) -> str:
    """Returns whose config.json a folder has, where no run wrote it; "" if a run did, or there is none."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    if not isinstance(found, dict) or not found or "out_dir" in found:
        return ""
    return OF_A_MODEL if "model_type" in found else "which no run wrote"


def read_metrics(path: Path, *, before: int | None = None) -> list[dict[str, Number]]:
    """Returns the lines of a metrics.jsonl, all or those of steps ``before`` one; damaged or truncated lines are omitted.

    A value that was not finite is returned as NaN.
    """
    return [line for _, line in lines_before(path, math.inf if before is None else before)]


@contextlib.contextmanager
def figures_of(path: Path) -> Iterator[None]:
    """Raises ValueError in place of the errors of lines that are not those of a run, whose figures the ``with`` block uses."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"a metrics.jsonl must hold a line a step, each an object of numbers; got {path}, which does not "
            f"({type(error).__name__}). Name one that a recipe has written."
        ) from error


def check_further(metrics: Any) -> None:
    """Raises unless metrics beside those of a training step are a dict of scalars with names of their own."""
    is_dict = isinstance(metrics, dict) and all(isinstance(name, str) for name in metrics)
    if not is_dict or any(np.ndim(value) for value in metrics.values()):
        raise TypeError(
            "what a loss returns beside its value must be a dict of scalars by name, since it becomes metrics of the step; got "
            f'{metrics}. Return such as {{"accuracy": accuracy}}, or use value_and_grad without has_aux.'
        )
    check_names(metrics, (*OF_STEP, *OF_LOG))


def copy_shared(metrics: Mapping[str, Any], state: PyTree) -> dict[str, Any]:
    """Returns metrics with copies of those that are arrays of ``state``, which the next step donates."""
    of_state = set(map(id, jax.tree.leaves(state)))

    def kept(value: Any) -> Any:
        return jnp.copy(value) if id(value) in of_state else value

    return {name: kept(value) for name, value in metrics.items()}


def _are_computed(metrics: Mapping[str, Any]) -> bool:
    """Returns whether all metrics have their values, but for those that a step has donated, which are refused later."""
    return all(is_computed(value) for value in metrics.values() if not _is_deleted(value))


def _is_deleted(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.is_deleted()


def _check_kept(metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if _is_deleted(value):
            raise ValueError(
                f"a metric must be there until its line is written, after the next step; got {name!r}, an array that a step "
                "has donated. Log a copy: jnp.copy(...), made before that step."
            )


def _check_numbers(metrics: Mapping[str, Any]) -> None:
    """Raises, without waiting for the step, unless each metric is one real number."""
    for name, value in metrics.items():
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        is_real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, bool))
        if np.size(value) != 1 or not is_real:
            told = f"{dtype}{list(np.shape(value))}" if is_real else repr(value)
            raise TypeError(
                f"a metric must be one real number, which becomes a column of metrics.jsonl; got {name!r} {told}. Reduce "
                f"it, such as by jnp.mean, give each of several numbers a name, or write it elsewhere."
            )


def check_names(names: Iterable[str], taken: Iterable[str]) -> None:
    """Raises for metrics whose names are taken."""
    both = sorted(set(names).intersection(taken))
    if both:
        raise ValueError(
            f"a step and its log have metrics named {', '.join(taken)}, so others must be named otherwise; got {both}. Rename "
            "them."
        )
