"""Lines about a run where there is no terminal, such as in a pod: what it does, its step, loss and rate, and the time left.

[    0 s] starting
[   15 s] compiling, 12 s so far
[   30 s] preparing the first step, 2 s so far
[1 min 30 s] training, step 120 of 300, loss 2.3145, 10,512 tokens/s, 2 min 15 s left
[2 min 15 s] training, step 124 of 300, loss 2.2971, no step for 41 s, 3 min 11 s left
[3 min 45 s] sampling, 4 s so far

A thread prints them, so they appear while the main thread compiles. On a terminal ``MetricsLog`` shows a progress bar instead.
For systems that collect the output of pods, ``JsonStream`` writes each message as one line of JSON.
"""

import contextlib
import datetime
import io
import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from jaxpar.metrics.exporters import Watcher
from jaxpar.runtime.output import tell

Number = int | float
STARTING, TRAINING, FINISHING = "starting", "training", "finishing"
_SKIPPED = re.compile(r"step \d+ changed nothing")
MOST_STEPS = 1000  # whose rates a line is the mean of
LINES, STEPS = (
    2,
    3,
)  # without a step for longer than this many lines and usual steps, a line says so and gives no rate


class StatusLines(Watcher):
    """Prints a line about the run at once and every few seconds inside a ``with`` block; as a Watcher it learns of the steps.

    Args:
        num_steps: The step at which the run ends.
        seconds: The time between two lines, more than 0.
        say: Receives the values of each line by name, as ``values`` returns them; by default they are printed as text on
            standard error.
        clock: Returns seconds; replaces ``time.monotonic`` in tests.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        seconds: float = 15.0,
        say: Callable[[Mapping[str, Any]], None] = lambda values: tell(render_status(values)),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"the seconds between two lines must be positive; got {seconds:g}. Choose such as 15."
            )
        self._num_steps, self._seconds, self._say, self._clock = num_steps, seconds, say, clock
        self._began = self._training_began = clock()
        self._phases = [(STARTING, self._began)]
        self._line: Mapping[str, Number] = {}
        self._first_step, self._written_at = 0, self._began
        self._since_last = deque[tuple[float, dict[str, Number]]](maxlen=MOST_STEPS)
        self._last_rates: dict[str, float] = {}  # of the last line with a new step
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="jaxpar-status", daemon=True)

    def __enter__(self) -> "StatusLines":
        self._say(self.values())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Prints no further line."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, name: str) -> None:
        """Replaces the phase that lines name, outside of any ``phase`` block."""
        self._phases[0] = (name, self._clock())

    @contextlib.contextmanager
    def phase(self, name: str, then: str | None = None) -> Iterator[None]:
        """Names the phase of the ``with`` block, such as "compiling".

        Args:
            name: The phase.
            then: The phase after the block, if the run does not train yet: it never returns to an earlier one. By default
                "after" the name.
        """
        self._phases.append((name, self._clock()))
        try:
            yield
        finally:
            if len(self._phases) == 2 and self._phases[0][0] not in (TRAINING, FINISHING):
                self.begin(then or f"after {name}")
            self._phases.pop()

    def open(self, first_step: int) -> None:
        """Begins the phase of training."""
        self._first_step, self._training_began = first_step, self._clock()
        self.begin(TRAINING)

    def written(self, line: Mapping[str, Number]) -> None:
        """Takes the values of a step."""
        self._written_at = self._clock()  # before the line: the thread that prints may run between
        self._line = line
        self._since_last.append((line.get("step_seconds", 0.0), _rates(line)))

    def close(self) -> None:
        """Ends the phase of training."""
        self.begin(FINISHING)

    def values(self) -> dict[str, Any]:
        """Returns the values of a line: ``phase``, seconds of the run and of the phase, and while it trains the last step's.

        Its rate is the mean of the steps since the line before, or without one that of the line before. While no step comes
        for long, ``seconds_without_step`` replaces it.
        """
        now = self._clock()
        name, began = self._phases[-1]
        found: dict[str, Any] = {
            "phase": name,
            "elapsed_seconds": round(now - self._began, 1),
            "phase_seconds": round(now - began, 1),
        }
        line = self._line
        if name == TRAINING and line:
            done = int(line["step"]) + 1
            each = (now - self._training_began) / max(done - self._first_step, 1)
            found |= {"step": done, "steps": self._num_steps}
            found |= {key: value for key, value in line.items() if key in ("loss", "grad_norm")}
            waited = now - self._written_at
            if waited > max(LINES * self._seconds, STEPS * line.get("step_seconds", 0.0)):
                found["seconds_without_step"] = round(waited, 1)
            else:
                self._last_rates = self._mean_rates() or self._last_rates
                found |= self._last_rates
            found["seconds_left"] = round(each * max(self._num_steps - done, 0), 1)
        return found

    def _mean_rates(self) -> dict[str, float]:
        """The rates of all steps since the last line: one alone may be timed late, at the cost of the next."""
        steps = [*self._since_last]
        total = sum(seconds for seconds, _ in steps)
        if not total:
            return {}
        names = steps[-1][1]
        done = {name: sum(seconds * rates[name] for seconds, rates in steps) for name in names}
        return {name: count / total for name, count in done.items()}

    def _repeat(self) -> None:
        while not self._over.wait(self._seconds):
            self._say(self.values())
            self._since_last.clear()


def _rates(line: Mapping[str, Number]) -> dict[str, Number]:
    return {name: value for name, value in line.items() if "_per_second" in name}


def render_status(values: Mapping[str, Any]) -> str:
    """Returns the text of a line with these values."""
    parts = [str(values["phase"])]
    if "step" in values:
        parts += [f"step {values['step']:,} of {values['steps']:,}", f"loss {values['loss']:.5g}"]
        rates = {name: value for name, value in values.items() if name.endswith("_per_second")}
        parts += [
            f"{value:,.0f} {name.removesuffix('_per_second')}/s" for name, value in rates.items()
        ]
        if "seconds_without_step" in values:
            parts.append(f"no step for {duration(values['seconds_without_step'])}")
        parts.append(f"{duration(values['seconds_left'])} left")
    elif values["phase_seconds"] >= 1:
        parts.append(f"{duration(values['phase_seconds'])} so far")
    return f"[{duration(values['elapsed_seconds'])}] {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Returns a time in its two largest units.

    >>> duration(59.6), duration(135), duration(7500), duration(200_000)
    ('1 min 0 s', '2 min 15 s', '2 h 5 min', '2 d 7 h')
    """
    whole = round(seconds)
    for large, small, size, of in (
        ("d", "h", 86400, 3600),
        ("h", "min", 3600, 60),
        ("min", "s", 60, 1),
    ):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // of} {small}"
    return f"{whole} s"


