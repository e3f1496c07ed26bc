"""Processes of a run end together; one that ends early, or leaves the training loop, is named by the others and by itself."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from jaxpar.guard import Guard
from jaxpar.run import ConfigError
from jaxpar.runtime import coordination, distributed, endings
from jaxpar.runtime.coordination import AgreedStep, PeerLostError, exchange
from jaxpar.runtime.endings import ENDED, GOES_ON, GONE, EndWatch
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.launch import fake_devices
from jaxpar.runtime.uncaught import exit_code_of
from tests.support.fake_service import stand_in
from tests.support.real_runs import run
from tests.support.waiting import NEVER, WAIT_SECONDS, wait_until

LEFT = "jaxpar/left/0"
ROOT = Path(__file__).parents[1]


class EndedError(Exception):
    """Raised in place of the end of this process."""


# -- a process that goes on --------------------------------------------------------------------------------------------


def left(begun, code=0):
    return {LEFT: {"process": 1, "done": 3, "begun": begun, "code": code}}


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


def test_a_process_whose_collective_fails_takes_over_the_final_code_that_another_one_has_told(
    monkeypatch,
):
    """The error of the collective often comes before the thread that looks for the end of others."""
    error = jax.errors.JaxRuntimeError("Gloo all-reduce failed: Connection closed by peer")
    stand_in(monkeypatch, {ENDED: {"process": 1, "code": 2}})
    code, told = coordination.follow(error)
    assert code == 2
    assert "process 1 of 2 has ended with exit code 2. Its own message says why." in told
    assert coordination.follow(error) == (2, ""), "it is said once"


def test_a_process_whose_collective_fails_waits_briefly_for_the_code_of_the_other_one(monkeypatch):
    service = stand_in(monkeypatch)
    monkeypatch.setattr(endings, "SECONDS_TO_LEARN", WAIT_SECONDS)
    told = json.dumps({"process": 1, "code": 74})
    later = threading.Timer(0.1, lambda: service.values.update({ENDED: told}))
    later.start()
    code, _ = coordination.follow(ValueError("Gloo: Connection reset by peer"))
    later.join()
    assert code == 74


def test_a_process_whose_collective_fails_without_a_word_of_the_other_one_ends_with_70(monkeypatch):
    stand_in(monkeypatch)
    code, told = coordination.follow(ValueError("Gloo: Connection reset by peer"))
    assert code == 70
    assert told == "error: another process of the run is gone: Gloo: Connection reset by peer"
    lost = PeerLostError("process 1 of 2 has ended")
    lost.exit_code = ExitCode.BAD_DATA
    assert coordination.follow(lost)[0] == 65, "an answer that did not come has told it"


def test_a_guard_that_an_error_of_a_collective_ends_takes_over_the_code_and_notes_it_for_the_end(
    monkeypatch, capfd
):
    """Else the end of the program would be one with 0, which blames this process for an early end."""
    stand_in(monkeypatch, {ENDED: {"process": 1, "code": 74}})

    def loop():
        with Guard(num_steps=10):
            raise jax.errors.JaxRuntimeError("Gloo: Connection closed by peer")

    with pytest.raises(SystemExit) as end:
        loop()
    assert end.value.code == 74
    assert endings._codes == [74]
    assert "process 1 of 2 has ended with exit code 74" in capfd.readouterr().err


def test_a_process_follows_one_that_has_left_the_loop_with_a_final_code(monkeypatch, capfd):
    stand_in(monkeypatch, left(begun=3, code=65))
    assert ends_of_one_that_goes_on(3) == [65]
    said = capfd.readouterr().err
    assert "has left the training loop after step 3 with SystemExit(65)" in said
    assert "Its own message says why." in said


def test_a_process_that_has_left_the_loop_and_ended_is_followed_at_once(monkeypatch, capfd):
    """One that an exception ends leaves the loop before, where others may do so after the same step."""
    monkeypatch.setattr(coordination, "SECONDS_TO_LEAVE_FIRST", NEVER)
    stand_in(monkeypatch, left(begun=4) | {ENDED: {"process": 1, "code": 2}})
    assert ends_of_one_that_goes_on(3) == [2]
    assert "process 1 of 2 has ended with exit code 2" in capfd.readouterr().err


def test_who_waits_for_an_answer_follows_the_one_that_ended_though_a_third_one_goes_on(monkeypatch):
    values = {f"{ENDED}/0": {"process": 0, "code": 2}, GOES_ON: {"process": 1}}
    stand_in(monkeypatch, values, process=2, count=3)
    with pytest.raises(PeerLostError, match="process 0 of 3 has ended with exit code 2") as found:
        exchange("x", True, timeout_seconds=NEVER)
    assert exit_code_of(found.value) == 2


def test_a_process_waits_some_seconds_to_learn_why_another_one_has_left_the_loop(
    monkeypatch, capfd
):
    """A ``break`` and an error look alike until the ``with`` block of the run ends."""
    unknown = left(begun=3)[LEFT] | {"is_known": False}
    service = stand_in(monkeypatch, {LEFT: unknown})
    monkeypatch.setattr(coordination, "SECONDS_TO_LEAVE", 60.0)
    known = json.dumps(unknown | {"code": 2, "why": "ConfigError", "is_known": True})
    later = threading.Timer(0.3, lambda: service.values.update({LEFT: known}))
    later.start()
    assert ends_of_one_that_goes_on(3) == [2]
    assert "after step 3 with ConfigError, exit code 2, and" in capfd.readouterr().err
    stand_in(monkeypatch, {LEFT: unknown})
    assert ends_of_one_that_goes_on(3) == [70], "in the end it is not waited for"


def test_an_error_that_others_learn_of_while_they_tell_that_they_go_on_is_followed(
    monkeypatch, capfd
):
    """The loop is left before the error is known, at first with the code 0."""
    service = stand_in(monkeypatch, left(begun=3))
    known = left(begun=3, code=2)[LEFT] | {"why": "ConfigError"}
    learn = lambda process: service.values.update({LEFT: json.dumps(known)})
    monkeypatch.setattr(endings, "tell_that_this_goes_on", learn)
    assert ends_of_one_that_goes_on(3) == [2]
    said = capfd.readouterr().err
    assert "has left the training loop after step 3 with ConfigError, exit code 2, and" in said
    assert "Its own message says why." in said


# -- the end of process 0 ----------------------------------------------------------------------------------------------


def test_process_0_ends_once_the_others_are_gone(monkeypatch):
    service = stand_in(monkeypatch, {f"{GONE}/1": 2}, count=3)
    monkeypatch.setattr(endings, "SECONDS_TO_LINGER", WAIT_SECONDS)
    ends = []
    thread = threading.Thread(target=endings.end_now, args=[2, ends.append])
    thread.start()
    wait_until(lambda: f"{GONE}/0" in service.values)
    assert ends == [], "process 2 would be aborted"
    service.values[f"{GONE}/2"] = "2"
    thread.join(WAIT_SECONDS)
    assert ends == [2]


def test_process_0_waits_for_those_that_have_told_70(monkeypatch):
    stand_in(monkeypatch, {ENDED: {"process": 1, "code": 70}, f"{GONE}/1": 70}, count=3)
    assert coordination.follow(ValueError("Gloo: Connection reset by peer"))[0] == 70
    looks, looks_before_end = [], []

    def has_gone(process):
        looks.append(process)
        return process == 1 or looks.count(2) > 1

    monkeypatch.setattr(endings, "has_gone", has_gone)
    monkeypatch.setattr(endings, "SECONDS_TO_LINGER", WAIT_SECONDS)
    endings.end_now(70, lambda code: looks_before_end.append(looks.count(2)))
    assert looks_before_end == [2], "process 2 would be aborted"


def test_process_0_waits_for_none_that_is_gone_without_a_word(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(endings, "SECONDS_TO_LINGER", NEVER)
    ends = []
    endings.end_now_without_a_word(124, ends.append)
    assert ends == [124]


def test_a_process_outside_a_loop_ends_before_process_0_which_is_about_to_end(monkeypatch, capfd):
    values = {ENDED: {"process": 0, "code": 2, "seconds": 2}, f"{GONE}/0": 2}
    stand_in(monkeypatch, values, process=1)
    monkeypatch.setattr(endings, "SECONDS_TO_MEET", 0.02)
    ends = []
    watch = EndWatch(ends.append)
    watch.start()
    wait_until(lambda: ends)
    watch.stop()
    assert ends[0] == 2
    assert "process 0 of 2 has ended with exit code 2" in capfd.readouterr().err


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


def leave_by(error):
    """Leaves a loop by an error as the ``for`` of ``run.steps()`` does, which first tells that it is left."""

    def loop():
        with Guard(num_steps=10) as guard:
            guard.before_step(3)
            guard.leave_loop()
            raise error

    with pytest.raises((SystemExit, type(error))) as raised:
        loop()
    return raised.value


def test_the_others_learn_of_an_error_in_the_loop_and_its_code_before_the_script_ends(monkeypatch):
    service = stand_in(monkeypatch, process=1)
    leave_by(ConfigError("a row must have 3 numbers; got 2. Mend it."))
    told = json.loads(service.values[LEFT])
    assert (told["code"], told["why"], told["begun"]) == (2, "ConfigError", 4)


def test_a_process_whose_collective_failed_is_not_told_as_the_one_that_left(monkeypatch):
    service = stand_in(monkeypatch, {ENDED: {"process": 0, "code": 74}}, process=1)
    ended = leave_by(jax.errors.JaxRuntimeError("Gloo all-reduce failed: Connection closed"))
    assert ended.code == 74
    assert LEFT not in service.values


def test_an_error_is_shown_once_the_others_go_on_and_keeps_its_code_though_the_script_goes_on(
    monkeypatch, capfd
):
    """In a ``finally``, say, which may take longer than JAX lets this process live without process 0."""
    service = stand_in(monkeypatch, process=1)
    monkeypatch.setattr(endings, "SECONDS_TO_MEET", 0.02)
    error = leave_by(ConfigError("a row must have 3 numbers; got 2. Mend it."))
    ends = []
    watch = EndWatch(ends.append)
    watch.start()
    assert not endings.is_shown(error)
    service.values[GOES_ON] = json.dumps({"process": 0, "waits": ""})
    wait_until(lambda: endings.is_shown(error))
    assert ends == [], "process 0 is still there"
    service.values[f"{GONE}/0"] = "2"
    wait_until(lambda: ends)
    watch.stop()
    assert ends[0] == 2
    monkeypatch.setattr(distributed, "leave", ends.append)
    distributed._leave_on_error(type(error), error, error.__traceback__)
    said = capfd.readouterr().err
    assert said.count("ConfigError: a row must have 3 numbers") == 1, said
    assert "process 1 of 2 ends with exit code 2 though the script is not at its end" in said


def test_the_code_of_an_end_that_the_script_has_caught_is_forgotten_by_the_next_loop(monkeypatch):
    """As in a sweep, whose next run trains."""
    service = stand_in(monkeypatch, {"jaxpar/end/0/1": 3})

    def loop(steps, code):
        with AgreedStep(10) as agreed:
            agreed.after(steps)
            if code:
                raise SystemExit(code)

    with pytest.raises(SystemExit):
        loop(3, 86)
    assert endings._codes == [86]
    endings.leaves_with(86)
    service.values["jaxpar/end/1/1"] = "10"
    loop(10, 0)
    assert endings._codes == endings._leaving == []


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
import contextlib, time
import jaxpar
jaxpar.initialize()
import jax, jax.numpy as jnp, optax
from jaxpar.run import BasicFlags, Run

how, folder = sys.argv[1:3]
if how.startswith("before") and jax.process_index() == 1:
    sys.exit(65 if how == "before with a code" else 0)
mesh = jaxpar.make_mesh(data=2)
parallel = jaxpar.Parallel(mesh, jaxpar.shardings_from_paths({"w": jnp.ones(4)}, mesh, {"**": jaxpar.replicated()}))
loss = lambda out, batch: jaxpar.losses.squared_error(out, batch["y"])
grad = jaxpar.value_and_grad(lambda params, batch: batch["x"] @ params["w"], loss, parallel)
batch = jaxpar.shard_batch({"x": jnp.ones((4, 4)), "y": jnp.ones(4)}, mesh)
optimizer = optax.sgd(0.1)
last = contextlib.ExitStack()
with last, Run(BasicFlags.of(out_dir=Path(folder), steps=10**6), mesh) as run:
    run.restore(lambda key: {"w": jnp.ones(4)}, jax.random.key(0), optimizer, parallel)
    train_step = run.compile(jaxpar.make_train_step(grad, optimizer), batch)
    state = run.begin()
    for step in run.steps():
        if step == 3 and jax.process_index() == 1 and how == "break":
            break
        if step == 3 and jax.process_index() == 1 and how == "exit":
            sys.exit(0)
        if how.startswith("raise") and step == 3 and jax.process_index() == int(how[-1]):
            last.callback(time.sleep, float(sys.argv[3]))
            raise jaxpar.run.ConfigError("x must be y; got z. Write y.")
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


@pytest.mark.full
def test_of_two_real_processes_one_that_exits_before_the_loop_keeps_its_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ONE_LEAVES)
    launch = ("-m", "jaxpar", "launch", "-n", 2, "--log-dir", tmp_path / "logs")
    code, out, err = run(*launch, script, "before with a code", tmp_path / "run")
    assert code == 65, out + err
    assert "launch: process 1 of 2 ended first (exit code 65" in err, out + err
    assert "process 1 of 2 has ended with exit code 65" in (tmp_path / "logs" / "0.log").read_text()


EXITS = """
import atexit, contextlib, sys
from jaxpar.runtime import endings
endings.note_exits()
atexit.register(lambda: print(endings._codes))
def leave():
    sys.exit(3)
