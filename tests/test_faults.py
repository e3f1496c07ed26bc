"""Runs that are killed, out of disk or not finite: real processes, real signals."""

import json
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import jaxpar
from tests.support import tiny, tiny_run
from tests.support.failed_saves import GIVES_WRITES_UP, writes_given_up  # noqa: F401 (a fixture)
from tests.support.killed_save import COMMITTED, PHASES
from tests.support.oracle import assert_same_bits
from tests.support.real_runs import (
    ROOT,
    RUN,
    end_of,
    finish,
    launched,
    run,
    start,
    steps_of,
    wait_for,
    wait_for_a_step,
)
from tests.support.tiers import quick
from tests.support.tiny_state import at_step, make_state, newest_verified
from tests.support.waiting import WAIT_SECONDS, wait_until

pytestmark = GIVES_WRITES_UP


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The end of a run that nothing happens to: in this process, whose numbers are those of two with a device each."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    tiny_run.train(tiny_run.flags([str(folder), "--data", "2"]))
    return end_of(folder)


# -- saves that are killed --------------------------------------------------------------------------------------------

QUICK = ("the manifest is named", "the old step is put away")


@pytest.mark.parametrize(
    "phase",
    quick(
        [
            phase if phase in QUICK else pytest.param(phase, marks=pytest.mark.slow)
            for phase in PHASES
        ],
        "the old step is put away",
    ),
)
def test_a_save_killed_at_any_phase_leaves_a_whole_step(tmp_path, phase):
    folder = tmp_path / "checkpoints"
    code, _, err = run(ROOT / "tests" / "support" / "killed_save.py", folder, phase)
    assert code == -signal.SIGKILL, f"the phase was not reached: {err}"
    said, mesh = [], jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(folder, mesh, keep=1, say=said.append)
    step = 2 if phase in COMMITTED else 1
    want = make_state(mesh, seed=step)
    restored = manager.restore(make_state(mesh))
    assert int(restored.step) == step
    assert_same_bits(restored.params, want.params)
    assert said == [], "what is unfinished is no step"
    left = [path.name for path in folder.iterdir() if path.name.startswith("saving-")]
    manager.save(at_step(want, 3))
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("saving-")) == []
    assert [line.split(":")[0] for line in said] == [f"discarded {name}" for name in sorted(left)]
    assert newest_verified(manager) == 3


@pytest.mark.slow
def test_20_runs_killed_at_random_times_lose_no_committed_step(tmp_path):
    seed = tiny.fresh_seed()
    print(f"seed {seed}")  # shown where the test fails
    random, committed, killed_saving = np.random.default_rng(seed), 0, 0
    folder, mesh = tmp_path / "run", jaxpar.make_mesh()
    for number in range(20):
        resume = ["--resume"] if committed else []
        process = start(RUN, folder, "--steps", 10**6, "--every", 1, *resume)
        seen = folder / "rows-0.jsonl"
        size = seen.stat().st_size if seen.exists() else 0
        grows = lambda seen=seen, size=size: seen.exists() and seen.stat().st_size > size
        wait_until(lambda process=process, grows=grows: grows() or process.poll() is not None)
        assert grows(), process.communicate()
        if committed == 0:  # a busy machine may need long for the first
            wait_for_a_step(folder)
        time.sleep(float(random.uniform(0.05, 1.5)))
        process.kill()
        process.communicate()
        names = [path.name for path in (folder / "checkpoints").glob("*")]
        killed_saving += any(name.startswith("saving-") for name in names)
        manager = jaxpar.CheckpointManager(folder / "checkpoints", mesh)
        newest = max((int(name) for name in names if name.isdigit()), default=0)
        assert (newest_verified(manager) or 0) == newest, f"kill {number}: {names}"
        assert newest >= committed, f"kill {number}: step {committed} was lost"
        committed = newest
    assert committed > 0, "it went on between the kills"
    print(f"killed in the middle of a save: {killed_saving} of 20; steps at last: {committed}")


# -- processes that are killed -----------------------------------------------------------------------------------------


def rows_seen(folder, start_steps):
    """The rows of each step as the start that kept it took them."""
    lines = [json.loads(line) for line in (folder / "rows-0.jsonl").read_text().splitlines()]
    return {line["step"]: line["rows"] for line in lines}


