"""Processes of a run end together; one that ends early, or leaves the training loop, is named by the others and by itself."""

import json
import threading

import pytest

from jaxpar.runtime import coordination, endings
from jaxpar.runtime.coordination import AgreedStep, PeerLostError, exchange
from jaxpar.runtime.endings import ENDED, GOES_ON, EndWatch
from jaxpar.runtime.uncaught import exit_code_of
from tests.support.fake_service import stand_in
from tests.support.real_runs import run
from tests.support.waiting import NEVER, WAIT_SECONDS, wait_until

LEFT = "jaxpar/left/0"


class EndedError(Exception):
    """Raised in place of the end of this process."""


# -- a process that goes on --------------------------------------------------------------------------------------------


def left(begun):
    return {LEFT: {"process": 1, "done": 3, "begun": begun, "how": ""}}


def ends_of_one_that_goes_on(steps):
    """The exit codes with which a process ends in a loop whose step ``steps`` it begins."""
    ends, is_over = [], threading.Event()

    def end(code):
        ends.append(code)
        is_over.set()

    def loop():
        with AgreedStep(10, end) as agreed:
            agreed.after(steps)
            agreed.begin(steps)
            assert is_over.wait(WAIT_SECONDS)
            raise EndedError

    with pytest.raises(EndedError):
        loop()
    return ends[:1]


def test_a_process_that_another_one_has_left_in_the_loop_names_it_and_ends_with_70(
    monkeypatch, capfd
):
    service = stand_in(monkeypatch, left(begun=3))
    assert ends_of_one_that_goes_on(3) == [70]
    assert json.loads(service.values[GOES_ON]) == {"process": 0, "waits": ""}, (
        "which the other one reads"
    )
    said = capfd.readouterr().err
    assert (
        "another process of the run is gone: process 1 of 2 has left the training loop after step 3"
        in said
    )


def test_a_process_that_stays_in_a_step_that_another_one_has_left_ends_after_the_time_of_some_steps(
    monkeypatch,
):
    monkeypatch.setattr(coordination, "SECONDS_TO_LEAVE_FIRST", 0.05)
    stand_in(monkeypatch, left(begun=4))
    assert ends_of_one_that_goes_on(3) == [70]


def test_a_process_in_the_loop_names_another_one_that_has_ended_its_program(monkeypatch, capfd):
    stand_in(monkeypatch, {ENDED: {"process": 1, "code": 0}})
    assert ends_of_one_that_goes_on(3) == [70]
    assert (
        "another process of the run is gone: process 1 of 2 has ended its program"
        in capfd.readouterr().err
    )


def test_who_waits_for_an_answer_of_a_process_that_has_ended_is_told_at_once(monkeypatch):
    service = stand_in(monkeypatch, {f"{ENDED}/1": {"process": 1, "code": 65}})
    with pytest.raises(
        PeerLostError,
        match=r"process 1 of 2 has ended with exit code 65 without an answer for jaxpar/x/0/1\. Its own message says why\.",
    ) as found:
        exchange("x", True, timeout_seconds=NEVER)
    assert GOES_ON in service.values
    assert exit_code_of(found.value) == 65, "a restart would not help"


@pytest.mark.parametrize(("code", "follows"), [(2, 2), (86, 86), (1, 70), (0, 70)])
def test_a_process_ends_with_the_code_of_another_one_after_which_no_restart_helps(
    monkeypatch, capfd, code, follows
):
    """SLURM reports the highest code of all tasks: beside 70 it would start a run anew that cannot go on."""
    stand_in(monkeypatch, {ENDED: {"process": 1, "code": code}})
    assert ends_of_one_that_goes_on(3) == [follows]
    says_why = "Its own message says why." in capfd.readouterr().err
    assert says_why == bool(code)


# -- a process that leaves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("raised", "code"), [(None, 70), (SystemExit(0), 70), (SystemExit(3), 3)])
def test_a_process_that_leaves_the_loop_alone_names_itself_and_ends_with_a_code(
    monkeypatch, capfd, raised, code
):
    service = stand_in(monkeypatch, {GOES_ON: {"process": 0}}, process=1)

    def loop():
        with AgreedStep(10) as agreed:
            agreed.after(3)
            if raised:
                raise raised

    with pytest.raises(SystemExit) as end:
        loop()
    assert end.value.code == code
    assert json.loads(service.values[LEFT])["done"] == 3
    said = capfd.readouterr().err
    assert (
        "after the same step; got process 1 of 2 after step 3 of 10, and process 0 of 2 goes on"
        in said
    )