with contextlib.suppress(SystemExit):
    leave()
try:
    leave()
except SystemExit as error:
    assert error.code == 3
{end}
"""


@pytest.mark.parametrize(
    ("end", "codes"),
    [
        ("", []),
        ("sys.exit()", [0]),
        ("sys.exit(65)", [65]),
        ("sys.exit('no data')", [1]),
        ("try:\n    leave()\nfinally:\n    print('cleaned')", [3]),
    ],
)
def test_the_code_of_the_exit_that_ends_a_program_is_noted_and_none_that_was_caught(
    tmp_path, end, codes
):
    script = tmp_path / "script.py"
    script.write_text(EXITS.format(end=end))
    code, out, err = run(script)
    assert out.splitlines()[-1] == str(codes), out + err
    assert code == sum(codes), err


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(("first", "seconds"), [(1, 0), (1, WAIT_SECONDS), (0, 0)])
def test_of_two_real_processes_both_end_with_the_final_code_of_the_one_that_has_an_error(
    tmp_path, first, seconds
):
    """Also where the script does something for long before it ends."""
    script = tmp_path / "script.py"
    script.write_text(ONE_LEAVES)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAXPAR_RUN_TOKEN": "x",
        "PYTHONPATH": str(ROOT),
        **fake_devices(1),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, f"raise {first}", tmp_path / "run", str(seconds)],
            env=os.environ | variables | {"JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    said = [process.communicate(timeout=WAIT_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    assert "x must be y; got z. Write y." in said[first]
    other = said[1 - first]
    how = "left the training loop after step 3 with ConfigError," if seconds else "ended with"
    assert f"gone: process {first} of 2 has {how} exit code 2" in other, other
    assert "must end together" not in other, "it is not the one that ended first"
