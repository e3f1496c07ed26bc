"""How runs end: each exit code by a real run, and a launcher that is killed while its run trains."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.runtime import launch
from jaxpar.runtime.exit_codes import ExitCode
from tests.support.real_runs import (
    RUN,
    assert_all_end,
    end_of,
    environment,
    finish,
    launched,
    run,
    start,
    steps_of,
    wait_for,
)
from tests.support.waiting import WAIT_SECONDS

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# Where a run of real processes ends with a code.
RUNS = {
    ExitCode.DONE: "test_faults.py::test_a_process_killed_in_a_run_of_two_is_started_again_to_the_same_end",
    ExitCode.BAD_CONFIG: "test_ends_of_runs.py::test_flags_that_cannot_be_used_end_a_recipe_with_2_on_every_process",
    ExitCode.BAD_DATA: "test_ends_of_runs.py::test_checkpoints_none_of_which_is_whole_end_a_run_with_65_on_every_process",
    ExitCode.PEER_LOST: "test_launch.py::test_a_recipe_whose_peer_never_comes_ends_with_code_70_and_its_name",
    ExitCode.NOT_SAVED: "test_faults.py::"
    "test_a_disk_that_fails_under_one_of_two_processes_fails_the_saves_of_both_and_no_training",
    ExitCode.PREEMPTED: "test_stopped_runs.py::test_a_signal_to_one_of_two_processes_makes_both_save_the_same_step",
    ExitCode.NOT_FINITE: "test_faults.py::test_ten_steps_in_a_row_that_are_not_finite_end_a_run_with_86_and_keep_the_last_good",
    ExitCode.STUCK: "test_stopped_runs.py::test_a_process_that_is_stopped_in_a_save_is_named_by_the_one_that_waits",
}


@pytest.mark.parametrize("code", ExitCode, ids=lambda code: code.name)
def test_each_exit_code_is_that_of_a_real_run(code):
    file, name = RUNS[code].split("::")
    text = (TESTS / file).read_text()
    body = text.partition(f"def {name}(")[2].partition("\ndef ")[0]
    assert f"code == {int(code)}" in body, (
        f"{RUNS[code]} must hold the code of a process against {int(code)}"
    )
    before = text.partition(f"def {name}(")[0].rpartition("\n\n")[2]
    assert "slow" not in before.split("@pytest.mark.parametrize")[0], (
        f"{RUNS[code]} must run each time"
    )


# Runs a script whose processes wait for one another at their end, however late one is, in place of 2 s.
MEET = (
    "import os, runpy, sys\n"
    "from jaxpar.runtime import endings\n"
    f"endings.SECONDS_TO_MEET = {WAIT_SECONDS:.0f}\n"
    "sys.argv = sys.argv[1:]\n"
    "sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)


def both(*args):
    """Starts a program as two processes of one run, without a launcher; returns the exit code and the end of each."""
    told = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{launch.free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "PJRT_NPROC": "2",
    }
    told |= environment() | {"JAX_NUM_CPU_DEVICES": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    command = [sys.executable, *map(str, args)]
    processes = [
        subprocess.Popen(command, env=told | {"JAX_PROCESS_ID": str(n)}, **pipes) for n in range(2)
    ]
    ends = [finish(process) for process in processes]
    return [code for code, _, _ in ends], [err for _, _, err in ends]


@pytest.mark.full
def test_flags_that_cannot_be_used_end_a_recipe_with_2_on_every_process(tmp_path):
    codes, errors = both(
        "-c",
        MEET,
        ROOT / "recipes/house_prices.py",
        "--mesh.data",
        3,
        "--out-dir",
        tmp_path / "run",
    )
    for code, err in zip(codes, errors, strict=True):
        assert code == 2, err
        assert err.splitlines()[-1].startswith("error: "), err
    assert not (tmp_path / "run").exists(), "nothing was written"


@pytest.mark.full
def test_checkpoints_none_of_which_is_whole_end_a_run_with_65_on_every_process(tmp_path):
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    codes, errors = both("-c", MEET, RUN, tmp_path / "run", "--resume")
    for code, err in zip(codes, errors, strict=True):
        assert code == 65, err
        assert "error: restoring needs an intact checkpoint" in err
    assert "NOT USED: checkpoint of step 5: it has no manifest.json" in errors[0]


@pytest.mark.full
def test_a_process_that_is_killed_ends_the_other_with_70(tmp_path):
    codes, errors = both(RUN, tmp_path / "run", "--seconds", 0.02, "--faults", "kill@3:1")
    assert codes == [70, -signal.SIGKILL], errors
    assert "error: another process of the run is gone: " in errors[0]


@pytest.mark.parametrize("code", [*map(int, ExitCode), 1, 3])
def test_the_launcher_passes_on_every_code(tmp_path, code):
    program = f'[ "$JAX_PROCESS_ID" = 0 ] || sleep 0.2; exit {code}'
    assert launch.run(launch.Launch(("sh", "-c", program), 2, log_dir=tmp_path)) == code


def processes_of(folder):
    """The processes that run with a folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words and RUN.encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.full
def test_a_launcher_killed_while_its_run_trains_leaves_nothing_running_and_the_next_goes_on(
    tmp_path,
):
    folder = tmp_path / "run"
    process = start(
        *launched(folder, "--steps", 10**6, "--every", 2, "--seconds", 0.02),
        stderr=subprocess.DEVNULL,
    )
    wait_for(folder / "checkpoints" / "4" / "manifest.json")
    workers = [pid for pid in processes_of(folder) if pid != process.pid]
    assert len(workers) == 2
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert_all_end(workers)
    saved = steps_of(folder)[-1]
    code, out, err = run(*launched(folder, "--steps", saved + 3, "--every", 2, "--resume"))
    assert code == 0, out + err
    assert end_of(folder)["start"] >= 4
    seen = [json.loads(line)["step"] for line in (folder / "rows-0.jsonl").read_text().splitlines()]
    assert seen[-1] == saved + 2, "and no other process wrote after it"
