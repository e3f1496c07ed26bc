"""Exchanges small values between the processes of a run, over JAX's coordination service and never over devices.

Therefore it works from any thread, while steps are in flight, and when devices are stuck. With one process it returns
immediately. The service has no authentication: see SECURITY.md.
"""

import contextlib
import json
import threading
from collections import Counter
from typing import Any

import jax

from jaxpar import _compat

TIMEOUT_SECONDS = 600.0
POLL_SECONDS = 0.2  # between two looks for requests
_uses: Counter[str] = Counter()  # all processes use a name equally often, so its count identifies each use
_lock = threading.Lock()


def client() -> Any:
    """Returns the client of the coordination service; None if there is only one process."""
    return _compat.coordination().client if jax.process_count() > 1 else None


def exchange(name: str, value: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """Returns the values of all processes, in the order of the processes; every process must call it with the same name.

    Args:
        name: The name of the exchange. All processes must make calls with one name in the same order; calls with different
            names may be made from different threads.
        value: Plain JSON.
        timeout_seconds: How long to wait for the other processes.

    Raises:
        PeerLostError: A process did not answer in time.
    """
    service = client()
    if service is None:
        return [value]
    with _lock:
        use, _uses[name] = _uses[name], _uses[name] + 1
    mine = f"jaxpar/{name}/{{}}/{jax.process_index()}"
    service.key_value_set(mine.format(use), json.dumps(value))
    values = [
        json.loads(_get(service, f"jaxpar/{name}/{use}/{process}", timeout_seconds))
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


def _get(service: Any, key: str, timeout_seconds: float) -> str:
    try:
        return service.blocking_key_value_get(key, round(timeout_seconds * 1000))
    except Exception as error:  # jaxlib raises its own exception types, which differ between versions
        raise PeerLostError(
            f"process {key.rsplit('/', 1)[1]} must answer within {timeout_seconds:g} s; got nothing for {key}: {error}"
        ) from error


def check_agreement(what: str, values: dict[str, Any]) -> None:
    """Raises ValueError unless all processes pass the same values; every process must call it.

    Args:
        what: The action that they are about to take, for the message.
        values: Plain JSON by name, such as a hash.

    Raises:
        ValueError: The values differ; the message names the values and processes.
    """
    answers = exchange(f"check/{what}", values)
    for name in values:
        given = [other.get(name) for other in answers]
        if odd := [process for process, value in enumerate(given) if value != given[0]]:
            raise ValueError(
                f"all processes must agree on their {name} before they {what}; got {given[odd[0]]!r} on process "
                f"{', '.join(map(str, odd))}, {given[0]!r} on process 0. Start all with the same code, flags and data."
            )


class AgreedStep:
    """Lets any process request an action of all of them, and determines the step after which all perform it.

    A thread polls for requests, so that no step waits for one. After a request each process reports how many steps it has done
    and blocks its loop until all have reported. The action is due after the step that follows the largest of these numbers,
    which no process has finished yet.
    """

    def __init__(self) -> None:
        self._asked: list[str] = []
        self._steps_done = 0
        self._agreeing = False
        self._due: tuple[int, str] | None = None
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxpar-agreed-step", daemon=True)

    def __enter__(self) -> "AgreedStep":
        if client() is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if client() is None:
            return
        if kind is None or issubclass(kind, SystemExit):
            exchange("end", True)  # another process may still wait for this one's thread
        self._over.set()
        self._thread.join(timeout=10 * POLL_SECONDS)  # the thread may be waiting for a process that is gone

    def ask(self, what: str) -> None:
        """Requests the action ``what`` of all processes. It only records the request, so a signal handler may call it."""
        self._asked.append(what)

    def after(self, step: int) -> str | None:
        """Returns the action that is due after ``step`` steps, else None; every process must call it after every step."""
        if client() is None:
            return self._asked.pop(0) if self._asked else None
        with self._changed:
            self._steps_done = step
            while self._agreeing:
                self._changed.wait()
            if self._due is None or step < self._due[0]:
                return None
            what, self._due = self._due[1], None
            self._changed.notify_all()
            return what

    def _watch(self) -> None:
        number = 0
        while not self._over.wait(POLL_SECONDS):
            what = self._news(f"jaxpar/ask/{number}")
            if what is None:
                continue
            self._agree(what)
            number += 1
            with self._changed:
                while self._due is not None and not self._over.is_set():
                    self._changed.wait(POLL_SECONDS)

    def _news(self, key: str) -> str | None:
        if self._asked:
            with contextlib.suppress(Exception):  # another process was first: its request is handled now, ours after it
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
