"""Ends a run that is stuck: each phase has a budget of seconds, and one that exceeds it names process, step and Python line.

A process that waits for another one, which is alive and does nothing, waits for ever: heartbeats go on. So does one in a loop
of its own. A thread watches the clock, and ends the process with exit code 124. Where something holds Python's interpreter lock
no thread runs: then Python's own fault handler prints the stacks a second later, and the exit code is 1.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import jax

from jaxpar.exit_codes import ExitCode

POLL_SECONDS = 0.1
SECONDS_OF_GRACE = 1.0  # for the fault handler, and for others to speak before process 0 goes, which they hang on


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Seconds that a phase of a run may take; 0: any time."""

    compile: float = 3600.0
    """Compiling the training step."""
    step: float = 600.0
    """A training step with its batch."""
    evaluation: float = 3600.0
    """A look at what is held out."""
    save: float = 1800.0
    """Beginning a checkpoint, or waiting for the one before."""

    def __post_init__(self) -> None:
        for name, seconds in asdict(self).items():
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"--budget.{name} must be 0 or more seconds; got {seconds:g}. Choose 0 for any time.")


class Watchdog:
    """Watches the phases of a run, from ``with`` to its end.

    Args:
        budgets: Seconds a phase.
        end: Ends the process; in place of ``os._exit``, for tests.
        clock: Gives seconds; in place of ``time.monotonic``, for tests.
    """

    def __init__(
        self, budgets: Budgets, *, end: Callable[[int], None] = os._exit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._budgets, self._end, self._clock = asdict(budgets), end, clock
        self._phase, self._detail = "", ""
        self._deadline: float | None = None
        self._armed: float | None = None
        self._arming = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxpar-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline = None
        self._over.set()
        self._thread.join()
        if self._armed is not None:
            faulthandler.cancel_dump_traceback_later()

    def begin(self, phase: str, detail: str = "") -> None:
        """Begins a phase, which ends the one before.

        Args:
            phase: A name in ``Budgets``.
            detail: Which one, such as "37".
        """
        seconds = self._budgets[phase]
        self._phase, self._detail = phase, detail
        self._deadline = self._clock() + seconds if seconds else None
        self._arm()

    def end(self) -> None:
        """Ends the phase; nothing is watched until the next begins."""
        self._deadline = None
        self._arm()

    @contextlib.contextmanager
    def phase(self, phase: str, detail: str = "") -> Iterator[None]:
        """Watches what is under ``with``; the phase around it then begins anew."""
        around = (self._phase, self._detail) if self._deadline is not None else None
        self.begin(phase, detail)
        try:
            yield
        finally:
            self.begin(*around) if around else self.end()

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self._arm()
            deadline = self._deadline
            if deadline is not None and self._clock() > deadline:
                self._fire()
                return

    def _arm(self) -> None:
        """Keeps Python's own fault handler behind the deadline, for when no thread can run."""
        with self._arming:
            deadline = self._deadline
            if deadline is None and self._armed is not None:
                faulthandler.cancel_dump_traceback_later()
                self._armed = None
            elif deadline is not None and (self._armed is None or abs(deadline - self._armed) > SECONDS_OF_GRACE / 2):
                left = max(deadline - self._clock(), 0) + SECONDS_OF_GRACE
                faulthandler.dump_traceback_later(left, exit=True, file=sys.__stderr__ or 2)
                self._armed = deadline

    def _fire(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.write(2, self._report().encode())
        if jax.process_count() > 1 and jax.process_index() == 0:
            time.sleep(SECONDS_OF_GRACE)
        self._end(int(ExitCode.STUCK))

    def _report(self) -> str:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        what = " ".join(filter(None, (self._phase, self._detail)))
        where = f"process {jax.process_index()} of {jax.process_count()}"
        return (
            f"error: {self._phase} must end within {self._budgets[self._phase]:g} s (--budget.{self._phase}); got {where} "
            f"stuck in {what}. Its Python stack, the innermost call last:\n" + "".join(traceback.format_stack(frame))
        )
