"""What the processes of a run tell one another beside their programs: over JAX's coordination service, never over devices.

So it works from any thread, while steps are in flight, and when devices are stuck. With one process all of it is immediate.
The service has no authentication: see SECURITY.md.
"""

import contextlib
import json
import threading
from collections import Counter
from typing import Any

import jax

from jaxpar import _compat

TIMEOUT_SECONDS = 600.0
_uses: Counter[str] = Counter()  # all processes use a name equally often, so that its count tells its uses apart
_lock = threading.Lock()


def client() -> Any:
    """Returns the client of the coordination service; None where there is one process."""
    return _compat.coordination().client if jax.process_count() > 1 else None


def exchange(name: str, value: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """Returns the values that all processes gave, in the order of the processes; each must call it, by the same name.

    Args:
        name: Of what is told. Calls by one name must come in one order; those by others may come from other threads.
        value: Plain JSON.
        timeout_seconds: How long to wait for the others.

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
    if use:  # all are in this use, so none still reads the one before
        service.key_value_delete(mine.format(use - 1))
    return values


class PeerLostError(RuntimeError):
    """Another process of the run did not answer, or does not agree."""


def _get(service: Any, key: str, timeout_seconds: float) -> str:
    try:
        return service.blocking_key_value_get(key, round(timeout_seconds * 1000))
    except Exception as error:  # jaxlib raises kinds of its own, which differ between its versions
        raise PeerLostError(
            f"process {key.rsplit('/', 1)[1]} must answer within {timeout_seconds:g} s; got nothing for {key}: {error}"
        ) from error


def check_agreement(what: str, values: dict[str, Any]) -> None:
    """Raises unless all processes give the same values; each must call it.

    Args:
        what: What they are about to do, for the message.
        values: Name to plain JSON, such as a hash.

    Raises:
        ValueError: They differ; the message names which values and processes.
    """
    told = exchange(f"check/{what}", values)
    for name in values:
        given = [other.get(name) for other in told]
        if odd := [process for process, value in enumerate(given) if value != given[0]]:
            raise ValueError(
                f"all processes must agree on their {name} before they {what}; got {given[odd[0]]!r} on process "
                f"{', '.join(map(str, odd))}, {given[0]!r} on process 0. Start all with the same code, flags and data."
            )


class AgreedStep:
    """Lets any process ask all of them to do something, and finds the step after which all do it.

    A thread looks for what was asked every ``poll_seconds``, so that no step waits for it. Once something was asked, each
    process tells how many steps it has done and holds its loop until all have told; the step after the largest of these is
    one that every process is still to reach.

    Args:
        poll_seconds: How often the thread looks.
    """

    def __init__(self, *, poll_seconds: float = 0.2) -> None:
        self._poll_seconds = poll_seconds
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
            exchange("end", True)  # another may still wait for this process's thread
        self._over.set()
        self._thread.join(timeout=10 * self._poll_seconds)  # where a process is gone it may wait for that one

    def ask(self, what: str) -> None:
        """Asks all processes to do ``what``. Only notes it, so that a signal's handler may call it."""
        self._asked.append(what)

    def after(self, step: int) -> str | None:
        """Returns what all processes have agreed to do now, after ``step`` steps; each must call it after every step."""
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
        while not self._over.wait(self._poll_seconds):
            what = self._news(f"jaxpar/ask/{number}")
            if what is None:
                continue
            self._agree(what)
            number += 1
            with self._changed:
                while self._due is not None and not self._over.is_set():
                    self._changed.wait(self._poll_seconds)

    def _news(self, key: str) -> str | None:
        service = client()
        if self._asked:
            with contextlib.suppress(Exception):  # another process was first: what it asks comes now, ours after it
                service.key_value_set(key, self._asked[0])
        try:
            return service.key_value_try_get(key)
        except Exception:  # jaxlib's NOT_FOUND
            return None

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