@pytest.mark.full
def test_a_process_killed_in_a_run_of_two_is_started_again_to_the_same_end(tmp_path, undisturbed):
    folder = tmp_path / "run"
    code, out, err = run(*launched(folder, "--faults", "kill-saved@9:1", restarts=2))
    assert code == 0, out + err
    end = end_of(folder)
    assert end["start"] == 5
    assert end["checksums"] == undisturbed["checksums"], (
        "params, optimizer state and step, bit for bit"
    )
    assert end["losses"] == undisturbed["losses"][5:]
    assert (
        "launch: restart 1 of at most 2: process 1 ended first (ended by SIGKILL), after step 9"
        in err
    )
    assert "4 steps were redone" in err
    assert re.search(r"launch: goodput \d+%: [\d.]+ s of useful steps in [\d.]+ s", err)


@pytest.mark.slow
def test_5_random_kills_end_where_an_undisturbed_run_ends(tmp_path):
    seed = tiny.fresh_seed()
    print(f"seed {seed}")  # shown where the test fails
    steps, random = 200, np.random.default_rng(seed)
    flags = ("--steps", steps, "--every", 10)
    code, out, err = run(*launched(tmp_path / "whole", *flags))
    assert code == 0, out + err
    kills = sorted(int(step) for step in random.choice(np.arange(5, steps), 5, replace=False))
    faults = ",".join(f"kill@{step}:{random.integers(2)}" for step in kills)
    code, out, err = run(*launched(tmp_path / "killed", *flags, "--faults", faults, restarts=6))
    assert code == 0, out + err
    whole, killed = end_of(tmp_path / "whole"), end_of(tmp_path / "killed")
    assert killed["checksums"] == whole["checksums"], faults
    assert killed["losses"] == whole["losses"][killed["start"] :]
    print(err.split("launch: no restart")[-1][-1500:])


