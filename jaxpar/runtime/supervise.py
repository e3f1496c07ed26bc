"""Restarts a failed run from its last checkpoint, up to a given number of times, and reports at the end what the failures cost.

start 0: steps 0 to 37 in 4.2 s, then process 1 ended first (ended by SIGKILL); 2 steps were redone
start 1: steps 35 to 80 in 5.1 s, then done
goodput 71%: 9.0 s of useful steps in 12.7 s

A run writes its progress to a small file that outlives its processes, and which ``JAXPAR_PROGRESS`` names:

{"first": 100, "done": 137, "seconds": 4.18}      steps before this start, steps now, seconds between
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode, describe_exit
from jaxpar.runtime.launch import Gang, Launch, run_gang, shell_code
from jaxpar.runtime.output import tell

VARIABLE = "JAXPAR_PROGRESS"
RESUME_VARIABLE, RESUME_IF_ANY = (
    "JAXPAR_RESUME",
    "if-any",
)  # a restarted run resumes if there is a checkpoint
LINE_BYTES = 100  # one write of a fixed length, so that a reader never sees half of an old line


def is_restarted(variables: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the run may be one that a supervisor or a scheduler has started again.

    Args:
        variables: The environment.

    Raises:
        ValueError: The environment's JAXPAR_RESUME has another value than those that mean something.
    """
    told = variables.get(RESUME_VARIABLE, "")
    if told not in ("", RESUME_IF_ANY):
        raise ValueError(
            f"{RESUME_VARIABLE} must be {RESUME_IF_ANY} or not set; got {told!r}. Set it to {RESUME_IF_ANY} for a run "
            "that may be restarted, or unset it."
        )
    return told == RESUME_IF_ANY


@dataclass(frozen=True)
class Reached:
    """The progress of one start of a run.

    Attributes:
        first: The steps done before this start.
        done: The steps done at its end.
        seconds: The time from the creation of its ``Progress`` to the end of its last step.
    """

    first: int
    done: int
    seconds: float


class Progress:
    """Writes the progress file; without a path it does nothing. A disk that fails does not end training: the file then lags.

    Args:
        path: The file to write.
    """

    def __init__(self, path: Path | None) -> None:
        self._began, self._first = time.monotonic(), None
        self._file = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    @classmethod
    def from_environment(cls, process_index: int) -> "Progress":
        """Returns a Progress for the file that ``JAXPAR_PROGRESS`` names; only process 0 writes."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path and process_index == 0 else None)

    def done(self, step: int) -> None:
        """Records that ``step`` steps are done."""
        if self._file is None:
            return
        self._first = step - 1 if self._first is None else self._first
        reached = Reached(self._first, step, round(time.monotonic() - self._began, 3))
        with contextlib.suppress(OSError):
            os.pwrite(self._file, json.dumps(asdict(reached)).ljust(LINE_BYTES).encode(), 0)


def read_progress(path: Path) -> Reached | None:
    """Returns the progress of a run; None if it has done no step."""
    try:
        return Reached(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        code: The exit code, negative for a signal.
        process: The process that ended first, with that code.
        seconds: The time from its start to its end.
        reached: Its progress; None if it did no step.
        was_asked: Whether the supervisor itself was asked to stop meanwhile.
    """

    code: int
    process: int
    seconds: float
    reached: Reached | None
    was_asked: bool = False

    @property
    def ending(self) -> str:
        """A description of how it ended."""
        if self.code == ExitCode.DONE:
            return "done"
        return f"process {self.process} ended first ({describe_exit(self.code)})"


