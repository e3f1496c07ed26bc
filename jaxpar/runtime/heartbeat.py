"""Finds the other processes of a run that are silent: stopped, frozen, or lost with their machine.

Each process sends a heartbeat every second over the coordination service, from its own thread, so that a process which is stuck
in a step or in Python code is not silent. The service runs in process 0, so if the service is silent, process 0 is.
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
KEYS = "jaxpar/heartbeat/"


class Heartbeat:
    """Sends heartbeats of this process within a ``with`` block, and reads those of the others while it listens.

    Args:
        clock: Returns seconds; replaces ``time.monotonic`` in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at = clock()
        self._heard: dict[int, tuple[str, float]] = {}  # by process: its latest heartbeat, and when that was first read
        self._listening_since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="jaxpar-heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        if client() is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if client() is not None:
            self._thread.join(timeout=SECONDS)  # if process 0 is gone the thread is waiting for it

    def listen(self, on: bool) -> None:
        """Starts or stops reading the others' heartbeats: a listener reads all of them, which is too expensive to do always."""
        if on and self._listening_since is None:
            self._heard.clear()
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
        others = [process for process in range(jax.process_count()) if process != jax.process_index()]
        seconds = {process: now - self._heard.get(process, ("", since))[1] for process in others}
        return {
            each: seconds[each] for each in sorted(others, key=lambda p: -seconds[p]) if seconds[each] > SILENT_SECONDS
        }

    def _beat(self) -> None:
        number = 0
        while not self._over.wait(SECONDS):
            number += 1
            with contextlib.suppress(Exception):  # the service is gone, and so is process 0
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
