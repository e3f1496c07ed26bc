"""One run per folder: who gets the lease, who is refused, who has lost it. Files simulate other machines."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.runtime import lease as leases
from jaxpar.runtime.lease import (
    HeldError,
    Lease,
    LostError,
    released_at_end,
    start_of,
    this_process,
)
from tests.support.leases import ELSEWHERE, numbers, put
from tests.support.waiting import NEVER, WAIT_SECONDS, wait_until

QUICK = {"beat_seconds": 0.05, "stale_seconds": 0.5, "patience_seconds": 0.1}
HERE = replace(this_process(), token="another")


def owner_of(folder):
    return json.loads((folder / ".lease" / f"{numbers(folder)[-1]}.json").read_text())


@pytest.fixture(autouse=True)
def _none_stays():
    with released_at_end():
        yield


@pytest.fixture
def quick(monkeypatch):
    """Makes leases with short times, and others that a test gives; messages go to ``tell``."""

    def make(folder, tell=lambda text: None, follows=True, **times):
        for name, seconds in (QUICK | times).items():
            monkeypatch.setattr(leases, name.upper(), seconds)
        monkeypatch.setattr(leases, "tell", tell)
        return Lease(folder, follows=follows)

    return make


@pytest.fixture
def clock(monkeypatch):
    """The seconds of a lease's clock, which pass while it sleeps, and only then."""
    now = [0.0]
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)
    monkeypatch.setattr(
        leases,
        "time",
        SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0], "sleep": sleep}),
    )
    return now


def a_process():
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({NEVER})"])


def test_the_lease_names_its_owner_and_beats_until_it_is_released(tmp_path, quick):
    (tmp_path / "config.json").touch()
    lease = quick(tmp_path)
    lease.take()
    first = owner_of(tmp_path)
    assert (first["pid"], first["host"]) == (os.getpid(), os.uname().nodename)
    wait_until(lambda: owner_of(tmp_path)["beats"] > 2)
    lease.check()
    lease.release()
    assert owner_of(tmp_path)["released"]
    beats = owner_of(tmp_path)["beats"]
    time.sleep(0.2)
    assert owner_of(tmp_path)["beats"] == beats


def test_a_process_that_is_alive_keeps_the_folder_and_is_named(tmp_path, quick):
    other = a_process()
    try:
        owner = replace(HERE, pid=other.pid, start=start_of(other.pid))
        put(tmp_path, owner)
        told = []
        with pytest.raises(
            HeldError, match=f"held by process {other.pid} on .* since .*another folder"
        ) as refused:
            quick(tmp_path, tell=told.append).take()
        assert str(tmp_path) in str(refused.value)
        assert len(told) == 1, "it says once what it waits for"
        assert numbers(tmp_path) == [3], "nothing was written"
    finally:
        other.kill()
        other.wait()


def test_a_killed_process_of_this_machine_holds_nothing_even_before_it_is_reaped(tmp_path, quick):
    other = a_process()
    put(tmp_path, replace(HERE, pid=other.pid, start=start_of(other.pid)))
    other.kill()
    try:
        quick(tmp_path, stale_seconds=1e9, patience_seconds=1e9).take()
        assert numbers(tmp_path) == [4]
    finally:
        other.wait()


@pytest.mark.parametrize("follows", [True, False])
def test_a_run_that_deletes_does_not_follow_one_that_ends_while_it_waits(tmp_path, quick, follows):
    other = a_process()
    put(tmp_path, replace(HERE, pid=other.pid, start=start_of(other.pid)))
    try:
        lease = quick(tmp_path, tell=lambda _: other.kill(), patience_seconds=1e9, follows=follows)
        if follows:
            lease.take()
            return
        with pytest.raises(HeldError, match=f"ended while this one waited: process {other.pid} on"):
            lease.take()
        assert numbers(tmp_path) == [3], "nothing was written"
        quick(tmp_path, follows=False).take()
    finally:
        other.wait()


def test_another_process_with_the_old_number_is_not_the_owner(tmp_path, quick):
    put(tmp_path, replace(HERE, pid=os.getppid(), start="1"))
    quick(tmp_path, stale_seconds=1e9, patience_seconds=1e9).take()
    assert numbers(tmp_path) == [4]


def test_a_lease_of_another_machine_is_taken_once_its_beats_stand_still(
    tmp_path, monkeypatch, clock, quick
):
    put(tmp_path, ELSEWHERE)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that jumped back by decades
    quick(tmp_path).take()
    assert clock[0] >= QUICK["stale_seconds"]
    assert numbers(tmp_path) == [4]


def test_both_folders_of_a_process_of_another_machine_are_waited_for_once(tmp_path, clock, quick):
    """A run holds its own folder and that of its model."""
    for folder in ("a", "tuned"):
        put(tmp_path / folder, ELSEWHERE)
    put(tmp_path / "other", replace(ELSEWHERE, token="a third"))
    quick(tmp_path / "a").take()
    waited = clock[0]
    quick(tmp_path / "tuned").take()
    assert clock[0] == waited, "its owner is known to be silent"
    quick(tmp_path / "other").take()
    assert clock[0] >= waited + QUICK["stale_seconds"], "another owner is not"


