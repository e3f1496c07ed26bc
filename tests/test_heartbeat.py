"""Which processes of a run are silent, by the heartbeats that the coordination service holds."""

import jax
import pytest

from jaxpar.runtime import watchdog
from jaxpar.runtime.watchdog import HEARTBEATS, Heartbeat


class Service:
    """The coordination service, as far as a heartbeat uses it."""

    def __init__(self):
        self.said = {}

    def key_value_set(self, key, text, *, allow_overwrite):
        self.said[key] = text

    def key_value_dir_get(self, folder):
        return [(key, text) for key, text in self.said.items() if key.startswith(folder)]


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setattr(watchdog, "client", lambda: service)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    return service


def beat(service, now, seconds, speaking, mine=None):
    """Lets so many seconds pass, in each of which some processes speak; ``mine`` is the one that listens."""
    for _ in range(seconds):
        now[0] += 1.0
        for process in speaking:
            service.said[f"{HEARTBEATS}{process}"] = str(now[0])
        if mine is not None:
            mine._say_and_hear(service, str(now[0]))


def test_a_process_that_stops_speaking_is_silent_and_the_longest_is_first(service):
    now = [0.0]
    mine = Heartbeat(lambda: now[0])
    mine.listen(True)
    beat(service, now, 3, (1, 2), mine)
    assert mine.silent() == {}
    beat(service, now, 2, (2,), mine)
    beat(service, now, 4, (), mine)
    assert mine.silent() == {1: 6.0, 2: 4.0}


def test_one_that_never_spoke_is_silent_since_it_was_listened_for(service):
    now = [100.0]
    mine = Heartbeat(lambda: now[0])
    assert mine.silent() == {}, "nobody listens"
    mine.listen(True)
    beat(service, now, 5, (2,), mine)
    assert mine.silent() == {1: 5.0}
    mine.listen(False)
    assert mine.silent() == {}


def test_where_the_service_does_not_answer_process_0_is_the_silent_one(service, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    now = [0.0]
    mine = Heartbeat(lambda: now[0])
    mine.listen(True)
    beat(service, now, 2, (0, 1), mine)
    beat(service, now, 5, (0, 1))
    assert mine.silent() == {0: 5.0}


def test_alone_nobody_is_silent():
    with Heartbeat() as mine:
        mine.listen(True)
        assert mine.silent() == {}
