"""A loop that ends before its last step: by a rule of its own, by break, or since its batches have run out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.metrics import read_metrics
from jaxpar.run import BasicFlags, Run
from jaxpar.run.call_order import CallOrderError
from tests.support.real_runs import run as run_of

BATCH = np.zeros(2, np.float32)
SCRIPT = """
from pathlib import Path
import jaxpar
jaxpar.initialize()
import jax, jax.numpy as jnp, numpy as np, optax, sys, time
from jaxpar.run import BasicFlags, Run
mesh = jaxpar.make_mesh(data=-1)
shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
grads = jax.value_and_grad(lambda params, batch: jnp.mean((params["w"] - batch["x"]) ** 2))
batch = jaxpar.shard_batch({"x": np.zeros((4, 2), np.float32)}, mesh)
jaxpar.runtime.meetings.SECONDS_TO_MEET = 0.5
with Run(BasicFlags.of(out_dir=Path(sys.argv[1]), steps=5000, **FLAGS), mesh) as run:
    run.restore(lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optax.sgd(0.1), mesh, shardings)
    train_step = run.compile(jaxpar.make_train_step(grads, optax.sgd(0.1)), batch)
    state = run.begin()
    for step in run.steps():
        state, metrics = train_step(state, batch)
        AT_STEP
        time.sleep(0.02)
        run.log(step, state, metrics)
print(run.checkpoints.latest() == step + 1, step < 4999)
"""


def left(flags, loop, **own):
    """What a run prints whose loop is ``loop(run, one_step)``, where ``one_step(step)`` trains and logs it with own metrics."""
    mesh, said = jaxpar.make_mesh(), []
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    grads = jax.value_and_grad(lambda params, batch: jnp.mean((params["w"] - batch) ** 2))
    with Run(flags, mesh, say=said.append) as run:
        run.restore(
            lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optax.sgd(0.1), mesh, shardings
        )
        train_step = run.compile(
            jaxpar.make_train_step(grads, optax.sgd(0.1)), jax.ShapeDtypeStruct((2,), "float32")
        )
        state = run.begin()

        def one_step(step):
            nonlocal state
            state, metrics = train_step(state, BATCH)
            run.log(step, state, metrics | own)

        loop(run, one_step)
        run.say_pace()
    return said


def short_of_batches(run, one_step):
    for step, _ in zip(run.steps(), range(3), strict=False):
        one_step(step)


def broken_off(run, one_step):
    for step in run.steps():
        one_step(step)
        if step == 2:
            break


def ended(run, one_step):
    for step in run.steps():
        if step == 2:
            run.end_early("good enough")
        one_step(step)


def test_a_loop_that_is_left_before_its_last_step_tells_what_no_checkpoint_has(tmp_path):
    told = left(
        BasicFlags.of(out_dir=tmp_path / "a", steps=10, checkpoint_every=2), short_of_batches
    )
    expected = (
        r"the loop was left after step 3 of 10, .*; the newest checkpoint is that of step 2, so none has "
        r"what followed it\. .* call run\.end_early\(reason\) before run\.log.* or choose steps=3\."
    )
    assert re.fullmatch(expected, told[-1]), told
    assert "2 steps in" in told[-2], "the pace of the steps that are written"
    *_, told = left(BasicFlags.of(out_dir=tmp_path / "b", steps=10), broken_off)
    assert "; there is no checkpoint. " in told
    assert "checkpoint_every=100 makes it save" in told


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1.0])
def test_a_run_whose_best_metric_is_never_finite_says_that_none_is_the_best(tmp_path, value):
    def all_steps(run, one_step):
        for step in run.steps():
            one_step(step)

    flags = BasicFlags.of(out_dir=tmp_path, steps=2, checkpoint_every=1, keep_best="-psnr")
    told = left(flags, all_steps, psnr=value)
    said = [line for line in told if line.startswith("no checkpoint has a finite psnr, so none is")]
    assert len(said) == (value != 1.0)


def test_a_loop_ends_early_by_a_rule_of_its_own_with_its_last_step_saved(tmp_path):
    calls = []

    def ended_with_calls(run, one_step):
        run.every(2, lambda step, *_: calls.append((step, run.checkpoints.latest())))
        run.every(3, lambda step, *_: calls.append((step, "thirds")))
        ended(run, one_step)

    told = left(BasicFlags.of(out_dir=tmp_path, steps=10, checkpoint_every=50), ended_with_calls)
    assert calls == [(2, None), (3, "thirds"), (3, None)], (
        "after the last step too, once, before it is saved"
    )
    assert [line for line in told if "step 3" in line] == ["ended early at step 3: good enough"]
    assert not any("was left" in line for line in told)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert (tmp_path / "checkpoints" / "3").is_dir()
    flags = BasicFlags.of(out_dir=tmp_path / "b")
    with (
        pytest.raises(CallOrderError, match="must begin before its steps"),
        Run(flags, jaxpar.make_mesh()) as run,
    ):
        run.end_early("too soon")


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(0)])
def test_an_error_or_exit_in_a_loop_is_not_told_as_a_break(tmp_path, error, capsys):
    run = Run(BasicFlags.of(out_dir=tmp_path), jaxpar.make_mesh())
    run._order.begin(run.flags, 0)
    run.__exit__(type(error), error, None)
    assert "was left" not in capsys.readouterr().out


def of_two_processes(folder, at_step, **keep):
    """The exit code and the output of a script that runs ``at_step`` in each step; its checkpoints are kept as flags say."""
    flags = {"checkpoint_every": 5000} | keep
    text = SCRIPT.replace("AT_STEP", at_step).replace("FLAGS", repr(flags))
    (folder / "train.py").write_text(text)
    launch = ["-m", "jaxpar", "launch", "-n", "2", "--devices-per-process", "1", "--log-dir"]
    return run_of(*launch, folder, folder / "train.py", folder / "run")


@pytest.mark.full
def test_one_of_two_processes_ends_the_loop_of_both(tmp_path):
    at_step = 'if step == 3 and jax.process_index() == 1: run.end_early("seen enough")'
    code, out, err = of_two_processes(tmp_path, at_step)
    assert code == 0, out + err
    assert "True True" in out
    assert ": seen enough" in out


@pytest.mark.full
@pytest.mark.parametrize("process", [0, 1])
def test_a_metric_for_patience_that_one_of_two_processes_has_ends_both(tmp_path, process):
    at_step = f'if jax.process_index() == {process}: metrics["test_loss"] = 1.0'
    code, out, err = of_two_processes(tmp_path, at_step, keep_best="test_loss", patience=2)
    assert code == 2, out + err
    message = "all processes must give run.log the metric test_loss in the same steps; got a call in process"
    assert f"{message} {process} in step 0 of its training loop" in out + err
    assert "Add it to the metrics of each." in out + err


@pytest.mark.full
def test_the_metric_of_the_best_checkpoint_is_the_same_in_both_processes(tmp_path):
    at_step = 'metrics["test_loss"] = float(jax.process_index())'
    code, out, err = of_two_processes(
        tmp_path, at_step, keep_best="test_loss", keep=1, checkpoint_every=2
    )
    assert code == 2, out + err
    assert "must agree on their test_loss before they save; got 1.0 on process 1, 0.0" in out + err
