"""Two runs in one folder, as real processes: one trains, the other ends with exit code 2 and says who holds the folder."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import house_prices
from jaxpar.commands import recipe as cli
from jaxpar.runtime.lease import Lease, start_of, this_process
from tests.support.leases import ELSEWHERE, numbers, put
from tests.support.real_runs import PLAIN, RUN, finish, launched, run, start, steps_of, wait_for
from tests.support.waiting import NEVER, wait_until

ENDLESS = ("--steps", 10**6)


@pytest.fixture
def held():
    """Starts runs that no test may leave behind."""
    started = []

    def begin(*args, **options):
        started.append(start(*args, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow  # a recipe that is refused is the next test, processes that start at once are in tests/test_lease.py
def test_of_two_recipes_started_at_once_one_trains_and_the_other_is_refused(tmp_path, held):
    flags = ("--out-dir", tmp_path / "out", *ENDLESS, "--checkpoint-every", 10)
    slowly = {"STEP_SECONDS": "0.05"}  # while the other waits
    both = [
        held(PLAIN, "house_prices", *flags, "--seed", seed, variables=slowly) for seed in (0, 1)
    ]
    wait_until(
        lambda: any(process.poll() is not None for process in both), "one of both must be refused"
    )
    loser, winner = sorted(both, key=lambda process: process.poll() is None)
    code, _, err = finish(loser)
    assert code == 2, err
    [refused] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"held by process {winner.pid} on" in refused
    assert "Traceback" not in err
    winner.send_signal(signal.SIGTERM)
    code, _, err = finish(winner)
    assert code == 75, err
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(len(steps))), "no line is of another run, none is cut"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["seed"] == both.index(winner)


def test_a_recipe_whose_folder_another_process_holds_is_refused(tmp_path, capsys):
    other = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({NEVER})"])
    out = tmp_path / "out"
    put(out, replace(this_process(), pid=other.pid, start=start_of(other.pid), token="another"))
    try:
        with pytest.raises(SystemExit) as end:
            cli.run(house_prices.main, house_prices.Config, ["--out-dir", str(out)])
    finally:
        other.kill()
        other.wait()
    assert end.value.code == 2
    err = capsys.readouterr().err
    [refused] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"held by process {other.pid} on" in refused
    assert "Traceback" not in err
    assert sorted(path.name for path in out.iterdir()) == [".lease"], "nothing was written"


@pytest.mark.full
def test_a_second_run_of_two_processes_is_refused_on_both(tmp_path):
    first = Lease(tmp_path / "run" / "checkpoints")
    first.take()
    try:
        code, out, err = run(*launched(tmp_path / "run", *ENDLESS))
        first.check()
    finally:
        first.release()
    assert code == 2, out + err
    assert f"held by process {os.getpid()} on" in out
    assert "ended first (exit code 2: bad configuration or data)" in err


@pytest.mark.full
def test_a_run_killed_in_its_folder_is_started_again_without_a_wait(tmp_path, held):
    folder = tmp_path / "run"
    first = held(RUN, folder, *ENDLESS, "--every", 2, "--seconds", 0.02)
    wait_for(folder / "checkpoints" / "2")
    first.kill()  # and not waited for: it may still be a zombie
    again = held(RUN, folder, "--steps", 100, "--every", 50, "--resume")
    code, _, err = finish(again)
    assert code == 0, err
    assert "waiting" not in err


@pytest.mark.full
def test_a_run_whose_folder_was_taken_commits_nothing_more_and_ends_with_74(tmp_path, held):
    folder = tmp_path / "run"
    first = held(RUN, folder, *ENDLESS, "--every", 1, "--seconds", 0.02)
    wait_for(folder / "checkpoints" / "2")
    put(folder / "checkpoints", replace(ELSEWHERE, beats=1), number=2)
    before = steps_of(folder)
    code, _, err = finish(first)
    assert code == 74, err
    assert err.splitlines()[-1].startswith("error: one run at a time may write to a folder; got ")
    assert "taken from this one: process" in err.splitlines()[-1]
    assert steps_of(folder)[-1] <= before[-1] + 1, "one commit may have been on its way"
    assert numbers(folder / "checkpoints")[-1] == 2


def test_a_run_that_is_refused_in_a_new_folder_leaves_nothing_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(
            house_prices.main, house_prices.Config, ["--out-dir", str(tmp_path / "out"), "--resume"]
        )
    assert end.value.code == 2
    assert "--resume needs a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
