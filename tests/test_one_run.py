"""Two runs in one folder, as real processes: one trains, the other ends with exit code 2 and says who holds the folder."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.leases import ELSEWHERE, numbers, put
from tests.support.real_runs import ROOT, RUN, environment, finish, launched, run, start, steps_of, wait_for
from tests.support.waiting import WAIT_SECONDS, wait_until

ENDLESS = ("--steps", 10**6)


@pytest.fixture
def held():
    """Starts runs that no test may leave behind."""
    started = []

    def begin(*args):
        started.append(start(*args))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_of_two_recipes_started_at_once_one_trains_and_the_other_is_refused(tmp_path, held):
    flags = ("--out-dir", tmp_path / "out", *ENDLESS, "--checkpoint-every", 50)
    both = [held("recipes/house_prices.py", *flags, "--seed", seed) for seed in (0, 1)]
    wait_until(lambda: any(process.poll() is not None for process in both), "one of both must be refused")
    loser, winner = sorted(both, key=lambda process: process.poll() is None)
    code, _, err = finish(loser)
    assert code == 2, err
    [refused] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"held by process {winner.pid} on" in refused
    assert "Traceback" not in err
    winner.send_signal(signal.SIGTERM)
    code, _, err = finish(winner)
    assert code == 75, err
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps))), "no line is of another run, none is cut"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["seed"] == both.index(winner)


def test_a_second_run_of_two_processes_is_refused_on_both(tmp_path, held):
    first = held(RUN, tmp_path / "run", *ENDLESS, "--seconds", 0.05)
    wait_for(tmp_path / "run" / "rows-0.jsonl")
    code, out, err = run(*launched(tmp_path / "run", *ENDLESS))
    assert code == 2, out + err
    assert f"held by process {first.pid} on" in out
    assert "ended first (exit code 2: bad configuration)" in err
    assert first.poll() is None


def test_a_run_killed_in_its_folder_is_started_again_without_a_wait(tmp_path, held):
    folder = tmp_path / "run"
    first = held(RUN, folder, *ENDLESS, "--every", 2, "--seconds", 0.02)
    wait_for(folder / "checkpoints" / "2")
    first.kill()  # and not waited for: it may still be a zombie
    again = held(RUN, folder, "--steps", 200, "--every", 50, "--resume")
    code, _, err = finish(again)
    assert code == 0, err
    assert "waiting" not in err


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


def test_a_run_that_is_refused_in_a_new_folder_leaves_nothing_there(tmp_path):
    command = [sys.executable, "recipes/house_prices.py", "--out-dir", str(tmp_path / "out"), "--resume"]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert ended.returncode == 2, ended.stderr
    assert "--resume needs a checkpoint" in ended.stderr
    assert not (tmp_path / "out").exists()
