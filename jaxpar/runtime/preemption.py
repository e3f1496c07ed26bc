"""Handles SIGTERM and Ctrl-C as a request: the run saves at the end of a step and stops. A second signal ends it at once.

Python calls a signal handler only when its main thread runs Python code, and that may be inside XLA for minutes while a step
compiles. Therefore a thread receives signals too, over the pipe to which Python writes their numbers as they arrive.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVES = "saving at the end of a step, then stopping"
ENDS = "the last step is done, the run is about to end"
FAILS = "the run is about to end by an error"


class StopSignals:
    """Handles SIGTERM and SIGINT within a ``with`` block. Nested in another's block, it also gets a signal received before.

    Args:
        asked: Called once with the signal's name, at any point of the main thread or in another thread: it must only record it.
    """

    def __init__(self, asked: Callable[[str], None] = lambda name: None) -> None:
        self._asked, self._name, self._text = asked, "", SAVES
        self._lock = threading.RLock()  # a handler may interrupt a handler
        self._inner: StopSignals | None = None
        self._outer: StopSignals | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "StopSignals":
        outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(outer, StopSignals):
            self._outer = outer
            outer._take_in(self)
        elif (
            threading.current_thread() is threading.main_thread()
        ):  # no other thread can set signal handlers
            self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._outer is not None:
            self._outer._inner, self._outer._text = None, FAILS if kind else ENDS
        elif self._thread is not None:
            self._give_back(self._thread)

    def _take(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._pipe_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._thread = threading.Thread(
            target=self._listen, name="jaxpar-stop-signals", daemon=True
        )
        self._thread.start()

    def _give_back(self, thread: threading.Thread) -> None:
        for number, handler in self._before.items():
            signal.signal(
                number, handler or signal.SIG_DFL
            )  # None: the handler was not set from Python
        signal.set_wakeup_fd(self._pipe_before)
        os.write(self._writer, bytes([0]))
        thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _take_in(self, inner: "StopSignals") -> None:
        with self._lock:
            self._inner = inner
            if self._name:
                inner._asked(self._name)

    def _listen(self) -> None:
        while number := os.read(self._reader, 1)[0]:
            if number in SIGNALS:  # Python writes the number of every signal that it handles
                self._note(number)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        with self._lock:
            if self._name:
                return
            self._name = signal.Signals(number).name
            for each in SIGNALS:
                _leave_to_the_system(each)
            below = (
                "\n" if self._name == "SIGINT" and os.isatty(2) else ""
            )  # a terminal has shown ^C on the line
            os.write(
                2, f"{below}{self._name}: {self._text}; a second signal ends it at once\n".encode()
            )
            (self._inner or self)._asked(self._name)


def _leave_to_the_system(number: int) -> None:
    """Restores a signal's default action, which ends the process at once; ``signal.signal`` works only in the main thread."""
    ctypes.pythonapi.PyOS_setsig(ctypes.c_int(number), ctypes.c_void_p(0))
