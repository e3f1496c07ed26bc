"""Ends a run that is stuck: each phase has a time budget, and exceeding it reports the process, the step and the Python stack.

A process that waits for another one which is alive but makes no progress would wait forever, since JAX's own heartbeats
continue, and so would a process in an endless loop. A thread watches the clock, and ends the process with exit code 124. If
another process is silent, such as a stopped one, the report names that process: each sends a heartbeat every second over the
coordination service, from a thread of its own, so that a process which is stuck in a step or in Python code is not silent. A
process that is silent for ``heartbeat_seconds`` of ``initialize`` ends the run before a budget does:

    process 1 of 4 is frozen    process 0, which reads all heartbeats, names it: jaxpar/silent; the others read that
    process 0 is frozen         the others, whose service it has, find that nothing answers

If something holds Python's interpreter lock no thread can run: then Python's fault handler prints the stacks a second after the
deadline, and the exit code is 1.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jaxpar.fields import arg
from jaxpar.runtime import endings
from jaxpar.runtime.coordination import client, count_use
from jaxpar.runtime.exit_codes import ExitCode

BEAT_SECONDS = 1.0
SILENT_SECONDS = 3 * BEAT_SECONDS
HEARTBEATS, SILENT, OVER = "jaxpar/heartbeat/", "jaxpar/silent", "over"
POLL_SECONDS = 0.1
SECONDS_TO_LISTEN = 2 * SILENT_SECONDS  # before a deadline
# Who presses Ctrl-C waits for the step in progress: three times as long as the longest one, or this many seconds, more of them
# before the first step is done.
SECONDS_TO_END, SECONDS_TO_END_FIRST = 60.0, 300.0
SECONDS_TO_TELL = 10.0  # until it is told how long
_limits: list[float] = []  # the seconds of silence that end a run of several processes
SECONDS_OF_GRACE = 1.0  # for the fault handler, and for others to report before process 0 ends, whose service they need


def end_if_silent(seconds: float) -> None:
    """Lets each later watchdog of this process end the run once a process is silent for ``seconds``."""
    _limits.append(seconds)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The seconds that a phase of a run may take; 0: no limit.

    Attributes:
        compile: Compiling the training step.
        step: A training step with its batch.
        evaluation: An evaluation on held-out data.
        save: A save, until the checkpoint is committed, after which it is given up; also a restore.
    """

    compile: float = 3600.0
    step: float = 600.0
    evaluation: float = 3600.0
    save: float = 1800.0

    def __post_init__(self) -> None:
        for name, seconds in asdict(self).items():
            if not 0 <= seconds < float("inf"):
                named = arg(f"budget.{name}")
                raise ValueError(
                    f"{named} must be 0 or more seconds; got {seconds:g}. Choose 0 for no limit."
                )


@dataclass(frozen=True)
class Phase:
    """A phase of a process.

    Attributes:
        name: Its name in ``Budgets``.
        detail: Which one, such as the step "37".
        deadline: In seconds of the watchdog's clock; None: no limit.
        began: When it began, by the same clock.
        is_over: Returns whether it has ended without a call to ``Watchdog.end``.
    """

    name: str = ""
    detail: str = ""
    deadline: float | None = None
    began: float = 0.0
    is_over: Callable[[], bool] = lambda: False

    def seconds_left(self, now: float) -> float:
        """Returns the seconds to the deadline, negative after it."""
        return float("inf") if self.deadline is None or self.is_over() else self.deadline - now


