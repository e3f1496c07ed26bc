"""Exchanges small values between the processes of a run, over JAX's coordination service and never over devices.

Therefore it works from any thread, while steps are in flight, and when devices are stuck. With one process it returns
immediately. The service has no authentication: see SECURITY.md.
"""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from jaxpar import _compat
from jaxpar.runtime import endings, place
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import ANOTHER_IS_GONE, tell

TIMEOUT_SECONDS = 600.0
MOST_SHOWN = 8  # differences, and processes, in a message
SAME_PROGRAM = (
    "Start all with the same code, flags and data, of the same dtypes. A model or a loss must not read the number of its "
    "process, the time or random numbers of NumPy: put them into the batch."
)
OF_ALL_ROWS = "Compute it from the rows of all processes, as jaxpar.make_eval_step and has_aux do, not from some."
POLL_SECONDS = 0.2  # between two looks for requests
SECONDS_TO_ASK = 1.0  # for an answer, between two looks for processes that have ended
# After another process has left a training loop, this one may be at its last step of it too: it is given three times as long as
# its longest step, or this many seconds, more of them before its first step is done.
SECONDS_TO_LEAVE, SECONDS_TO_LEAVE_FIRST = 10.0, 60.0
# What Gloo, XLA's coordination service and NCCL say of a process that is gone, as jaxlib raises it.
OF_GLOO = r"gloo [\w -]+ (?:failed|timed out)\b"
LOST = re.compile(
    rf"\b(?:{OF_GLOO}|connection (?:reset|closed)\b|coordination service\b"
    r"|heartbeat timeout\b|stopped sending heartbeats\b|missed heartbeats?\b"
    r"|remote process exited or there was a network error\b|NcclCommunicator (?:aborted|cancelled)\b)",
    re.IGNORECASE,
)
BEGINS_WITH_GLOO = re.compile(rf"(?:[A-Z_]+: )?{OF_GLOO}", re.IGNORECASE)
# In JAX's error of a callback, which is the program's own.
OF_PYTHON = "Traceback (most recent call last)"
_uses: Counter[str] = (
    Counter()
)  # all processes use a name equally often, so its count identifies each use
_lock = threading.Lock()


def client() -> Any:
    """Returns the client of the coordination service; None if there is only one process."""
    return _compat.coordination().client if jax.process_count() > 1 else None


def count_use(name: str) -> int:
    """Returns how often this process has used a name before, and counts one more use."""
    with _lock:
        use, _uses[name] = _uses[name], _uses[name] + 1
    return use


