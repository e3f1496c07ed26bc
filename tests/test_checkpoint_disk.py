"""A disk that fails during a save: the save is given up and reported, training goes on, the next save begins anew."""

import errno
import os
import shutil
import sys
import threading
from types import SimpleNamespace

import pytest

import jaxpar
from jaxpar.checkpoint import orbax_tree
from jaxpar.checkpoint.orbax_tree import GivenUpError, Operation
from jaxpar.runtime import coordination
from tests.support.broken_disk import failing
from tests.support.failed_saves import GIVES_WRITES_UP, writes_given_up  # noqa: F401 (a fixture)
from tests.support.oracle import assert_same_bits
from tests.support.tiers import quick
from tests.support.tiny_state import at_step, make_state
from tests.support.waiting import NEVER, wait_until

pytestmark = GIVES_WRITES_UP


@pytest.fixture
def said():
    return []


@pytest.fixture
def manager(tmp_path, said):
    return jaxpar.CheckpointManager(tmp_path / "checkpoints", jaxpar.make_mesh(), say=said.append)


PLACES = {
    "the root": "/checkpoints",
    "the folder of the save": "saving-",
    "the arrays' folder": "tmp/state",
    "what says where shards lie": "array_metadatas",
    "what says what tree it is": "state/_METADATA",
    "what says what Orbax wrote": "_CHECKPOINT_METADATA",
    "the manifest": "manifest.json",
}


@pytest.mark.parametrize(
    ("place", "name"),
    quick([*((place, "ENOSPC") for place in PLACES), ("the root", "EROFS")], 0, 2),
)
def test_a_save_that_fails_anywhere_is_told_and_the_next_begins_anew(manager, said, place, name):
    state = make_state(manager.mesh)
    manager.save(at_step(state, 1))
    threads = set(threading.enumerate())
    with failing(PLACES[place], name):
        for step in (2, 3):
            manager.save_async(at_step(state, step))
        manager.wait()
    # A thread may have written on for a moment, which the next save discards.
    failed = [line for line in said if not line.startswith("discarded saving-")]
    assert [line.split(": ")[:2] for line in failed] == [
        ["NOT SAVED", f"checkpoint of step {n}"] for n in (2, 3)
    ], said
    assert all(os.strerror(getattr(errno, name)) in line for line in failed), said
    assert manager.is_behind
    assert manager.steps() == (1,)
    left = lambda: [
        thread for thread in threading.enumerate() if thread not in threads and thread.is_alive()
    ]
    wait_until(lambda: not left(), lambda: f"threads wait for a save that failed: {left()}")
    manager.save(at_step(state, 4))
    assert not manager.is_behind
    assert sorted(os.listdir(manager.directory)) == ["1", "4"], (
        "nothing of the failed saves is left"
    )
    assert_same_bits(manager.restore(state), at_step(state, 4))


def test_a_leftover_that_cannot_be_removed_fails_the_save_of_its_step_alone(manager, said):
    state = make_state(manager.mesh)
    (manager.directory / "saving-7").mkdir(parents=True)
    with failing("saving-7", "EROFS"):
        manager.save_async(at_step(state, 7))
        manager.save(at_step(state, 8))
    assert manager.steps() == (8,)
    assert [line[:34] for line in said] == ["NOT SAVED: checkpoint of step 7: ["], said


def test_a_folder_that_became_a_file_stops_no_training(manager, said):
    state = make_state(manager.mesh)
    manager.save(state)
    shutil.rmtree(manager.directory)
    manager.directory.write_text("?")
    manager.save_async(at_step(state, 1))
    manager.wait()
    assert manager.failures[0].startswith("step 1: ")
    with pytest.raises(OSError, match="step 2: "):
        manager.save(at_step(state, 2))
    manager.directory.unlink()
    manager.save(at_step(state, 3))
    assert manager.steps() == (3,)