class Watchdog:
    """Watches the phases of a run within a ``with`` block.

    Args:
        budgets: The seconds for each phase.
        end: Ends the process with an exit code; replaces ``os._exit`` in tests.
        clock: Returns seconds; replaces ``time.monotonic`` in tests.
    """

    def __init__(
        self,
        budgets: Budgets,
        *,
        end: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budgets, self._end, self._clock = asdict(budgets), end, clock
        # Of a command, which the thread that ends the run does not know.
        self._named = {name: arg(f"budget.{name}") for name in self._budgets}
        self._phase, self._beside = Phase(), Phase()
        self._longest = 0.0  # step
        self._hurried: tuple[str, float] | None = None  # by which signal, and when
        self._has_told = False
        self._armed: float | None = None
        self._arming = threading.Lock()
        self._over = threading.Event()
        self._heartbeat = Heartbeat(clock)
        self._looked_at = self._awake_since = clock()
        self._thread = threading.Thread(target=self._watch, name="jaxpar-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._heartbeat.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._phase = self._beside = Phase()
        self._over.set()
        self._thread.join()
        self._heartbeat.__exit__()
        if self._armed is not None:
            faulthandler.cancel_dump_traceback_later()

    def begin(self, phase: str, detail: str = "") -> None:
        """Begins a phase and ends the previous one.

        Args:
            phase: A name in ``Budgets``.
            detail: Which one, such as the step "37".
        """
        now = self._clock()
        if self._phase.name == "step":
            self._longest = max(self._longest, now - self._phase.began)
        self._phase = Phase(phase, detail, self._deadline(phase), now)
        self._arm()

    def hurry(self, signal: str) -> None:
        """Gives the step in progress less time, since someone waits for its end; a signal handler may call it.

        Args:
            signal: The name of the signal, for the message.
        """
        self._hurried = signal, self._clock()

    def end(self) -> None:
        """Ends the phase; nothing is watched until the next begins."""
        self._phase = Phase()
        self._arm()

    @contextlib.contextmanager
    def phase(self, phase: str, detail: str = "") -> Iterator[None]:
        """Watches the ``with`` block as a phase; afterwards the surrounding phase begins again with its full budget."""
        around = self._phase
        self.begin(phase, detail)
        try:
            yield
        finally:
            self.begin(around.name, around.detail) if around.name else self.end()

    def beside(self, phase: str, detail: str, is_over: Callable[[], bool]) -> None:
        """Also watches a phase in another thread, until it is over; its deadline is a little later, so it can give up first.

        Args:
            phase: A name in ``Budgets``.
            detail: Which one.
            is_over: Returns whether it has ended.
        """
        deadline = self._deadline(phase)
        later = deadline and deadline + 2 * SECONDS_OF_GRACE
        self._beside = Phase(phase, detail, later, self._clock(), is_over)

    def _deadline(self, phase: str) -> float | None:
        seconds = self._budgets[phase]
        return self._clock() + seconds if seconds else None

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self._arm()
            now = self._clock()
            next_due = min(self._phase, self._beside, key=lambda phase: phase.seconds_left(now))
            left = next_due.seconds_left(now)
            self._heartbeat.listen(left < SECONDS_TO_LISTEN or self._reads_all())
            if left < 0:
                rule = f"{next_due.name} must end within {self._budgets[next_due.name]:g} s ({self._named[next_due.name]})"
                self._fire(next_due, rule)
                return
            if self._ends_silent(now):
                return
            if (
                self._hurried is not None
                and self._phase.name == "step"
                and self._is_late(*self._hurried, now)
            ):
                return

    def _reads_all(self) -> bool:
        return bool(_limits) and jax.process_index() == 0

    def _ends_silent(self, now: float) -> bool:
        """Ends the run if another process has been silent too long, while this one itself was not stopped."""
        if now - self._looked_at > SILENT_SECONDS:
            self._awake_since = now
        self._looked_at = now
        if not _limits or not self._phase.name:
            return False
        limit = _limits[-1]
        most = limit + 2 * BEAT_SECONDS  # the last heartbeat may be older than the silence
        silent = self._heartbeat.lost(most)
        if not silent or not (self._heartbeat.told or now - self._awake_since >= most):
            return False
        if jax.process_index() == 0:
            endings.publish(SILENT, silent)
        rule = (
            f"a process must not be silent for {limit:g} s (heartbeat_seconds of jaxpar.initialize)"
        )
        self._tell(self._phase, rule, silent)
        if 0 in silent:  # and with it the service, which would not answer
            self._end(int(ExitCode.STUCK))
        else:
            endings.end_now_without_a_word(int(ExitCode.STUCK), self._end)
        return True

    def _is_late(self, signal: str, asked_at: float, now: float) -> bool:
        """Ends the run if its step has not ended long after a signal; says before that it will."""
        phase, most = (
            self._phase,
            max(3 * self._longest, SECONDS_TO_END if self._longest else SECONDS_TO_END_FIRST),
        )
        waited = now - max(asked_at, phase.began)
        if waited > SECONDS_TO_TELL and not self._has_told:
            self._has_told = True
            me = f"process {jax.process_index()} of {jax.process_count()}"
            step = f"step {phase.detail}".strip()
            told = f"{signal}: {me} waits for the end of {step}, and ends without it in {most - waited:.0f} s"
            os.write(2, f"{told}; a second signal ends it at once\n".encode())
        if waited <= most:
            return False
        self._fire(
            phase,
            f"step must end within {most:.0f} s of {signal}, after which the run is saved and ends",
        )
        return True

    def _arm(self) -> None:
        """Sets Python's fault handler to fire shortly after the deadline, in case no thread can run."""
        with self._arming:
            deadline = self._phase.deadline
            if deadline is None and self._armed is not None:
                faulthandler.cancel_dump_traceback_later()
                self._armed = None
            elif deadline is not None and (
                self._armed is None or abs(deadline - self._armed) > SECONDS_OF_GRACE / 2
            ):
                left = max(deadline - self._clock(), 0) + SECONDS_OF_GRACE
                faulthandler.dump_traceback_later(left, exit=True, file=sys.__stderr__ or 2)
                self._armed = deadline

    def _tell(self, phase: Phase, rule: str, silent: Mapping[int, float]) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.write(2, self._report(phase, rule, silent).encode())

    def _fire(self, phase: Phase, rule: str) -> None:
        self._tell(phase, rule, self._heartbeat.silent())
        if jax.process_count() > 1 and jax.process_index() == 0:
            time.sleep(SECONDS_OF_GRACE)
        self._end(int(ExitCode.STUCK))

    def _report(self, phase: Phase, rule: str, silent: Mapping[int, float]) -> str:
        what = " ".join(filter(None, (phase.name, phase.detail)))
        me, count = jax.process_index(), jax.process_count()
        stack = "Its Python stack"
        found = f"process {me} of {count} stuck in {what}. "
        if silent:
            named = ", ".join(
                f"process {process} of {count}, silent for {silent[process]:.0f} s or more"
                for process in silent
            )
            found = (
                f"{named}: stopped, or its machine is gone. Process {me} waits for it in {what}. "
            )
            stack = f"The Python stack of process {me}"
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return f"error: {rule}; got {found}{stack}, the innermost call last:\n" + "".join(
            traceback.format_stack(frame)
        )


class Heartbeat:
    """Sends heartbeats of this process within a ``with`` block, and reads those of the others while it listens.

    The service runs in process 0, so if the service is silent, process 0 is.

    Args:
        clock: Returns seconds; replaces ``time.monotonic`` in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at = clock()
        self._heard: dict[
            int, tuple[str, float]
        ] = {}  # by process: its latest heartbeat, and when that was first read
        self._beating: set[int] = set()  # of those, the processes whose latest one is of this loop
        self.told: dict[
            str, float
        ] = {}  # what process 0 has told of silent ones, as ``lost`` returns it
        self._loop = "0/"  # with which the heartbeats of one loop begin in all processes
        self._listening_since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="jaxpar-heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        if client() is not None:
            self._loop = f"{count_use('heartbeat')}/"
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if client() is not None:
            self._thread.join(
                timeout=BEAT_SECONDS
            )  # if process 0 is gone the thread is waiting for it

    def listen(self, on: bool) -> None:
        """Starts or stops reading the others' heartbeats: a listener reads all of them, which is too expensive to do always."""
        if on and self._listening_since is None:
            self._heard.clear()
            self._beating.clear()
            self._listening_since = self._clock()
        elif not on:
            self._listening_since = None

    def silent(self) -> dict[int, float]:
        """Returns the silent processes and for how many seconds each has been silent, the longest first."""
        now, since = self._clock(), self._listening_since
        if client() is None or since is None:
            return {}
        if now - self._said_at > SILENT_SECONDS and jax.process_index() != 0:
            return {0: now - self._said_at}
        others = [
            process for process in range(jax.process_count()) if process != jax.process_index()
        ]
        seconds = {process: now - self._heard.get(process, ("", since))[1] for process in others}
        return {
            each: seconds[each]
            for each in sorted(others, key=lambda p: -seconds[p])
            if seconds[each] > SILENT_SECONDS
        }

    def lost(self, seconds: float) -> dict[int, float]:
        """Returns the processes, and for how long, that were silent for so many seconds after they had spoken.

        Process 0 finds them while it listens. The others find process 0, and those that it has told.
        """
        me = jax.process_index()
        if self.told:
            return {int(each): quiet for each, quiet in self.told.items() if int(each) != me}
        if me == 0:
            found = self.silent()
            quiet = {process: found[process] for process in found if process in self._beating}
        else:
            quiet = {} if client() is None else {0: self._clock() - self._said_at}
        return {process: quiet[process] for process in quiet if quiet[process] >= seconds}

    def _beat(self) -> None:
        number, is_over = 0, False
        while not is_over:
            number += 1
            with contextlib.suppress(Exception):  # the service is gone, and so is process 0
                self._say_and_hear(client(), f"{self._loop}{number}")
            is_over = self._over.wait(BEAT_SECONDS)
        with contextlib.suppress(Exception):
            self._say(client(), OVER)

    def _say(self, service: Any, text: str) -> None:
        service.key_value_set(f"{HEARTBEATS}{jax.process_index()}", text, allow_overwrite=True)

    def _say_and_hear(self, service: Any, text: str) -> None:
        self._say(service, text)
        self._said_at = self._clock()
        if _limits and jax.process_index() != 0:
            self.told = endings.news(SILENT) or {}
        if self._listening_since is None:
            return
        for key, said in service.key_value_dir_get(HEARTBEATS):
            process = int(key.rsplit("/", 1)[1])
            if self._heard.get(process, ("", 0.0))[0] != said:
                is_in_loop = said.startswith(self._loop)
                (self._beating.add if is_in_loop else self._beating.discard)(process)
                self._heard[process] = said, self._clock()