def level_of(text: str) -> str:
    """Returns "error", "warning" or "info", by how a message begins."""
    if text.startswith(("error:", "Traceback")):
        return "error"
    is_warning = text.startswith(("NOT SAVED", "NOT USED")) or "Warning: " in text.split("\n")[0]
    return "warning" if is_warning or _SKIPPED.match(text) else "info"


class JsonStream(io.TextIOBase):
    """A text stream that writes each message to another stream, such as ``sys.stderr``, as one line of JSON.

    {"time": "2026-11-22T12:55:44.120Z", "level": "info", "message": "compiled in 12.1 s"}

    What is written between two flushes is one message: a message that Python prints with ``flush=True`` stays whole. The level
    is that of ``level_of``.

    Args:
        stream: Where the lines go.
    """

    def __init__(self, stream: TextIO) -> None:
        self.wrapped = stream
        self._parts: list[str] = []
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """Returns True."""
        return True

    def fileno(self) -> int:
        """Returns the file descriptor of the wrapped stream."""
        return self.wrapped.fileno()

    def write(self, text: str) -> int:
        """Keeps text for the message that the next flush ends."""
        with self._lock:
            self._parts.append(text)
        return len(text)

    def flush(self) -> None:
        """Writes what was written since the last flush as a message; blank text is none."""
        with self._lock:
            text, self._parts = "".join(self._parts).strip("\n"), []
        if text.strip():
            self.emit(level=level_of(text), message=text)

    def emit(self, **values: Any) -> None:
        """Writes a line with these values and the time; numbers that JSON does not have become null."""
        now = (
            datetime.datetime.now(datetime.UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        plain = {
            name: None if isinstance(v, float) and not math.isfinite(v) else v
            for name, v in values.items()
        }
        with self._lock:
            line = json.dumps({"time": now, **plain}) + "\n"
            self.wrapped.write(line)  # one write: another stream may share the file
            self.wrapped.flush()
