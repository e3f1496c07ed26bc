"""What a run prints: messages of the first process, errors of the user, and, where there is no terminal, lines about its state.

Those lines come every --log-seconds, as text or with --log-json as JSON.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxpar.devices import describe_devices, started_devices
from jaxpar.metrics.status import JsonStream, StatusLines, render_status
from jaxpar.run.flags import MonitoringFlags, RunFlags, log_seconds
from jaxpar.runtime.distributed import leave
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import is_terminal, printable_lines, take_all_characters, tell, text_of
from jaxpar.runtime.uncaught import DISK_FAULTS

NO_GRADIENT = (
    "the gradient of the first step is 0 in all params, so it has trained nothing: look for jax.lax.stop_gradient, for "
    "operations without a gradient, such as argmax, round and comparisons, and for masks or weights that are all 0"
)

_shown: list[StatusLines] = []  # at most one: that of the run of this process
_named: list[str] = []  # the devices of the run of this process, once it has said which they are


class ConfigError(Exception):
    """Flags or files of the user cannot be used; the message states the rule, the values and the remedy."""

    exit_code = ExitCode.BAD_CONFIG


@contextmanager
def checks() -> Iterator[None]:
    """Turns errors of a check into a ConfigError: ValueError, TypeError, OSError, ImportError. It must not train or write."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(text_of(error)) from error


@contextmanager
def spared(what: str) -> Iterator[None]:
    """Prints that ``what`` could not be written, instead of raising an OSError of the disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        tell(f"{what} could not be written: {error.strerror}")


def say(text: str) -> None:
    """Prints a line, on the first process only. A run goes on where the reader, such as head, has ended."""
    if jax.process_index() != 0:
        return
    take_all_characters()
    try:
        print(printable_lines(text), flush=True)
    except BrokenPipeError:
        sys.stdout = None  # print then does nothing
        tell("nothing reads standard output any more: the run goes on without it")


def say_written(folder: Path, *names: str) -> None:
    """Prints which of these files are in a folder; of one that could not be written there is an earlier line."""
    there = [name for name in names if (folder / name).exists()]
    say(f"written: {folder}/ with {', '.join(there) or 'nothing, or it was deleted since'}")


def say_devices(say: Callable[[str], None] = say, *, compile_for: str | None = None) -> None:
    """Prints which devices a run trains on, once a run and before all else.

    Args:
        say: Prints a message.
        compile_for: The GPUs that it compiles for, and does not train.

    Raises:
        ValueError: JAX cannot use the GPUs of this machine.
    """
    started_devices()
    if not _named:
        _named.append(f"none, it compiles for {compile_for}" if compile_for else describe_devices())
        say(f"devices: {_named[0]}")


def forget_devices() -> None:
    """Lets the next run of this process say which devices it trains on."""
    _named.clear()


def stop(code: int, message: str) -> NoReturn:
    """Ends the program with an exit code and a message on standard error."""
    tell(f"error: {printable_lines(message)}")
    leave(code)


@contextmanager
def status_lines(flags: Any) -> Iterator[None]:
    """Prints lines about a run in the ``with`` block, if its flags and standard error ask for them.

    Args:
        flags: Its flags; those of a script without monitoring flags may have ``steps``.
    """
    is_run = isinstance(flags, RunFlags)
    monitoring = flags.monitoring if is_run else MonitoringFlags()
    seconds = 0.0
    with contextlib.ExitStack() as resources:
        resources.callback(forget_devices)
        with contextlib.suppress(ValueError):  # the checks of the flags will report it
            seconds = log_seconds(monitoring.log_seconds) if not is_run or flags.trains else 0.0
        if monitoring.log_json:
            resources.enter_context(json_output())
        if seconds and not is_terminal():
            num_steps = flags.common.steps if is_run else getattr(flags, "steps", 0)
            lines = StatusLines(num_steps, seconds=seconds, say=_say_values)
            _shown.append(lines)
            resources.callback(_shown.clear)
            resources.enter_context(lines)
        yield


def _say_values(values: Mapping[str, Any]) -> None:
    if isinstance(sys.stderr, JsonStream):
        sys.stderr.emit(level="info", **values)
    else:
        tell(render_status(values))


@contextmanager
def json_output() -> Iterator[None]:
    """Writes each message in the ``with`` block as a line of JSON."""
    out, err = JsonStream(sys.stdout), JsonStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()


def phase(name: str, then: str | None = None) -> AbstractContextManager[None]:
    """Returns a context in which lines name this phase, and after which they name the next one until the run trains."""
    return _shown[0].phase(name, then) if _shown else contextlib.nullcontext()


def status_watchers() -> list[StatusLines]:
    """Returns the watchers to which a MetricsLog reports each step."""
    return list(_shown)


def only_on_first_process() -> None:
    """Ends the lines of the other processes, which say the same; call it once the processes are connected."""
    if _shown and jax.process_index() != 0:
        _shown[0].stop()


def remark_on_first_step(metrics: Mapping[str, Any]) -> str:
    """Returns what to say of the metrics of a first step; "" if there is nothing."""
    norm, skipped = (np.asarray(metrics.get(name, 1.0)) for name in ("grad_norm", "skipped"))
    was_skipped = "skipped" in metrics and skipped.size == 1 and skipped != 0
    is_zero = norm.size == 1 and norm == 0
    return NO_GRADIENT if is_zero and not was_skipped else ""