def exchange(name: str, value: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """Returns the values of all processes, in the order of the processes; every process must call it with the same name.

    Args:
        name: The name of the exchange. All processes must make calls with one name in the same order; calls with different
            names may be made from different threads.
        value: Plain JSON.
        timeout_seconds: How long to wait for the other processes.

    Raises:
        PeerLostError: A process did not answer in time, or has ended.
    """
    service = client()
    if service is None:
        return [value]
    use = count_use(name)
    mine = f"jaxpar/{name}/{{}}/{jax.process_index()}"
    service.key_value_set(mine.format(use), json.dumps(value))
    with place.waiting(f"{name}/{use}", f"all processes must answer for {name!r}"):
        values = [
            json.loads(get(service, f"jaxpar/{name}/{use}/{process}", timeout_seconds))
            for process in range(jax.process_count())
        ]
    if use:  # all processes have reached this use, so none still reads the previous one
        service.key_value_delete(mine.format(use - 1))
    return values


def try_get(key: str) -> str | None:
    """Returns the value of a key of the coordination service; None if there is no such key, or only one process."""
    service = client()
    try:
        return None if service is None else service.key_value_try_get(key)
    except Exception:  # jaxlib's NOT_FOUND, or the service is gone
        return None


class PeerLostError(RuntimeError):
    """Another process of the run did not answer, or does not agree."""

    exit_code = ExitCode.PEER_LOST


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether a collective failed because a process is gone. JAX has no error type of its own for this."""
    if jax.process_count() == 1:
        return False
    if isinstance(error, PeerLostError):
        return True
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and _is_raised_by_jax(error)
    )
    text = str(error)
    return is_of_jax and OF_PYTHON not in text and bool(LOST.search(text))


def _is_raised_by_jax(error: ValueError) -> bool:
    """Returns whether a ValueError is JAX's own: by its innermost frame, or, where a script called jaxlib, by its beginning."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    is_inside = module.split(".")[0] in ("jax", "jaxlib")
    return is_inside or bool(BEGINS_WITH_GLOO.match(str(error)))


def follow(error: BaseException) -> tuple[int, str]:
    """Returns the exit code of a process that an error ends of which ``is_peer_lost`` is true, and a message.

    It waits briefly for what the other process tells of its end; the message is empty where it is said already.
    """
    why = str(error).splitlines()[0][:200]
    if isinstance(error, PeerLostError):
        return int(error.exit_code), f"{ANOTHER_IS_GONE}: {why}"
    return endings.follow(why)


def get(
    service: Any, key: str, timeout_seconds: float, look: Callable[[], None] = lambda: None
) -> str:
    """Returns the value of a key that another process sets, whose number ends the key.

    Args:
        service: The client of the coordination service.
        key: The key.
        timeout_seconds: How long to wait.
        look: Called each time that it was waited for in vain; it may raise.

    Raises:
        PeerLostError: The process did not set it in time, or has ended.
    """
    process, deadline = key.rsplit("/", 1)[1], time.monotonic() + timeout_seconds
    while True:
        has_ended = endings.news(
            f"{endings.ENDED}/{process}"
        )  # before the last look: it may have answered and ended since
        left = deadline - time.monotonic()
        try:
            return service.blocking_key_value_get(
                key, round(1000 * max(min(left, SECONDS_TO_ASK), 0.001))
            )
        except (
            Exception
        ) as error:  # jaxlib raises its own exception types, which differ between versions
            look()
            if has_ended is not None:
                raise _without_answer(has_ended, key) from None
            if goer := endings.who_goes_on():
                raise PeerLostError(f"{goer} goes on without an answer for {key}") from error
            if left < SECONDS_TO_ASK or "DEADLINE" not in str(error).upper():
                raise PeerLostError(
                    f"process {process} must answer within {timeout_seconds:g} s; got nothing for {key}: {error}"
                ) from error


def _without_answer(ended: dict[str, Any], key: str) -> PeerLostError:
    endings.tell_that_this_goes_on(ended["process"])
    error = PeerLostError(
        f"{endings.describe_end(ended)} without an answer for {key}. {endings.remedy_without(ended)}"
    )
    error.exit_code = ExitCode(endings.code_without(ended))
    return error


def check_agreement(
    what: str, values: dict[str, Any], remedy: str = "Start all with the same code, flags and data."
) -> None:
    """Raises ValueError unless all processes pass the same values; every process must call it.

    Args:
        what: The action that they are about to take, for the message.
        values: Plain JSON by name, such as a hash.
        remedy: The end of the message, a sentence.

    Raises:
        ValueError: The values differ; the message names the values and processes.
    """
    answers = exchange(f"check/{what}", values)
    names = dict.fromkeys(name for answer in answers for name in answer)
    differing = {
        name: told
        for name in names
        if (told := _difference([answer.get(name) for answer in answers]))
    }
    if differing:
        many = len(differing) > 1
        got = "; ".join(
            f"{name} {told}" if many else told
            for name, told in list(differing.items())[:MOST_SHOWN]
        )
        raise ValueError(
            f"all processes must agree on their {', '.join(differing)} before they {what}; got {got}. {remedy}"
        )


def check_same_program(what: str, program: str) -> None:
    """Raises ValueError unless all processes have the same program; every process must call it.

    Args:
        what: As for ``check_agreement``.
        program: Its text before it is compiled.
    """
    digest = hashlib.sha256(program.encode()).hexdigest()[:16]
    check_agreement(what, {"program": digest}, SAME_PROGRAM)


def _difference(given: list[Any]) -> str:
    """Returns which processes have another value than process 0; "" if none has."""
    odd = [process for process, value in enumerate(given) if value != given[0]]
    if not odd:
        return ""
    more = f" and {len(odd) - MOST_SHOWN} more" if len(odd) > MOST_SHOWN else ""
    numbers = ", ".join(map(str, odd[:MOST_SHOWN])) + more
    return f"{given[odd[0]]!r} on process {numbers}, {given[0]!r} on process 0"


def code_of_exit(error: BaseException | None) -> int:
    """Returns the exit code of a SystemExit; 0 for anything else."""
    code = getattr(error, "code", None) if isinstance(error, SystemExit) else 0
    return code if isinstance(code, int) else int(code is not None)


def _describe_leaver(told: dict[str, Any]) -> str:
    """Returns who has left a training loop, and how."""
    code, why, how = told["code"], told.get("why"), ""
    if code:
        how = f" with {why}, exit code {code}" if why else f" with SystemExit({code})"
    return f"{endings.named(told['process'])} has left the training loop after step {told['done']}{how}"


class AgreedStep:
    """Lets any process request an action of all of them, and determines the step after which all perform it.

    A thread polls for requests, so that no step waits for one. After a request each process reports how many steps it has done
    and blocks its loop until all have reported. The action is due after the step that follows the largest of these numbers,
    which no process has finished yet.

    All processes leave the ``with`` block after the same step. If one leaves it before the last step while another goes on, it
    raises SystemExit, and the other process ends, both with exit code 70 unless the first had a code of its own.

    Args:
        num_steps: The last step of the loop; None: it may be left after any step.
        end: Ends the process; replaces ``os._exit`` in tests.
    """

    def __init__(self, num_steps: int | None = None, end: Callable[[int], None] = os._exit) -> None:
        self._num_steps, self._end = num_steps, end
        self._steps_begun, self._longest, self._step_began = 0, 0.0, time.monotonic()
        self._has_left, self._is_agreed = (
            False,
            False,
        )  # the loop, and that all stop after the same step
        self._is_known = False  # that there is no more to say of how it is left
        self._looked_at = self._seen_at = 0.0
        self._asked: list[str] = []
        self._steps_done = 0
        self._agreeing = False
        self._due: tuple[int, str] | None = None
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxpar-agreed-step", daemon=True)

    def __enter__(self) -> "AgreedStep":
        if client() is not None:
            self._left_key = f"jaxpar/left/{count_use('loop')}"
            place.enter_loop()
            endings.begin_loop()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if client() is None:
            return
        try:
            if kind is None or isinstance(error, SystemExit):
                self._leave_together(code_of_exit(error))
        finally:
            self._over.set()
            self._thread.join(
                timeout=10 * POLL_SECONDS
            )  # the thread may be waiting for a process that is gone

    def _leave_together(self, code: int) -> None:
        """Waits until the others leave too, since they may still wait for this one's thread."""
        self.leave(code)
        if code:
            endings.will_end_with(code)
        try:
            ends = exchange("end", self._steps_done)
        except PeerLostError as error:
            if (goer := endings.who_goes_on()) is None:
                raise
            where = f"step {self._steps_done}" + (
                f" of {self._num_steps}" if self._num_steps else ""
            )
            tell(
                "error: all processes must leave a training loop after the same step; got "
                f"{endings.named(jax.process_index())} after {where}, and {goer} goes on. {endings.REMEDY}"
            )
            code = code or int(ExitCode.PEER_LOST)
            endings.will_end_with(code)
            endings.leaves_with(code)
            raise SystemExit(code) from error
        if len(set(ends)) == 1:
            endings.has_completed(self._steps_done)

    def _is_complete(self) -> bool:
        return self._num_steps is None or self._steps_done >= self._num_steps or self._is_agreed

    def leave(self, code: int = 0, why: str = "", *, is_known: bool = True) -> None:
        """Tells the other processes that this one leaves the loop; it may be called before the ``with`` block ends.

        Args:
            code: The exit code with which it leaves; 0: none.
            why: The name of the error with which it leaves; "" if that is a SystemExit, or none.
            is_known: Whether that is all that there is to say; else an error may be under way, so the others wait some seconds.
        """
        is_told = self._has_left and not code and (self._is_known or not is_known)
        if client() is None or is_told:
            return
        self.withdraw()
        self._has_left, self._is_known = True, is_known
        place.leave_loop()
        if not self._is_complete():
            told = {
                "process": jax.process_index(),
                "done": self._steps_done,
                "begun": self._steps_begun,
                "code": code,
                "why": why,
                "is_known": is_known,
            }
            endings.publish(self._left_key, told)

    def withdraw(self) -> None:
        """Takes back that this process leaves the loop without a code, which is told before an error is known."""
        if self._has_left:
            endings.withdraw(self._left_key, {"process": jax.process_index(), "code": 0})

    def begin(self, step: int) -> None:
        """Notes that this process begins ``step``, counted from 0: it then knows sooner if another one has left."""
        self._steps_begun = max(self._steps_begun, step + 1)
        place.begin(self._steps_begun)

    def ask(self, what: str) -> None:
        """Requests the action ``what`` of all processes. It only records the request, so a signal handler may call it."""
        self._asked.append(what)

    def after(self, step: int) -> str | None:
        """Returns the action that is due after ``step`` steps, else None; every process must call it after every step."""
        if client() is None:
            return self._asked.pop(0) if self._asked else None
        self._longest = (
            max(self._longest, time.monotonic() - self._step_began) if self._steps_done else 0.0
        )
        self._step_began = time.monotonic()
        with self._changed:
            self._steps_done, self._steps_begun = step, max(self._steps_begun, step)
            self._is_agreed = False
            place.begin(self._steps_begun)
            while self._agreeing:
                self._changed.wait()
            if self._due is None or step < self._due[0]:
                return None
            what, self._due, self._is_agreed = self._due[1], None, True
            self._changed.notify_all()
            return what

    def _watch(self) -> None:
        number = 0
        while not self._over.wait(POLL_SECONDS):
            self._look_for_leavers()
            what = self._news(f"jaxpar/ask/{number}")
            if what is None:
                continue
            self._agree(what)
            number += 1
            with self._changed:
                while self._due is not None and not self._over.is_set():
                    self._changed.wait(POLL_SECONDS)
                    self._look_for_leavers()

    def _look_for_leavers(self) -> None:
        """Ends this process if another one has left the loop, or ended, and this one goes on."""
        if self._has_left or time.monotonic() - self._looked_at < SECONDS_TO_ASK:
            return
        self._looked_at = time.monotonic()
        ended = endings.news(endings.ENDED)
        if ended is not None and ended["process"] == jax.process_index():
            ended = None
        told = endings.news(self._left_key)
        if told is not None and not (ended and ended["code"]):
            self._seen_at = self._seen_at or time.monotonic()
            if self._goes_on_after(told) or self._has_waited():
                endings.tell_that_this_goes_on(told["process"])
                told = endings.news(self._left_key) or told  # an error may be known since
                endings.end_without(_describe_leaver(told), self._end, told)
        elif ended is not None:
            endings.go_on_without(endings.describe_end(ended), ended["process"], self._end, ended)

    def _goes_on_after(self, told: dict[str, Any]) -> bool:
        """Returns whether this process is past the step after which another one has left, which is known to be no error."""
        is_known = told.get("is_known", True)
        has_waited = time.monotonic() - self._seen_at > SECONDS_TO_LEAVE
        return self._steps_begun > told["begun"] and (is_known or has_waited)

    def _has_waited(self) -> bool:
        """Returns whether this process has had the time to leave the loop too."""
        seconds = (
            max(3 * self._longest, SECONDS_TO_LEAVE) if self._longest else SECONDS_TO_LEAVE_FIRST
        )
        return time.monotonic() - max(self._seen_at, self._step_began) > seconds

    def _news(self, key: str) -> str | None:
        if self._asked:
            with contextlib.suppress(
                Exception
            ):  # another process was first: its request is handled now, ours after it
                client().key_value_set(key, self._asked[0])
        return try_get(key)

    def _agree(self, what: str) -> None:
        with self._changed:
            self._agreeing, mine = True, self._steps_done
        due = None
        try:
            due = max(exchange("agreed step", mine)) + 1
        finally:
            with self._changed:
                self._agreeing, self._due = False, None if due is None else (due, what)
                if what in self._asked:
                    self._asked.remove(what)
                self._changed.notify_all()
