"""Which processes of a run are silent, by the heartbeats that the coordination service holds."""

import jax
import pytest

from jaxpar.runtime import watchdog
from jaxpar.runtime.watchdog import HEARTBEATS, Heartbeat
from tests.support.real_runs import run


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


def frozen(service, monkeypatch, me=0):
    """The heartbeats of a process that has heard all of three in its loop, and its clock."""
    monkeypatch.setattr(jax, "process_index", lambda: me)
    now = [0.0]
    mine = Heartbeat(lambda: now[0])
    mine.listen(me == 0)
    mine._loop = ""  # the texts here have no numbers of loops
    beat(service, now, 2, (0, 1, 2), mine)
    return mine, now


def test_one_that_was_heard_in_this_loop_and_is_silent_for_long_is_lost(service, monkeypatch):
    mine, now = frozen(service, monkeypatch)
    beat(service, now, 31, (0, 2), mine)
    assert mine.lost(32) == {}
    beat(service, now, 1, (0, 2), mine)
    assert mine.lost(32) == {1: 32.0}


def test_one_that_has_left_the_loop_or_was_never_in_it_is_not_lost(service, monkeypatch):
    mine, now = frozen(service, monkeypatch)
    service.said[f"{HEARTBEATS}1"] = watchdog.OVER
    mine._loop = "1/"
    del service.said[f"{HEARTBEATS}2"]
    mine.listen(False)
    mine.listen(True)
    beat(service, now, 100, (0,), mine)
    assert mine.silent().keys() == {1, 2}
    assert mine.lost(32) == {}


def test_process_0_is_lost_where_its_service_does_not_answer(service, monkeypatch):
    mine, now = frozen(service, monkeypatch, me=2)
    now[0] += 32
    assert mine.lost(32) == {0: 32.0}


def test_the_others_are_told_by_process_0_of_one_that_is_lost(service, monkeypatch):
    monkeypatch.setattr(watchdog, "_limits", [30])
    monkeypatch.setattr(watchdog.endings, "news", lambda key: {"1": 32.0})
    mine, _ = frozen(service, monkeypatch, me=2)
    assert mine.lost(32) == {1: 32.0}
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert mine.lost(32) == {}, "itself"


def test_alone_nobody_is_silent():
    with Heartbeat() as mine:
        mine.listen(True)
        assert mine.silent() == {}


FROZEN = """
import os, signal, sys, time
import jaxpar
jaxpar.initialize(heartbeat_seconds=3)
import jax
from jaxpar.guard import Guard

with Guard(num_steps=10**6) as guard:
    for step in range(10**6):
        time.sleep(0.05)
        if step == 60 and jax.process_index() == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGSTOP)
        guard.after_step(step + 1, None, {})
"""


@pytest.mark.full
@pytest.mark.parametrize("frozen", [1, 0])
def test_of_two_real_processes_a_frozen_one_is_named_by_the_other_one(tmp_path, frozen):
    script = tmp_path / "script.py"
    script.write_text(FROZEN)
    code, out, err = run("-m", "jaxpar", "launch", "-n", 2, "--log-dir", tmp_path, script, frozen)
    assert code == 124, out + err
    told = (
        "a process must not be silent for 3 s (heartbeat_seconds of jaxpar.initialize); got "
        f"process {frozen} of 2, silent for 5 s or more: stopped, or its machine is gone. Process {1 - frozen} waits"
    )
    assert told in out + err, out + err
    assert f"and process {frozen} did not end by itself" in err, err
