"""What a recipe prints about its run where there is no terminal: a line every --log-seconds, as text or with --log-json."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import first_line
import jax
from shared_flags import log_seconds

from jaxpar.metrics.status import JsonStream, StatusLines, render_status
from jaxpar.runtime.printable import tell

_shown: list[StatusLines] = []  # at most one: that of the run of this process


@contextlib.contextmanager
def shown(flags: Any) -> Iterator[None]:
    """Prints lines about a run in the ``with`` block, if its flags and standard error ask for them."""
    began = first_line.when_said()
    with contextlib.ExitStack() as resources:
        if getattr(flags, "log_json", False):
            resources.enter_context(json_output())
        if (seconds := _seconds(flags)) and not sys.stderr.isatty():
            lines = StatusLines(getattr(flags, "steps", 0), seconds=seconds, say=_say, began=began)
            _shown.append(lines)
            resources.callback(_shown.clear)
            resources.enter_context(lines)
        yield


def _seconds(flags: Any) -> float:
    if getattr(flags, "predict", None) is not None:  # answered at once, without training
        return 0.0
    try:
        return log_seconds(getattr(flags, "log_seconds", None))
    except ValueError:  # the checks of the flags will report it
        return 0.0


def _say(values: Mapping[str, Any]) -> None:
    if isinstance(sys.stderr, JsonStream):
        sys.stderr.emit(level="info", **values)
    else:
        tell(render_status(values))


@contextlib.contextmanager
def json_output() -> Iterator[None]:
    """Writes each message in the ``with`` block as a line of JSON."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = JsonStream(before[0]), JsonStream(before[1])
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def phase(name: str, then: str | None = None) -> AbstractContextManager[None]:
    """Returns a context in which lines name this phase, and after which they name the next one until the run trains."""
    return _shown[0].phase(name, then) if _shown else contextlib.nullcontext()


def watchers() -> list[StatusLines]:
    """Returns the watchers to which a MetricsLog reports each step."""
    return list(_shown)


def only_on_first_process() -> None:
    """Ends the lines of the other processes, which say the same; call it once the processes are connected."""
    if _shown and jax.process_index() != 0:
        _shown[0].stop()
