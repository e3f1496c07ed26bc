"""What a loop of one's own gives to its run: each argument of another kind is told before anything is compiled or written."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.data.same_batch import check_on_mesh
from jaxpar.run import BasicFlags, Run
from jaxpar.run.call_order import CallOrderError
from jaxpar.runtime import coordination, meetings
from jaxpar.runtime.coordination import PeerLostError
from jaxpar.runtime.meetings import meet

BATCH = {"x": np.zeros((4, 2), np.float32)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flags": {"keep": 1.5}}, "keep must be a whole number; got 1.5."),
        ({"flags": {"keep_best": 3}}, "keep_best must be a text; got 3. Put it in quotes, or leave it out."),
        ({"flags": {"allow_change": "lr"}}, "allow_change must be a tuple of texts; got 'lr'. Write (\"learning_rate\",)"),
        ({"flags": {"out_dir": None}}, "out_dir must be a path; got None."),
        ({"flags": {"profile": 3}}, "profile must be a text; got 3. Put it in quotes."),
        ({"say": None}, "say of a run must be a function; got None. Leave it out, or give one such as print."),
        ({"samples": 3}, "samples of a run must be a function; got 3."),
        ({"items_per_step": "4"}, "items_per_step must be a number; got '4'."),
        ({"learning_rate": "1e-3"}, "learning_rate must be a number, or a schedule of optax; got '1e-3'."),
        ({"settings": ["lr"]}, "settings must be a dict by name; got ['lr']."),
        ({"settings": {"lr": math.nan}}, "a setting must be equal to itself, by which a run that resumes compares it; got lr"),
        ({"settings": {"betas": [0.9, math.nan]}}, "got betas with nan. Give None, or the number that was meant."),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_told_before_a_folder_is_made(tmp_path, arguments, message):
    flags = {"out_dir": tmp_path / "run"} | arguments.pop("flags", {})
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Run(BasicFlags.of(**flags), jaxpar.make_mesh(), **arguments)
    assert not (tmp_path / "run").exists()
    with pytest.raises(TypeError, match=r"must be those of BasicFlags\.of; got a dict\. Write"):
        Run({"steps": 3}, jaxpar.make_mesh())


def test_a_loop_that_compiles_logs_or_steps_with_something_else_is_told(tmp_path):
    mesh = jaxpar.make_mesh()
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    grads = jax.value_and_grad(lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2))
    step = jaxpar.make_train_step(grads, optax.sgd(0.1))
    with Run(BasicFlags.of(out_dir=tmp_path), mesh) as run:
        run.restore(
            lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optax.sgd(0.1), mesh, shardings
        )
        for wrong, got in (
            (grads, "a function"),
            (None, "a NoneType"),
            (jax.jit(lambda s, b: (1, b)), "one that returns no s"),
        ):
            with pytest.raises(
                TypeError,
                match=rf"a run compiles a training step, .*; got {got}.*Make it with jaxpar\.make_t",
            ):
                run.compile(wrong, BATCH)
        with pytest.raises(TypeError, match="real- or complex-valued inputs") as told:
            run.compile(jax.jit(grads), BATCH)
        assert "a run compiles a training step" in str(told.value.__notes__)
        with pytest.raises(
            TypeError, match=r"a batch must be arrays; got a generator, which yields some"
        ):
            run.compile(step, (BATCH for _ in range(3)))
        train_step = run.compile(step, BATCH)
        with pytest.raises(
            TypeError, match=r"what run\.every calls must be a function; got 'save'\."
        ):
            run.every(3, "save")
        state = run.begin()
        number = next(run.steps())
        with pytest.raises(
            CallOrderError, match=r"called before their loop; got it after run.steps"
        ):
            run.every(3, lambda *given: None)
        new, metrics = train_step(state, BATCH)
        donated = r"a step donates its state, .*: jaxpar\.fetch\(state\.params\)\."
        for use in (
            lambda: train_step(state, BATCH),
            lambda: run.log(number, state, metrics),
            lambda: jaxpar.fetch(state),
        ):
            with pytest.raises(ValueError, match=donated):
                use()
        with pytest.raises(
            ValueError,
            match=r"must have its loss, .*; got accuracy\. Give .*: metrics \| {\.\.\.}\.",
        ):
            run.log(number, new, {"accuracy": 1.0})
    with pytest.raises(
        TypeError,
        match=r"a batch must be arrays; got a generator, which yields some\. .*: next\(batches\)",
    ):
        jaxpar.shard_batch((BATCH for _ in range(3)), mesh)


class Service:
    """The coordination service as process 0 of two sees it."""

    def __init__(self, comes):
        self.comes, self.told = comes, []

    def key_value_set(self, key, value):
        self.told.append(key)

    def key_value_delete(self, key):
        self.told.append(f"no {key}")

    def blocking_key_value_get(self, key, milliseconds):
        if not self.comes:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return ""


def test_a_process_that_meets_others_alone_says_what_it_waits_for(monkeypatch, capfd):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(meetings, "SECONDS_TO_MEET", 0.0)
    service = Service(comes=True)
    monkeypatch.setattr(coordination, "client", lambda: service)
    for _ in range(2):
        meet("here", "a rule", "A remedy.")
    assert service.told == ["jaxpar/here/0/0", "jaxpar/here/1/0", "no jaxpar/here/0/0"]
    service.comes = False
    monkeypatch.setattr(coordination, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(
        PeerLostError, match=r"a rule; got process 1 must answer within 0\.2 s; .*\. A remedy\."
    ):
        meet("here", "a rule", "A remedy.")
    assert "a rule; process 0 has waited 0 s for the others. A remedy." in capfd.readouterr().err


def test_an_evaluation_meets_the_other_processes_once(monkeypatch):
    mesh, met = jaxpar.make_mesh(data=2, devices=jax.devices()[:2]), []
    monkeypatch.setattr("jaxpar.sharding.meet", lambda name, rule, remedy: met.append(name))
    loss = lambda outputs, batch: (jnp.sum(outputs), jnp.float32(len(outputs)))
    eval_step = jaxpar.make_eval_step(lambda params, batch: batch["x"] @ params["w"], loss, mesh)
    params, batch = {"w": jnp.ones(2)}, jaxpar.shard_batch(BATCH, mesh)
    eval_step(params, batch)
    assert met == []
    monkeypatch.setattr("jaxpar.sharding._spans_processes", lambda params: True)
    eval_step(params, batch)
    eval_step(params, batch)
    assert met == ["evaluate"]


def test_a_batch_of_one_process_is_no_batch_of_a_mesh_of_several(monkeypatch):
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    check_on_mesh(BATCH, mesh)
    monkeypatch.setattr("jaxpar.data.same_batch._is_of_one", lambda mesh: False)
    check_on_mesh(jax.eval_shape(lambda: BATCH), mesh)
    for batch in (BATCH, jax.device_put(BATCH)):
        with pytest.raises(
            TypeError,
            match=r"must be on the mesh, .*; got x, an array of this process alone\. Put it there:",
        ):
            check_on_mesh(batch, mesh)
