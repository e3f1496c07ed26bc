"""SIGTERM and Ctrl-C as a wish: the run saves at the end of a step and stops. A second one ends it at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Takes SIGTERM and SIGINT from ``with`` to its end.

    Args:
        asked: Is called once, with the signal's name, in the middle of whatever runs: it may only note it.
    """

    def __init__(self, asked: Callable[[str], None]) -> None:
        self._asked = asked
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python lets no other take signals
            self._before = {number: signal.signal(number, self._first) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _first(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        name = signal.Signals(number).name
        os.write(2, f"{name}: saving at the end of a step, then stopping; once more ends at once\n".encode())
        self._asked(name)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before = {}
