"""Which other processes of a run are silent: stopped, frozen, or gone with their machine.

Each process says every second over the coordination service that it is there, from a thread of its own, so that one which is
stuck in a step or in Python's code is not silent. The service is in process 0: it is the silent one where the service is.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.runtime.coordination import client

SECONDS = 1.0
SILENT_SECONDS = 3 * SECONDS
KEYS = "jaxpar/pulse/"


class Pulse:
    """Says that this process is there, from ``with`` to its end, and hears the others while it is told to listen.

    Args:
        clock: Gives seconds; in place of ``time.monotonic``, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at = clock()
        self._heard: dict[int, tuple[str, float]] = {}  # process to what it said last, and when that was new
        self._listening_since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="jaxpar-pulse", daemon=True)

    def __enter__(self) -> "Pulse":
        if client() is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if client() is not None:
            self._thread.join(timeout=SECONDS)  # where process 0 is gone it waits for that one

    def listen(self, on: bool) -> None:
        """Begins to hear the others, or ceases to: each that listens hears all, which is too much to do all the time."""
        if on and self._listening_since is None:
            self._heard.clear()
            self._listening_since = self._clock()
        elif not on:
            self._listening_since = None

    def silent(self) -> dict[int, float]:
        """Returns the processes that said nothing for a while, each with the seconds; the longest silent comes first."""
        now, since = self._clock(), self._listening_since
        if client() is None or since is None:
            return {}
        if now - self._said_at > SILENT_SECONDS and jax.process_index() != 0:
            return {0: now - self._said_at}
        others = [process for process in range(jax.process_count()) if process != jax.process_index()]
        seconds = {process: now - self._heard.get(process, ("", since))[1] for process in others}
        return {
            each: seconds[each] for each in sorted(others, key=lambda p: -seconds[p]) if seconds[each] > SILENT_SECONDS
        }

    def _beat(self) -> None:
        number = 0
        while not self._over.wait(SECONDS):
            number += 1
            with contextlib.suppress(Exception):  # the service is gone: so is process 0
                self._say_and_hear(client(), str(number))

    def _say_and_hear(self, service: Any, text: str) -> None:
        service.key_value_set(f"{KEYS}{jax.process_index()}", text, allow_overwrite=True)
        self._said_at = self._clock()
        if self._listening_since is None:
            return
        for key, said in service.key_value_dir_get(KEYS):
            process = int(key.rsplit("/", 1)[1])
            if self._heard.get(process, ("", 0.0))[0] != said:
                self._heard[process] = said, self._clock()