def test_processes_that_leave_a_loop_together_end_as_they_like(monkeypatch):
    stand_in(monkeypatch, left(begun=4) | {"jaxpar/end/0/1": 3})
    with AgreedStep(10) as agreed:  # before its last step
        agreed.after(3)
        agreed.leave()
    assert endings._completed == [3], "they then wait longer for one another"
    service = stand_in(monkeypatch, {"jaxpar/end/0/1": 10})
    with AgreedStep(10) as agreed:
        agreed.after(10)
    assert LEFT not in service.values, "the loop is complete"
    assert endings._completed == [10]


# -- the end of a program ----------------------------------------------------------------------------------------------


def test_a_program_that_ends_while_others_run_ends_with_70_in_place_of_0_and_says_so(
    monkeypatch, capfd
):
    service = stand_in(monkeypatch, process=1)
    assert EndWatch().leave(0) == 70
    assert json.loads(service.values[f"{ENDED}/1"]) == {"process": 1, "code": 0, "seconds": 60}
    assert (
        "got the end of the program of process 1 of 2 while others still run"
        in capfd.readouterr().err
    )
    stand_in(monkeypatch, process=1, everyone_ends=True)
    assert EndWatch().leave(0) == 0


def test_a_program_that_has_ended_is_not_waited_for_by_one_that_cannot_go_on_without_it(
    monkeypatch, capfd
):
    stand_in(monkeypatch, {GOES_ON: {"process": 0}}, process=1)
    ends = []
    watch = EndWatch(ends.append)
    watch._code = 0
    watch.start()
    wait_until(lambda: ends)
    watch.stop()
    assert ends[0] == 70
    assert "the program of process 1 of 2 while process 0 of 2 goes on" in capfd.readouterr().err


def test_a_process_says_once_that_another_one_has_ended(monkeypatch, capfd):
    stand_in(monkeypatch, {ENDED: {"process": 1, "code": 0, "seconds": 600}})
    watch, said = EndWatch(), []
    watch.start()
    wait_until(lambda: said.append(capfd.readouterr().err) or "".join(said))
    watch.stop()
    assert "".join(said).startswith(
        "process 1 of 2 has ended its program while this one runs: it waits up to 600 s"
    )
    assert capfd.readouterr().err == ""


ONE_LEAVES = """
import logging, sys, tempfile
from pathlib import Path
import jaxpar
jaxpar.initialize()
import jax, jax.numpy as jnp, optax
from jaxpar.run import BasicFlags, Run

how, folder = sys.argv[1:]
if how == "before" and jax.process_index() == 1:
    sys.exit(0)
mesh = jaxpar.make_mesh(data=2)
parallel = jaxpar.Parallel(mesh, jaxpar.shardings_from_paths({"w": jnp.ones(4)}, mesh, {"**": jaxpar.replicated()}))
loss = lambda out, batch: jaxpar.losses.squared_error(out, batch["y"])
grad = jaxpar.value_and_grad(lambda params, batch: batch["x"] @ params["w"], loss, parallel)
batch = jaxpar.shard_batch({"x": jnp.ones((4, 4)), "y": jnp.ones(4)}, mesh)
optimizer = optax.sgd(0.1)
with Run(BasicFlags.of(out_dir=Path(folder), steps=10**6), mesh) as run:
    run.restore(lambda key: {"w": jnp.ones(4)}, jax.random.key(0), optimizer, parallel)
    train_step = run.compile(jaxpar.make_train_step(grad, optimizer), batch)
    state = run.begin()
    for step in run.steps():
        if step == 3 and jax.process_index() == 1 and how == "break":
            break
        if step == 3 and jax.process_index() == 1 and how == "exit":
            sys.exit(0)
        state, metrics = train_step(state, batch)
        run.log(step, state, metrics)
        float(metrics["loss"])
"""


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("how", ["before", "break", "exit"])
def test_of_two_real_processes_the_one_that_ends_early_is_named_by_the_launcher(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(ONE_LEAVES)
    launch = ("-m", "jaxpar", "launch", "-n", 2, "--log-dir", tmp_path / "logs")
    code, out, err = run(*launch, script, how, tmp_path / "run")
    assert code == 70, out + err
    assert "launch: process 1 of 2 ended first (exit code 70: another process was lost)" in err, (
        out + err
    )
    said = (
        "got the end of the program of process 1"
        if how == "before"
        else "got process 1 of 2 after step 3 of 1000000, and"
    )
    assert said in err, "in its log, which the launcher shows"
