"""The rendezvous of a run for tests: threads stand for processes, and the time-out comes once a condition holds."""

import threading
import time
from types import SimpleNamespace

from jaxpar.runtime import rendezvous
from jaxpar.runtime.rendezvous import Connections, meet
from tests.support.waiting import NEVER, WAIT_SECONDS


def call(*envs, seconds=NEVER):
    """Returns what the call gave each place, an address or an exception; None if it did not end."""
    given = [None] * len(envs)

    def one(position, place):
        try:
            given[position] = meet(place, seconds)
        except Exception as error:
            given[position] = error

    threads = [threading.Thread(target=one, args=item, daemon=True) for item in enumerate(envs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=WAIT_SECONDS)
    return given


def late_once(monkeypatch, holds):
    """Makes process 0's time-out pass as soon as ``holds`` of its connections, and no earlier."""
    receive, mine = Connections.receive, threading.local()

    def received(connections):
        receive(connections)
        mine.late = holds(connections)

    clock = lambda: time.monotonic() + (2 * NEVER if getattr(mine, "late", False) else 0.0)
    monkeypatch.setattr(Connections, "receive", received)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
