"""JAX's coordination service in this process, for tests of one process among others that are not there."""

import json
import threading
import time
from types import SimpleNamespace

import jax

from jaxpar.runtime import coordination, endings


class Service:
    """Keys and values; ``values`` has those that other processes have set, and those of the one under test as they come."""

    def __init__(self, values, everyone_ends):
        self.values = {key: json.dumps(value) for key, value in values.items()}
        self._everyone_ends = everyone_ends

    def key_value_set(self, key, text, allow_overwrite=False):
        assert allow_overwrite or key not in self.values, "it is set"
        self.values[key] = text

    def key_value_try_get(self, key):
        return self.values[key]

    def key_value_delete(self, key):
        del self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        for _ in range(milliseconds // 5):
            if key not in self.values:
                time.sleep(0.005)
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def wait_at_barrier(self, name, milliseconds):
        if not self._everyone_ends:
            time.sleep(min(milliseconds / 1000, 0.2))
            raise RuntimeError("DEADLINE_EXCEEDED")


def stand_in(monkeypatch, values=(), *, process=0, count=2, everyone_ends=False):
    """Makes this process one of several, without waits; returns the service."""
    service = Service(dict(values), everyone_ends)
    state = SimpleNamespace(client=service, process_id=process, num_processes=count)
    monkeypatch.setattr(endings, "coordination", lambda: state)
    monkeypatch.setattr(coordination, "client", lambda: service)
    monkeypatch.setattr(coordination, "_uses", type(coordination._uses)())
    for name in ("_completed", "_codes", "_follows", "_leaving"):
        monkeypatch.setattr(endings, name, [])
    monkeypatch.setattr(endings, "_said", threading.Lock())
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    for name, seconds in (
        ("SECONDS_OF_GRACE", 0),
        ("SECONDS_TO_LEARN", 0.02),
        ("SECONDS_TO_LINGER", 0.02),
        ("POLL_SECONDS", 0.01),
        ("SECONDS_TO_TELL", 0.02),
    ):
        monkeypatch.setattr(endings, name, seconds)
    for name, seconds in (
        ("POLL_SECONDS", 0.01),
        ("SECONDS_TO_ASK", 0.01),
        ("SECONDS_TO_LEAVE", 0.05),
    ):
        monkeypatch.setattr(coordination, name, seconds)
    return service
