"""How the processes of a run end: together, or one of them early, which it tells the others.

    process 1 ends, at the end of its program or with a code    -> jaxpar/ended, jaxpar/ended/1
    process 0 is in a training loop, or waits for an answer     -> jaxpar/goes on: it cannot go on without process 1
    process 1 reads that and ends at once                       -> jaxpar/gone/1
    process 0 follows with exit code 70, or with a final one of process 1, such as 2

Of an error that leaves a training loop the others learn at once, though what the script does before its end may take long:
they follow as above, and its process shows the error once they do, and ends with its code before process 0 is gone.

A process whose collective fails reads jaxpar/ended too, before it ends. Process 0, whose service holds these keys and without
which JAX aborts the others, ends last: once they are gone, or after some seconds.

A process that ends its program waits until the others do. JAX's own shutdown waits too, but tells nobody, aborts a minute later
and loses the exit code.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jaxpar._compat import coordination
from jaxpar.runtime import place
from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode
from jaxpar.runtime.output import ANOTHER_IS_GONE, tell

ENDED, GOES_ON, BARRIER = "jaxpar/ended", "jaxpar/goes on", "jaxpar: leave"
GONE = "jaxpar/gone"
POLL_SECONDS = 1.0
SECONDS_TO_MEET = 2  # for processes that end with a code, in case all of them do
SECONDS_TO_FOLLOW = 60  # for the others to end their programs too
SECONDS_TO_CONCLUDE = (
    600  # the same once a training loop is complete, since process 0 may write and draw for long
)
SECONDS_TO_TELL = 5.0  # after which a process says that another one has ended
SECONDS_OF_GRACE = 3.0  # for a process that ended early to name itself as the cause
SECONDS_TO_LEARN = 2.0  # after a collective has failed: how the other process ended, if it has told
SECONDS_TO_LINGER = 5.0  # for the others to end before process 0 does
SECONDS_AFTER = 0.3  # between the ends of two processes of which one must be the first
LOOK_SECONDS = 0.1
REMEDY = (
    "Let all processes leave a loop after the same step and end together. To end a loop early, call run.end_early(reason) "
    "before run.log, in one process or in all; to end a process with a code of its own, call jaxpar.leave(code)."
)

_completed: list[int] = []  # the steps of the training loops that are complete
_codes: list[int] = []  # with which this process is about to end
# The code of the process that this one follows; None where one is gone without a word.
_follows: list[int | None] = []
_said = threading.Lock()  # held once it is said that another process is gone


@dataclass
class Leaving:
    """An end that is under way: an error or a SystemExit has left a training loop, and the script still does something.

    Attributes:
        code: The exit code that it will have.
        error: The number of the error (``id``), which must not be kept itself, nor what its frames hold; None: none.
        text: Its traceback, to be shown; "" once it is.
    """

    code: int
    error: int | None = None
    text: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def show(self) -> None:
        """Prints the traceback, once."""
        with self._lock:
            if self.text:
                tell(self.text)
            self.text = ""


_leaving: list[Leaving] = []  # at most one


def has_completed(num_steps: int) -> None:
    """Notes that a training loop is complete, after which processes wait longer for one another."""
    _completed.append(num_steps)


def will_end_with(code: int) -> None:
    """Notes the exit code of a SystemExit, since Python does not tell it at exit."""
    _codes.append(code)


_CODE: Any = vars(SystemExit)["code"]  # the field of Python's own


class NotedExit(SystemExit):
    """A SystemExit that notes its code when Python ends by it, which reads the code where no function runs any more."""

    @property
    def code(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The argument of ``sys.exit``."""
        code = _CODE.__get__(self)
        try:
            sys._getframe(1)
        except ValueError:  # nothing has caught it, and the functions of atexit are next
            will_end_with(code if isinstance(code, int) else int(code is not None))
        return code

    @code.setter
    def code(self, code: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _CODE.__set__(self, code)


def _exit(code: Any = None, /) -> NoReturn:
    raise NotedExit(code)


def note_exits() -> None:
    """Makes ``sys.exit`` note the code with which the program ends; the other processes of the run are told it."""
    sys.exit = _exit


def begin_loop() -> None:
    """Forgets the ends that were noted: where another training loop begins, the script has caught their errors."""
    _codes.clear()
    _leaving.clear()


def leaves_with(code: int, error: BaseException | None = None) -> None:
    """Notes that this process has left a training loop, and is about to end with a code that it must not lose.

    Args:
        code: The exit code.
        error: The error that ends it, which is not shown yet; None: a SystemExit.
    """
    text = "" if error is None else "".join(traceback.format_exception(error)).rstrip()
    _leaving[:] = [Leaving(code, None if error is None else id(error), text)]


def is_shown(error: BaseException) -> bool:
    """Returns whether the traceback of an error has been printed already, since the others could not wait for its end."""
    return any(each.error == id(error) and not each.text for each in _leaving)


def named(process: int) -> str:
    """Returns how messages name a process."""
    return f"process {process} of {coordination().num_processes}"


def news(key: str) -> Any:
    """Returns the value of a key of the coordination service; None if there is none, or no service."""
    try:
        return json.loads(coordination().client.key_value_try_get(key))
    except Exception:  # jaxlib's NOT_FOUND, or the service is gone
        return None


def who_goes_on() -> str | None:
    """Returns the other process that cannot go on without one that has left, if there is one."""
    told = news(GOES_ON)
    return (
        None
        if told is None or told["process"] == coordination().process_id
        else named(told["process"])
    )


def publish(key: str, value: Any) -> None:
    """Sets a key for all processes, unless another one was first."""
    with contextlib.suppress(Exception):
        coordination().client.key_value_set(key, json.dumps(value))


def withdraw(key: str, value: dict[str, Any]) -> None:
    """Deletes a key that this process has published, of which ``value`` is a part, if it is there."""
    told = news(key)
    if told is not None and value.items() <= told.items():
        with contextlib.suppress(Exception):
            coordination().client.key_value_delete(key)


def end_of_another() -> dict[str, Any] | None:
    """Returns what the process that ended first has told, if it is another one; it is waited for briefly."""
    deadline = time.monotonic() + SECONDS_TO_LEARN
    while (told := news(ENDED)) is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return told if told is not None and told["process"] != coordination().process_id else None


def follow(why: str) -> tuple[int, str]:
    """Returns the exit code of a process whose collective has failed, since another one is gone, and a message.

    The message is empty where another thread has said that.

    Args:
        why: The error of the collective, for the message where the other process has not told how it ended.
    """
    ended = end_of_another()
    code = code_without(ended)
    _follows.append(None if ended is None else ended["code"])
    if not _said.acquire(blocking=False):
        return code, ""
    told = why if ended is None else f"{describe_end(ended)}. {remedy_without(ended)}"
    return code, f"{ANOTHER_IS_GONE}: {told}"


def meet_at_end(code: int) -> bool:
    """Tells the others that this process ends, and returns whether all of them end too, in time.

    Args:
        code: Its exit code; with another one than 0 it waits briefly.
    """
    state = coordination()
    _flush()
    patience = SECONDS_TO_CONCLUDE if _completed else SECONDS_TO_FOLLOW
    seconds = SECONDS_TO_MEET if code else patience
    told = {"process": state.process_id, "code": code, "seconds": seconds}
    publish(f"{ENDED}/{state.process_id}", told)
    publish(ENDED, told)
    if who_goes_on() or _follows:  # all can no longer meet
        return False
    try:
        state.client.wait_at_barrier(BARRIER, round(1000 * seconds))
    except Exception:  # jaxlib raises its own exception types
        return False
    return True


def describe_end(told: dict[str, Any]) -> str:
    """Returns who has ended, and how."""
    how = f"with exit code {told['code']}" if told["code"] else "its program"
    return f"{named(told['process'])} has ended {how}"


def say_ended_early() -> None:
    """Says that this process ended while others run."""
    me, goer = named(coordination().process_id), who_goes_on()
    waits = (news(GOES_ON) or {}).get("waits")
    who = (
        "others still run" if goer is None else f"{goer} goes on" + (f" ({waits})" if waits else "")
    )
    tell(
        f"error: the processes of a run must end together; got the end of the program of {me} while {who}. {REMEDY}"
    )


def tell_that_this_goes_on(process: int) -> None:
    """Tells a process that ended early that this one cannot go on without it; it has time to name itself and end first.

    Args:
        process: The number of the one that ended.
    """
    wait = place.wait_of_main_thread()
    publish(GOES_ON, {"process": coordination().process_id, "waits": wait.rule if wait else ""})
    deadline = time.monotonic() + SECONDS_OF_GRACE
    while not has_gone(process) and time.monotonic() < deadline:
        time.sleep(min(LOOK_SECONDS, SECONDS_OF_GRACE))
    time.sleep(min(SECONDS_AFTER, SECONDS_OF_GRACE))


def has_gone(process: int) -> bool:
    """Returns whether another process is about to end, and has said all."""
    return news(f"{GONE}/{process}") is not None


def code_without(ended: Mapping[str, Any] | None) -> int:
    """Returns the exit code of a process that cannot go on without one that has ended.

    It is a code after which the run must not start again, if the other one ended with such: SLURM reports one code for all.
    """
    code = 0 if ended is None else ended["code"]
    return code if code in FINAL_CODES else int(ExitCode.PEER_LOST)


def remedy_without(ended: Mapping[str, Any] | None) -> str:
    """Returns what to do about a process that has ended."""
    return "Its own message says why." if ended is not None and ended["code"] else REMEDY


def go_on_without(
    told: str,
    process: int,
    end: Callable[[int], None] = os._exit,
    ended: Mapping[str, Any] | None = None,
) -> None:
    """Ends this process, which another one has left; first the other one is told, so that it can name itself.

    Args:
        told: What the other one did.
        process: The number of the other one.
        end: Ends the process.
        ended: Of one that has ended, or has left a loop, what it told.
    """
    tell_that_this_goes_on(process)
    end_without(told, end, ended)


def end_without(
    told: str, end: Callable[[int], None] = os._exit, ended: Mapping[str, Any] | None = None
) -> None:
    """Ends this process as ``go_on_without`` does, once the other one is told."""
    if _said.acquire(blocking=False):
        me = named(coordination().process_id)
        tell(
            f"{ANOTHER_IS_GONE}: {told}, and {me} cannot go on without it. {remedy_without(ended)}"
        )
    end_now(code_without(ended), end)


def end_now(code: int, end: Callable[[int], None] = os._exit) -> None:
    """Ends this process without waiting for anyone; process 0, whose service the others need, once they are gone.

    It waits for them some seconds, and for none that is gone without a word.
    """
    state = coordination()
    _flush()
    publish(f"{GONE}/{state.process_id}", code)
    if state.process_id == 0:
        others = range(1, state.num_processes or 1)
        without_word = int(None in _follows)
        deadline = time.monotonic() + SECONDS_TO_LINGER
        while sum(map(has_gone, others)) < len(others) - without_word:
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_SECONDS)
        time.sleep(SECONDS_AFTER)
    end(code)