@pytest.fixture
def hanging(monkeypatch):
    """Makes Orbax's saves end only once the test does."""
    over, write = threading.Event(), orbax_tree.ocp.save_async

    class Hanging:
        def __init__(self, response):
            self.response = response

        def result(self, timeout):
            if not over.wait(timeout):
                raise TimeoutError
            self.response.result()

    monkeypatch.setattr(orbax_tree.ocp, "save_async", lambda *args: Hanging(write(*args)))
    yield
    over.set()


def test_a_save_that_hangs_is_given_up_after_its_seconds(tmp_path, said, hanging):
    manager = jaxpar.CheckpointManager(
        tmp_path, jaxpar.make_mesh(), save_seconds=0.5, say=said.append
    )
    manager.save_async(make_state(manager.mesh))
    manager.wait()
    assert "NOT SAVED: checkpoint of step 0: TimeoutError: it took longer than 0.5 s" in said[0]
    assert manager.steps() == ()


class FakeService:
    """The part of the coordination service that an operation uses."""

    def __init__(self):
        self.keys = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        self.keys[key] = value

    def key_value_try_get(self, key):
        return self.keys.get(key)


class Response:
    """A save of Orbax, which ends by one of ``endings`` at each wait, or with None never; waits take time of its own."""

    def __init__(self, *endings):
        self.endings, self.seconds = list(endings), 0.0

    def result(self, timeout):
        ending = self.endings.pop(0) if self.endings else None
        if ending is None:
            self.seconds += timeout
            raise TimeoutError
        if isinstance(ending, Exception):
            raise ending
        return ending


@pytest.fixture
def service(monkeypatch):
    service = FakeService()
    monkeypatch.setattr(coordination, "client", lambda: service)
    return service


def wait_for(response, monkeypatch, *, seconds=60, given_up=False):
    monkeypatch.setattr(orbax_tree, "time", SimpleNamespace(monotonic=lambda: response.seconds))
    with Operation(seconds) as operation:
        if given_up:  # by another process, which has the same key
            coordination.client().key_value_set(operation._key, "yes")
        return operation.result(response)


def test_writes_that_never_end_are_left_once_another_process_has_given_the_save_up(
    service, monkeypatch
):
    response = Response()
    with pytest.raises(GivenUpError, match="another process failed"):
        wait_for(response, monkeypatch, seconds=NEVER, given_up=True)
    assert response.seconds == orbax_tree.SECONDS_TO_END


def test_the_own_error_of_a_save_that_was_given_up_is_waited_for(service, monkeypatch):
    with pytest.raises(OSError, match="no space"):
        wait_for(Response(None, None, OSError("no space")), monkeypatch, given_up=True)


def test_a_save_that_takes_several_slices_ends(service, monkeypatch):
    assert wait_for(Response(None, None, "done"), monkeypatch) == "done"
    assert not service.keys, "nothing was given up"


def test_a_save_that_never_ends_is_given_up_after_its_seconds_and_says_so(service, monkeypatch):
    with pytest.raises(TimeoutError, match=r"it took longer than 20 s"):
        wait_for(Response(), monkeypatch, seconds=20)
    assert list(service.keys.values()) == ["yes"], "the other processes hear of it"


def test_a_timeout_inside_a_save_is_its_own_error(service, monkeypatch):
    with pytest.raises(TimeoutError, match="of a store"):
        wait_for(Response(TimeoutError("of a store")), monkeypatch)


def test_each_operation_has_a_key_of_its_own():
    assert Operation(1)._key != Operation(1)._key


@pytest.mark.full
def test_a_write_that_ends_after_its_loop_was_closed_prints_nothing(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: shown.append(str(raised.exc_value)))
    orbax_tree._accept_closed_loops.cache_clear()
    orbax_tree._accept_closed_loops()
    for text in ("Event loop is closed", "another error"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert shown == ["another error"]
    orbax_tree._accept_closed_loops.cache_clear()