def supervise(launch: Launch, max_restarts: int) -> int:
    """Runs a group of processes until it is done, restarting it after at most ``max_restarts`` failures; returns its last code.

    A run that was asked to stop and has saved, exit code 75, is restarted too and is no failure, as on a cluster. A restarted
    run has ``JAXPAR_RESUME=if-any`` in its environment, so it resumes from the newest intact checkpoint, or starts from the
    beginning if none was saved. It is not restarted after an exit code that a restart cannot fix, after two consecutive starts
    without a step, or when the supervisor was asked to stop.
    """
    if max_restarts < 0:
        raise ValueError(
            f"--max-restarts must be 0 or more; got {max_restarts}. Choose 0 for no restart."
        )
    starts = [_start(launch, 0)]
    while (why_not := _why_no_restart(starts, max_restarts)) is None:
        say(f"{_which(starts, max_restarts)}: {starts[-1].ending}, {_where(starts[-1])}")
        try:
            starts.append(_start(launch, len(starts)))
        except OSError as error:  # such as a full disk, which may be why the start before it failed
            why_not = f"{error}"
            break
    if starts[-1].code != ExitCode.DONE:
        say(f"no restart: {why_not}")
    say(report(starts))
    try:
        (launch.log_dir / "goodput.json").write_text(
            json.dumps([asdict(start) for start in starts], indent=1) + "\n"
        )
    except OSError as error:
        say(f"goodput.json is not complete: {error}")
    return shell_code(starts[-1].code)


def say(text: str) -> None:
    """Prints text to standard error, each line with the prefix ``launch:``."""
    tell("\n".join(f"launch: {line}" for line in text.splitlines()))


def _start(launch: Launch, number: int) -> Start:
    own = replace(launch, log_dir=launch.log_dir / f"start-{number}")
    own.log_dir.mkdir(parents=True, exist_ok=True)
    progress = own.log_dir / "progress.json"
    progress.unlink(missing_ok=True)
    variables = {VARIABLE: str(progress.absolute())} | (
        {RESUME_VARIABLE: RESUME_IF_ANY} if number else {}
    )
    gang, began = Gang(own, variables), time.monotonic()
    code, was_asked = run_gang(gang)
    return Start(
        code, gang.first_failed or 0, time.monotonic() - began, read_progress(progress), was_asked
    )


def _why_no_restart(starts: Sequence[Start], max_restarts: int) -> str | None:
    last = starts[-1]
    if last.was_asked:
        return "asked to stop"
    if last.code in (ExitCode.DONE, *FINAL_CODES):
        return f"{describe_exit(last.code)}, which a restart cannot fix"
    if len(starts) > 1 and all(start.reached is None for start in starts[-2:]):
        return "two consecutive starts completed no step"
    if _num_failures(starts) > max_restarts:
        return f"--max-restarts {max_restarts} is used up"
    return None


def _num_failures(starts: Sequence[Start]) -> int:
    return sum(start.code not in (ExitCode.DONE, ExitCode.PREEMPTED) for start in starts)


def _which(starts: Sequence[Start], max_restarts: int) -> str:
    if starts[-1].code == ExitCode.PREEMPTED:
        return "a restart that does not count"
    return f"restart {_num_failures(starts)} of at most {max_restarts}"


def _where(start: Start) -> str:
    if start.reached is None:
        return "before its first step"
    go_on = "resuming from the last intact checkpoint, or beginning anew where there is none"
    return f"after step {start.reached.done}; {go_on}"


def report(starts: Sequence[Start]) -> str:
    """Returns a report on each start, how many of its steps were redone, and the goodput: useful seconds over all seconds."""
    lines, useful = [], 0.0
    for number, start in enumerate(starts):
        following = next((later.reached for later in starts[number + 1 :] if later.reached), None)
        line, kept = _account(start, following)
        lines.append(f"start {number}: {line}")
        useful += kept
    total = sum(start.seconds for start in starts)
    share = useful / total if total else 0.0
    return "\n".join(
        [*lines, f"goodput {share:.0%}: {useful:.1f} s of useful steps in {total:.1f} s"]
    )


def _account(start: Start, following: Reached | None) -> tuple[str, float]:
    """Returns a line about a start, and the seconds of its steps that were not redone."""
    reached = start.reached
    if reached is None:
        return f"no step in {start.seconds:.1f} s, then {start.ending}", 0.0
    redone = 0 if following is None else max(0, reached.done - max(following.first, reached.first))
    again = f"; {redone} steps were redone" if redone else ""
    steps = reached.done - reached.first
    text = f"steps {reached.first} to {reached.done} in {reached.seconds:.1f} s, then {start.ending}{again}"
    return text, reached.seconds * (steps - redone) / steps