def test_a_lease_of_another_machine_that_beats_is_kept(tmp_path, quick):
    put(tmp_path, ELSEWHERE)  # before the thread starts, which may be after take() has looked
    over = threading.Event()

    def beat():
        for beats in range(10**6):
            put(tmp_path, replace(ELSEWHERE, beats=beats))
            if over.wait(0.05):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(HeldError, match="on 'node3'"):
            quick(tmp_path, stale_seconds=NEVER).take()
    finally:
        over.set()
        thread.join()
    assert numbers(tmp_path) == [3]


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 512, b"[" * 5000, b'{"host": 1}', b"null"])
def test_a_lease_that_cannot_be_read_counts_until_it_is_stale(tmp_path, clock, content, quick):
    put(tmp_path, ELSEWHERE).write_bytes(content)
    quick(tmp_path).take()
    assert clock[0] >= QUICK["stale_seconds"]


def test_a_released_lease_is_taken_at_once(tmp_path, quick):
    put(tmp_path, replace(ELSEWHERE, released=True))
    quick(tmp_path, stale_seconds=1e9, patience_seconds=1e9).take()
    assert numbers(tmp_path) == [4]


def test_of_many_processes_that_start_at_once_one_gets_the_folder(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from jaxpar.runtime import lease\n"
        "lease.PATIENCE_SECONDS = 1.0\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "try: lease.Lease(sys.argv[1]).take(); print('taken', flush=True)\n"
        "except lease.HeldError as error: print(error, flush=True); sys.exit(2)\n"
        "time.sleep(10**6)\n"
    )
    put(
        tmp_path, replace(HERE, pid=2**22 + 1, start="1")
    )  # all find one that is stale, and want it
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(leases.__file__).parents[2])]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
    }
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.stdout.readline() for process in processes]
        [owner] = [
            process for process, line in zip(processes, said, strict=True) if line == "taken\n"
        ]
        assert all(line == "taken\n" or f"held by process {owner.pid} " in line for line in said), (
            said
        )
        assert sorted(
            process.wait(WAIT_SECONDS) for process in processes if process is not owner
        ) == [2, 2, 2]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_an_owner_whose_lease_was_taken_hears_of_it_and_may_write_no_more(tmp_path, quick):
    lease, lost = quick(tmp_path), threading.Event()
    lease.when_lost = lost.set
    lease.take()
    put(tmp_path, ELSEWHERE, number=2)
    assert lost.wait(WAIT_SECONDS)
    with pytest.raises(LostError, match=r"taken from this one: process \d+ on 'node3'"):
        lease.check()
    assert "'node3'" in lease.lost
    lease.release()
    assert owner_of(tmp_path)["released"] is False, "it is the other's"


def test_an_owner_whose_file_was_overwritten_has_lost(tmp_path, quick):
    lease = quick(tmp_path, beat_seconds=1000.0)
    lease.take()
    put(tmp_path, ELSEWHERE, number=1)
    with pytest.raises(LostError, match="'node3'"):
        lease.check()


def test_a_lease_that_someone_deleted_is_written_again(tmp_path, quick):
    lease = quick(tmp_path, beat_seconds=1000.0)
    lease.take()
    (tmp_path / ".lease" / "1.json").unlink()
    lease.check()
    assert owner_of(tmp_path)["pid"] == os.getpid()


def test_a_disk_that_takes_no_beat_does_not_lose_the_lease(tmp_path, monkeypatch, quick):
    lease, lost = quick(tmp_path), []
    lease.when_lost = lambda: lost.append(True)
    lease.take()
    failed = threading.Semaphore(0)

    def fail(handle):
        failed.release()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(leases.os, "fsync", fail)
        assert failed.acquire(timeout=WAIT_SECONDS)
        assert failed.acquire(timeout=WAIT_SECONDS)
    lease.check()
    beats = owner_of(tmp_path)["beats"]
    wait_until(lambda: owner_of(tmp_path)["beats"] > beats)
    assert lost == []


def test_two_leases_of_one_process_share_the_folder(tmp_path, quick):
    first, second = quick(tmp_path), quick(tmp_path)
    first.take()
    second.take()
    first.check()
    second.check()
    assert numbers(tmp_path) == [1]


def test_a_folder_made_for_a_lease_goes_with_it_unless_something_was_written(tmp_path, quick):
    for written, path in ((False, tmp_path / "runs" / "refused"), (True, tmp_path / "run")):
        with released_at_end():
            quick(path).take()
            if written:
                (path / "config.json").touch()
        assert path.exists() == written
    assert not (tmp_path / "runs").exists(), "nor is a folder above it left"
    assert tmp_path.exists()
    quick(tmp_path / "run").take()
    assert numbers(tmp_path / "run") == [2]


def test_a_start_that_is_refused_leaves_the_lease_of_the_run_before_as_it_was(tmp_path, quick):
    (tmp_path / "metrics.jsonl").touch()
    for before in (replace(HERE, start="0"), replace(HERE, released=True), None):
        if before is not None:
            put(tmp_path, before, 7)
        lease = quick(tmp_path)
        lease.is_begun = False
        lease.take()
        assert owner_of(tmp_path)["token"] == this_process().token
        lease.release()
        assert Lease(tmp_path).newest()[1] == before
        shutil.rmtree(tmp_path / ".lease", ignore_errors=True)
    first, second = quick(tmp_path), quick(tmp_path)
    first.take()
    second.is_begun = False
    second.take()
    second.release()
    first.check()
    assert not owner_of(tmp_path)["released"], "the other one of this process holds it"
    first.release()
    assert owner_of(tmp_path)["released"]


def test_a_lease_that_was_never_taken_forbids_nothing(tmp_path, quick):
    put(tmp_path, HERE)
    quick(tmp_path).check()