@pytest.mark.slow
def test_every_row_is_seen_once_an_epoch_over_5_kills_and_a_change_of_process_count(tmp_path):
    folder, per_epoch, epochs = tmp_path / "run", 6, 10
    kills = [4, 11, 23, 38, 49]
    for number, step in enumerate(kills):
        processes = 1 + number % 2
        again = ["--resume"] if number else []
        flags = ("--steps", per_epoch * epochs, "--every", 3, "--seconds", 0.2)
        flags += ("--faults", f"kill@{step}:{processes - 1}", *again)
        code, out, err = run(*launched(folder, *flags, processes=processes, devices=2 // processes))
        assert code not in (0, 65, 2), out + err
    code, out, err = run(
        *launched(folder, "--steps", per_epoch * epochs, "--every", 3, "--resume", processes=2)
    )
    assert code == 0, out + err
    seen = rows_seen(folder, kills)
    assert sorted(seen) == list(range(per_epoch * epochs))
    for epoch in range(epochs):
        rows = [
            row for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for row in seen[step]
        ]
        assert sorted(rows) == list(range(48)), f"epoch {epoch}"


# -- out of disk, not finite -------------------------------------------------------------------------------------------


@pytest.fixture
def files_may_grow_again(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # which the fault sets
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("files_may_grow_again")
def test_a_disk_that_is_full_stops_no_training_and_fails_loudly_at_the_end(tmp_path, capfd):
    folder = tmp_path / "run"
    with pytest.raises(SystemExit, match="74"):
        tiny_run.train(tiny_run.flags([str(folder), "--data", "1", "--faults", "fill-saved@7:0"]))
    err = capfd.readouterr().err
    assert [step for step in (5, 10, 15) if f"NOT SAVED: checkpoint of step {step}: " in err] == [
        10,
        15,
    ]
    assert len(end_lines(folder)) == 15, "it trained on"
    assert err.splitlines()[-1].startswith("error: the final state was not saved: ")
    assert "Traceback" not in err, "each failure is one line"
    manager = jaxpar.CheckpointManager(folder / "checkpoints", jaxpar.make_mesh())
    assert newest_verified(manager) == 5
    assert steps_of(folder) == [5]


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "whole"),
    [
        ("EROFS@7:1", set()),
        pytest.param("ENOSPC@7:0", set(), marks=pytest.mark.slow),
        pytest.param("ENOSPC@7:0,mend@11:0", {15}, marks=pytest.mark.slow),
        pytest.param("EDQUOT@7:1,mend@11:1", {15}, marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fails_under_one_of_two_processes_fails_the_saves_of_both_and_no_training(
    tmp_path, undisturbed, faults, whole
):
    folder = tmp_path / "run"
    code, out, err = run(*launched(folder, "--faults", faults))
    if whole:
        assert code == 0, out + err
        assert end_of(folder) == undisturbed
    else:
        assert code == 74, out + err
    told = re.findall(r"NOT SAVED: checkpoint of step (\d+): ", out + err)
    failed = {int(step) for step in told}
    saved = set(steps_of(folder)) - {5}
    assert failed - {5} == {10, 15} - saved, out + err
    late = (
        {10} if "mend" in faults else set()
    )  # a save that waits on a busy machine may find the disk mended
    assert whole <= saved <= whole | late
    lines = [(folder / f"rows-{process}.jsonl").read_text().splitlines() for process in (0, 1)]
    assert [len(each) for each in lines] == [15, 15], "both trained on"


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of some size and number of files on a folder, and returns the folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        if done.returncode:
            pytest.skip(
                f"mounting a disk needs root and the right to mount; got {done.stderr.strip()}"
            )
        return folder

    yield mount
    subprocess.run(["umount", folder], capture_output=True, timeout=WAIT_SECONDS)


@pytest.mark.parametrize(
    "disk",
    [
        pytest.param("size=16m,nr_inodes=40", marks=pytest.mark.slow),
        pytest.param("size=200k", marks=pytest.mark.slow),
        pytest.param(
            "read-only", marks=pytest.mark.slow
        ),  # the test above has it with two processes, simulated
    ],
)
def test_a_real_disk_that_is_full_or_read_only_ends_a_run_with_74_soon_after_its_last_step(
    tmp_path, small_disk, disk
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").symlink_to(small_disk("size=16m" if disk == "read-only" else disk))
    process = start(RUN, folder, "--steps", 30, "--every", 2, "--seconds", 0.2)
    if disk == "read-only":
        wait_for(folder / "checkpoints" / "2")
        subprocess.run(
            ["mount", "-o", "remount,ro", folder / "checkpoints"], check=True, timeout=WAIT_SECONDS
        )
    code, _, err = finish(process)
    assert code == 74, err
    assert len(end_lines(folder)) == 30, "it trained on"
    assert "NOT SAVED: checkpoint of step 30: " in err
    assert str(ROOT / "jaxpar") not in err, (
        "each failure is one line, but for what TensorStore's own threads print"
    )
    manager = jaxpar.CheckpointManager(folder / "checkpoints", jaxpar.make_mesh())
    assert newest_verified(manager) == manager.latest(), "what was saved before is whole"


def end_lines(folder):
    return {json.loads(line)["step"] for line in (folder / "rows-0.jsonl").read_text().splitlines()}


@pytest.mark.full
def test_ten_steps_in_a_row_that_are_not_finite_end_a_run_with_86_and_keep_the_last_good(tmp_path):
    folder = tmp_path / "run"
    faults = ",".join(f"nan@{step}:0" for step in (3, *range(6, 20)))
    code, _, err = run(RUN, folder, "--steps", 20, "--every", 5, "--faults", faults)
    assert code == 86, err
    assert "10 consecutive steps had a loss or gradients that were not finite" in err
    assert "The checkpoint of step 5 is intact." in err
    manager = jaxpar.CheckpointManager(folder / "checkpoints", jaxpar.make_mesh())
    assert manager.steps() == (5,), "those of 10 and 15 would have the state of step 6"
    assert manager.verify(5) == []


@pytest.mark.slow  # tests/test_recipes.py has it too, in one process
def test_with_all_checkpoints_bad_a_run_ends_with_65(tmp_path):
    folder = tmp_path / "run"
    assert run(RUN, folder, "--steps", 5)[0] == 0
    (folder / "checkpoints" / "5" / "manifest.json").unlink()
    code, _, err = run(RUN, folder, "--resume")
    assert code == 65, err
    assert "NOT USED: checkpoint of step 5: it has no manifest.json" in err
    assert "none of which is" in err