def end_now_without_a_word(code: int, end: Callable[[int], None] = os._exit) -> None:
    """Ends this process as ``end_now`` does, where another one is gone without a word."""
    _follows.append(None)
    end_now(code, end)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a file on a full disk
            stream.flush()


class EndWatch:
    """A thread that says when another process has ended, and ends this one if it ended early.

    Args:
        end: Ends the process; replaces ``os._exit`` in tests.
        look: Called at each look for processes that have ended.
    """

    def __init__(
        self, end: Callable[[int], None] = os._exit, look: Callable[[], None] = lambda: None
    ) -> None:
        self._end, self._look = end, look
        self._code: int | None = None  # of this process, which is about to end
        self._last_since: float | None = None  # process 0 is about to end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxpar-ends", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * POLL_SECONDS)

    def leave(self, code: int) -> int:
        """Waits for the others, briefly with another code than 0; returns the exit code: 70 in place of 0 if they go on."""
        self._code = code
        together = meet_at_end(code)
        self.stop()
        if together or code:
            return code
        say_ended_early()
        return int(ExitCode.PEER_LOST)

    def _watch(self) -> None:
        since: float | None = None
        while not self._over.wait(POLL_SECONDS):
            self._look()
            if self._code is not None:
                self._end_if_missed(self._code)
            elif _leaving:
                self._end_in_time(_leaving[-1])
            elif (told := news(ENDED)) is not None:
                since = self._tell_once(told, since)
                self._follow_first(told)

    def _end_if_missed(self, code: int) -> None:
        """Ends this process if another one has found that it cannot go on without it."""
        if who_goes_on():
            if not code:
                say_ended_early()
            end_now(code or int(ExitCode.PEER_LOST), self._end)

    def _end_in_time(self, leaving: Leaving) -> None:
        """Shows the error that ends this process once others cannot go on without it, and ends it before JAX aborts it."""
        if who_goes_on():
            leaving.show()
        if self._is_aborted_soon():
            leaving.show()
            tell(
                f"{named(coordination().process_id)} ends with exit code {leaving.code} though the script is not at its "
                "end: process 0, without which JAX aborts it, ends"
            )
            end_now(leaving.code, self._end)

    def _is_aborted_soon(self) -> bool:
        """Returns whether process 0, without whose service JAX aborts this one, has been about to end for some time."""
        if coordination().process_id == 0 or not has_gone(0):
            return False
        now = time.monotonic()
        self._last_since = self._last_since or now
        return now - self._last_since > SECONDS_TO_MEET  # in which it ends by itself

    def _follow_first(self, told: dict[str, Any]) -> None:
        if self._is_aborted_soon():
            go_on_without(describe_end(told), told["process"], self._end, told)

    def _tell_once(self, told: dict[str, Any], since: float | None) -> float:
        now = time.monotonic()
        if since is not None and since <= now - SECONDS_TO_TELL:
            tell(
                f"{describe_end(told)} while this one runs: it waits up to {told['seconds']} s for this one to end "
                "too, which can do no step or collective without it"
            )
            return float("inf")
        return now if since is None else since


_watch: list[EndWatch] = []


def watch_ends(look: Callable[[], None] = lambda: None) -> None:
    """Starts to watch how processes end, once in a process; ``look`` is called at each look for them."""
    if not _watch:
        _watch.append(EndWatch(look=look))
        _watch[0].start()


def end_with(code: int) -> int:
    """Waits for the others as ``EndWatch.leave`` does, and returns the exit code of this process."""
    return (_watch[0] if _watch else EndWatch()).leave(code)


def end_of_program() -> None:
    """Ends this process at exit, before JAX's shutdown: together with the others, or at once and with an exit code."""
    state = coordination()
    if state.client is None or (state.num_processes or 1) == 1:
        return
    code = _codes[-1] if _codes else 0
    found = end_with(code)
    if found:
        end_now(found)
