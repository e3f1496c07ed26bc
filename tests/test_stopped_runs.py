"""Runs that are asked to stop, that are stuck, and those of which one process fails: real processes, real signals."""

import re
import signal

import pytest

import jaxpar
from tests.support.real_runs import RUN, finish, launched, run, start, steps_of, wait_for
from tests.support.waiting import NEVER

# -- asked to stop -----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a signal to a script is in tests/test_checkpointing.py too
@pytest.mark.parametrize(("number", "every"), [(signal.SIGTERM, 0), (signal.SIGINT, 10**6)])
def test_a_signal_saves_at_the_end_of_a_step_and_exits_75(tmp_path, number, every):
    folder = tmp_path / "run"
    process = start(RUN, folder, "--steps", 10**6, "--every", every, "--seconds", 0.05)
    wait_for(folder / "rows-0.jsonl", num_bytes=1)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 75, err
    [step] = steps_of(folder)
    assert f"{number.name}: saved step {step}; go on with resume=True" in err
    assert jaxpar.CheckpointManager(folder / "checkpoints", jaxpar.make_mesh()).verify(step) == []


@pytest.mark.full
@pytest.mark.parametrize("process", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_one_of_two_processes_makes_both_save_the_same_step(tmp_path, process):
    folder = tmp_path / "run"
    code, out, err = run(
        *launched(folder, "--every", 0, "--seconds", 0.05, "--faults", f"term@6:{process}")
    )
    assert code == 75, out + err
    [step] = steps_of(folder)
    assert step > 6
    manifest = jaxpar.CheckpointManager(folder / "checkpoints", jaxpar.make_mesh()).manifest(step)
    assert manifest.num_processes == 2
    assert (
        "process 0 of 2 ended first (exit code 75: asked to stop; saved)" in err
        or "process 1 of 2" in err
    )
    lengths = {len((folder / f"rows-{each}.jsonl").read_text().splitlines()) for each in (0, 1)}
    assert lengths == {step}, "both did the same steps"


@pytest.mark.slow  # tests/test_preemption.py has it without a run
def test_a_second_signal_ends_a_run_at_once(tmp_path):
    folder = tmp_path / "run"
    process = start(RUN, folder, "--every", 10**6, "--faults", "wait@3:0")
    wait_for(folder / "struck-wait@3:0")
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline().startswith("SIGTERM: saving at the end of a step")
    process.send_signal(signal.SIGTERM)
    code, _, _ = finish(process)
    assert code == -signal.SIGTERM


# -- stuck -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/test_guard.py has the stack, and the test of a stopped process below the code
def test_a_process_that_is_stuck_ends_with_124_and_its_stack(tmp_path):
    folder = tmp_path / "run"
    code, out, err = run(*launched(folder, "--faults", "stick@3:1"))
    assert code == 124, out + err
    log = (tmp_path / "run-logs" / "1.log").read_text()
    assert (
        f"step must end within {NEVER:g} s (budget.step); got process 1 of 2 stuck in step 4" in log
    )
    assert "in stuck_here\n" in log


@pytest.mark.full
def test_a_process_stuck_with_the_interpreters_lock_ends_too():
    program = (
        "import re\n"
        "from jaxpar.runtime.watchdog import Budgets, Watchdog\n"
        "with Watchdog(Budgets(step=1), clock=lambda: 0.0) as watchdog:\n"  # its thread sees no time pass
        "    watchdog.begin('step', '1')\n"
        "    re.match('(a+)+$', 'a' * 60 + 'b')\n"
    )
    code, _, err = run("-c", program)
    assert code == 1, err
    assert "Timeout" in err
    assert 'File "<string>", line 5' in err


@pytest.mark.full
@pytest.mark.parametrize("process", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_is_stopped_in_a_save_is_named_by_the_one_that_waits(tmp_path, process):
    folder = tmp_path / "run"
    code, out, err = run(*launched(folder, "--faults", f"stop@9:{process}", "--budget", 0))
    assert code == 124, out + err
    log = (tmp_path / "run-logs" / f"{1 - process}.log").read_text()
    assert f"save must end within {NEVER:g} s (budget.save); " in log, log
    assert f"got process {process} of 2, silent for " in log
    # Saves run in the background, one every 5 steps, so it depends on the machine which of them is in progress.
    assert re.search(rf"Process {1 - process} waits for it in save of step (5|10|15|20)\.", log), (
        log
    )


# -- one process fails -------------------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/test_launch.py has it without a run
def test_an_error_of_one_process_ends_all_with_its_traceback_last(tmp_path):
    folder = tmp_path / "run"
    code, out, err = run(*launched(folder, "--faults", "error@4:1"))
    assert code == 1, out + err
    assert (
        "RuntimeError: an error of one process" in err.splitlines()[-3:][0]
        or "RuntimeError: an error" in err
    )
    last = err[err.rindex("Traceback") :]
    assert "RuntimeError: an error of one process" in last
    assert "launch: process 1 of 2 ended first (exit code 1: an error)" in err.splitlines()[-1]
