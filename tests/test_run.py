"""A run in a loop of one's own: what it refuses, and what it prints by."""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import re
import subprocess
import sys
import types
from enum import Enum
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.checkpoint.manifest import plain_json
from jaxpar.fields import given_by
from jaxpar.metrics import follow, read_metrics
from jaxpar.metrics.log import MetricsLog
from jaxpar.report import read_run, render_page
from jaxpar.run import BasicFlags, ConfigError, Run, folder
from jaxpar.run.call_order import CallOrder, CallOrderError
from jaxpar.run.early_stop import EarlyStop, check_best_is_saved
from jaxpar.run.evaluation import say_best
from jaxpar.run.kept_numbers import describe, kept_numbers
from jaxpar.run.learning_rate import remark_on_rate
from jaxpar.run.messages import remark_on_first_step, say, say_written
from jaxpar.run.optimizer_numbers import numbers_of
from jaxpar.run.start import advice_on_finite_steps, check_processes, first_state
from jaxpar.run.traits import Traits
from jaxpar.runtime.lease import this_process
from jaxpar.runtime.life import LifeWatch
from jaxpar.runtime.output import logging_kept
from jaxpar.runtime.uncaught import exit_code_of
from tests.support.leases import put
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -4}, "steps must be at least 1; got -4"),
        ({"checkpoint_every": -1}, "checkpoint_every must be at least 0; got -1"),
        (
            {"patience": 3},
            "patience waits for a better metric of keep_best; got 3 and no metric. Name it, such as keep_best",
        ),
        (
            {"keep_best": "loss"},
            "keep_best keeps the best of the checkpoints; got loss, and no checkpoints. Add",
        ),
        ({"max_skipped": -1}, "max_skipped must be at least 0; got -1"),
    ],
)
def test_flags_that_no_command_line_has_checked_are_checked(tmp_path, wrong, message):
    flags = BasicFlags.of(out_dir=tmp_path / "run", **wrong)
    with pytest.raises(ValueError, match=message):
        Run(flags, jaxpar.make_mesh())
    assert not (tmp_path / "run").exists()


def test_an_import_leaves_the_root_logger_as_it_was():
    before = logging.root.handlers[:]
    with logging_kept():
        logging.root.addHandler(logging.NullHandler())
    assert logging.root.handlers == before


def test_processes_that_begin_with_different_params_are_refused(monkeypatch):
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    everywhere = jax.sharding.NamedSharding(mesh, jaxpar.replicated())
    parts = [
        jax.device_put(jnp.full(4, value), device)
        for value, device in zip((1, 2), mesh.devices.flat, strict=True)
    ]
    apart = jax.make_array_from_single_device_arrays((4,), everywhere, parts)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ConfigError,
        match=r"begin with the same state; got other values in w. Draw params from a key",
    ):
        first_state(lambda: {"w": apart, "b": jax.device_put(jnp.ones(4), everywhere)})


def test_a_run_of_ones_own_is_told_how_to_go_on_in_its_own_words(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path, checkpoint_every=2)
    with Run(flags, jaxpar.make_mesh()) as run:
        advice = advice_on_finite_steps(run._remedy, run._settings)
        assert (
            "with another, add resume=True. To begin again, add overwrite=True. If it ends so again, look at"
            in advice
        )
    names = {"resume": "--resume", "overwrite": "--overwrite", "allow_change": "--allow-change"}
    with Run(flags, jaxpar.make_mesh(), {"learning_rate": 0.1}) as run, given_by(names):
        assert (
            "another, add --resume --allow-change learning_rate. To begin again, add --overwrite."
            in advice_on_finite_steps(run._remedy, run._settings)
        )


def test_errors_of_a_run_to_resume_name_the_arguments_of_a_script_that_has_no_flags(tmp_path):
    mesh, flags = (
        jaxpar.make_mesh(),
        BasicFlags.of(out_dir=tmp_path / "run", steps=4, checkpoint_every=2),
    )
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    target = lambda key: {"w": jnp.ones(2)}

    def refused(settings=None, **changes):
        with (
            pytest.raises((ValueError, OSError, ConfigError)) as told,
            Run(flags.replace(**changes), mesh, settings) as run,
        ):
            run.restore(target, jax.random.key(0), optax.sgd(0.1), mesh, shardings)
        assert "--" not in str(told.value)
        return str(told.value)

    assert refused(resume=True).startswith("resume=True needs a checkpoint; got none in ")
    assert refused(resume=True).endswith(
        "Name a run's folder by out_dir, or leave resume out to begin one."
    )
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    assert refused(resume=True).endswith(
        "leave resume out to begin one, with overwrite=True for metrics.jsonl of 1 steps."
    )
    (tmp_path / "run" / "metrics.jsonl").unlink()
    state = jaxpar.init_state(target, jax.random.key(0), optax.sgd(0.1), mesh, shardings)
    state = dataclasses.replace(state, step=state.step + 2)
    jaxpar.CheckpointManager(tmp_path / "run" / "checkpoints", mesh).save(
        state, config={"rate": 0.1}
    )
    assert "Choose steps=2 or more: it counts" in refused(resume=True, steps=1)
    assert "got rate=0.2 (saved: 0.1)" in refused({"rate": 0.2}, resume=True)
    assert "allow these to change (allow_change=('rate',) of a Run's flags" in refused(
        {"rate": 0.2}, resume=True
    )
    assert (
        "Continue it with resume=True, choose another out_dir, or add overwrite=True" in refused()
    )
    assert refused(resume=True, overwrite=True).startswith(
        "overwrite=True deletes the earlier run, which resume=True"
    )
    assert refused(nodes=2) == "nodes applies to compile_for; got none. Add compile_for=h100, say."


def began(run, batch):
    """The compiled step and the first state of a run, which reads the column "x" alone."""
    shardings = {"w": jax.NamedSharding(run.mesh, jaxpar.replicated())}
    grads = jax.value_and_grad(lambda params, batch: jnp.sum((batch["x"] @ params["w"] - 1) ** 2))
    run.restore(
        lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optax.sgd(0.1), run.mesh, shardings
    )
    return run.compile(jaxpar.make_train_step(grads, optax.sgd(0.1)), batch), run.begin()


def test_a_batch_unlike_the_one_of_the_compiled_step_is_told_by_its_arrays(tmp_path):
    two, said = jaxpar.make_mesh(data=2, devices=jax.devices()[:2]), []
    rows = lambda num_rows, **more: {"x": np.ones((num_rows, 2), np.float32), **more}
    with Run(BasicFlags.of(out_dir=tmp_path), two, say=said.append) as run:
        train_step, state = began(
            run, jaxpar.shard_batch(rows(4, weight=np.ones(4, np.float32)), two)
        )
        kept = rows(4, weight=np.ones(4, np.float32))
        for batch, got in [
            (
                rows(6, weight=np.ones(6, np.float32)),
                r"got weight float32\[6\] for float32\[4\], x float32\[6, 2\] for",
            ),
            (rows(4), r"got no weight\."),
            (kept | {"y": np.ones(4)}, r"got y, which that one does not have\."),
            (
                jaxpar.shard_batch(kept, jaxpar.make_mesh(tensor=2, devices=jax.devices()[:2])),
                "got weight on a mesh of tensor=2 for a mesh of data=2",
            ),
        ]:
            with pytest.raises(
                ValueError, match=f"arrays, shapes, dtypes and mesh of the one .*; {got}"
            ):
                train_step(state, batch)
        _, metrics = train_step(state, jaxpar.shard_batch(kept, two))
    assert metrics["loss"] == 4
    assert said[-2].endswith(
        "neither the model nor the loss reads weight of a batch, which is 0 for rows of padding: multiply their losses by it"
    )


def test_a_loop_that_does_not_log_its_steps_is_refused_since_it_would_save_none(tmp_path):
    batch = {"x": np.ones((4, 2), np.float32)}
    with Run(BasicFlags.of(out_dir=tmp_path, checkpoint_every=1), jaxpar.make_mesh()) as run:
        train_step, state = began(run, batch)
        steps = run.steps()
        for step in range(2):
            assert next(steps) == step
            state, metrics = train_step(state, batch)
            if step == 0:
                run.log(step, state, metrics)
        with pytest.raises(
            CallOrderError,
            match=r"each step must be logged once, .*; got none for step 2\. Call run\.log",
        ) as told:
            next(steps)
        for other in (0, 2):
            with pytest.raises(
                CallOrderError,
                match=rf"number that run\.steps yields, .*; got {other} for step 1\. Call",
            ):
                run.log(other, state, metrics)
    assert exit_code_of(told.value) == 2


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [({}, True), ({"steps": 5}, False), ({"checkpoint_minutes": 9.0}, False)],
)
def test_a_run_whose_first_checkpoint_would_come_after_its_end_says_so(tmp_path, changes, is_told):
    said, flags = [], BasicFlags.of(out_dir=tmp_path, steps=4, checkpoint_every=5)
    with Run(flags.replace(**changes), jaxpar.make_mesh(), say=said.append) as run:
        began(run, {"x": np.ones((4, 2), np.float32)})
    told = "checkpoint_every=5 is more than steps=4: nothing is saved before the last step, unless the run is asked to stop"
    assert (told in said) == is_told


def test_a_loop_of_other_steps_than_those_of_its_state_is_refused_or_told(tmp_path):
    batch, said = {"x": np.ones((4, 2), np.float32)}, []
    flags = BasicFlags.of(out_dir=tmp_path / "a", steps=4, checkpoint_every=2)
    with Run(flags, jaxpar.make_mesh(), say=said.append) as run:
        train_step, state = began(run, batch)
        state, metrics = train_step(state, batch)
        with pytest.raises(
            CallOrderError, match=r"got run\.log before run\.steps\. Write `for step in run\.steps"
        ):
            run.log(0, state, metrics)
        assert next(run.steps()) == 0
        state, metrics = train_step(state, batch)
        with pytest.raises(
            CallOrderError,
            match=r"training step once, .*; got a state of step 2 after step 0\. Call it",
        ):
            run.log(0, state, metrics)
    flags = flags.replace(out_dir=tmp_path / "b")
    with Run(flags, jaxpar.make_mesh(), say=said.append) as run:
        train_step, state = began(run, batch)
        for step in run.steps():
            if step != 1:
                state, metrics = train_step(state, batch)
            run.log(step, state, metrics)
    [told] = [line for line in said if line.startswith("the state has 1 steps after 2 of the loop")]
    assert "a resume from its checkpoint goes on at step 1 of the loop" in told


def test_a_mesh_that_leaves_out_a_process_is_refused_before_it_trains(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    there = [types.SimpleNamespace(process_index=number) for number in (0, 1)]
    monkeypatch.setattr(jax, "devices", lambda: there)
    own = types.SimpleNamespace(devices=np.array(there[:1]))
    with pytest.raises(
        ConfigError, match=r"got a mesh of 1 of 2 devices, which leaves out process \[1\]"
    ):
        check_processes(own, BasicFlags.of(), {}, {})


@pytest.mark.parametrize("flag", [{"dry_run": True}, {"compile_for": "h100"}])
def test_a_loop_trains_nothing_where_it_is_asked_to_write_nothing(tmp_path, flag):
    with pytest.raises(
        CallOrderError,
        match=rf"a run with {next(iter(flag))} trains nothing and writes nothing; got run\.begin",
    ):
        trained(BasicFlags.of(out_dir=tmp_path, **flag), optax.sgd(0.1), settings={"rate": 0.1})
    assert not list(tmp_path.glob("**/metrics.jsonl"))


def test_flags_of_a_script_have_their_kinds(tmp_path):
    for flag, rule in (
        ({"overwrite": "no"}, "overwrite must be a bool; got 'no'"),
        ({"steps": 1.5}, "steps must be a whole"),
    ):
        with pytest.raises(TypeError, match=rule):
            Run(BasicFlags.of(out_dir=str(tmp_path), **flag), jaxpar.make_mesh())
    with pytest.raises(
        TypeError,
        match=r"budget must be its flags together; got 3\. Write budget=Budgets\(\.\.\.\)\.",
    ):
        BasicFlags.of(budget=3)


def test_a_restarted_script_goes_on_from_its_checkpoint_although_it_may_overwrite(
    tmp_path, monkeypatch
):
    flags = BasicFlags.of(out_dir=tmp_path, steps=1, checkpoint_every=1, overwrite=True)
    for restarted, said in (("", []), ("if-any", ["resumed from step 1, saved on"])):
        monkeypatch.setenv("JAXPAR_RESUME", restarted)
        told = trained(flags, optax.sgd(0.1), settings={"rate": 0.1})
        assert [line[:29] for line in told] == said


def test_a_setting_that_no_other_process_could_have_is_refused(tmp_path):
    with pytest.raises(
        TypeError,
        match=r"a setting must be .*; got f=<function .* Give its name, such as f='squared_error'",
    ):
        Run(
            BasicFlags.of(out_dir=tmp_path),
            jaxpar.make_mesh(),
            {"f": jaxpar.losses.squared_error, "rate": 0.1},
        )
    with pytest.raises(TypeError, match=r"a setting must be a number, .* compares; got w="):
        Run(BasicFlags.of(out_dir=tmp_path), jaxpar.make_mesh(), {"w": np.arange(5000)})


@dataclasses.dataclass(frozen=True)
class Weighted:
    weights: object
    rate: float = 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Weighted(np.ones(3)),
        lambda: {"data": [Weighted(jnp.ones(3))]},
        lambda: np.random.default_rng(0),
        lambda: np.random.RandomState(0),
        lambda: jax.random.key(0),
        lambda: types.SimpleNamespace(t=np.arange(5000)),
    ],
)
def test_a_setting_whose_text_leaves_out_what_it_holds_is_refused(tmp_path, make):
    with pytest.raises(TypeError, match=r"a setting must be a number, .* compares; got w="):
        Run(BasicFlags.of(out_dir=tmp_path), jaxpar.make_mesh(), {"w": make()})


@dataclasses.dataclass(frozen=True)
class Hidden:
    rate: float = dataclasses.field(repr=False)


def test_a_field_that_a_text_leaves_out_is_compared(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path, steps=1, checkpoint_every=1)
    names = frozenset({"a", "b", "c"})
    given = lambda rate: {"hidden": Hidden(rate), "names": Weighted(names)}
    assert trained(flags, optax.sgd(0.1), settings=given(0.1)) == []
    more = flags.replace(resume=True, steps=2)
    with pytest.raises(ValueError, match=r"hidden=.*'rate': 0.2.* \(saved: .*'rate': 0.1"):
        trained(more, optax.sgd(0.1), settings=given(0.2))
    plain = plain_json({"names": Weighted(names)})
    assert plain == {"names": {"Weighted": {"weights": ["a", "b", "c"], "rate": 0.1}}}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (lambda step: np.int64(4 * step), None),
        (
            lambda step: 4.0 * step + 0.5,
            "samples .* must be an integer; got 0.5. Give samples, settings",
        ),
        (lambda step: jnp.ones(2), "what is saved beside a state must be JSON; got other values"),
    ],
    ids=["of NumPy", "a fraction", "an array"],
)
def test_what_could_not_be_saved_is_told_before_the_first_step(tmp_path, samples, message):
    flags, mesh = BasicFlags.of(out_dir=tmp_path, steps=1), jaxpar.make_mesh()
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    grads = jax.value_and_grad(lambda params, batch: jnp.sum(params["w"] * batch))
    with Run(flags, mesh, {"a": 1}, samples=samples) as run:
        run.restore(
            lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optax.sgd(0.1), mesh, shardings
        )
        run.compile(jaxpar.make_train_step(grads, optax.sgd(0.1)), jnp.zeros(2))
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            run.begin()
            next(run.steps())


def test_samples_may_be_those_of_a_loader_that_is_made_after_the_run_has_begun(tmp_path):
    flags, mesh = BasicFlags.of(out_dir=tmp_path, steps=2, checkpoint_every=1), jaxpar.make_mesh()
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    grads = jax.value_and_grad(lambda params, batch: jnp.sum(params["w"] * batch))
    loader = {}
    with Run(flags, mesh, {"a": 1}, samples=lambda step: loader["rows"] + step) as run:
        run.restore(
            lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optax.sgd(0.1), mesh, shardings
        )
        train_step = run.compile(jaxpar.make_train_step(grads, optax.sgd(0.1)), jnp.zeros(2))
        state = run.begin()
        loader["rows"] = run.origin.samples + 40
        for step in run.steps():
            state, metrics = train_step(state, jnp.zeros(2))
            run.log(step, state, metrics)
    assert run.checkpoints.manifest(2).samples == 42


@dataclasses.dataclass
class Unset:
    rate: float = 0.1
    warm: float = dataclasses.field(init=False)


def test_settings_that_hold_themselves_are_refused_and_fields_that_are_not_set_left_out(tmp_path):
    assert plain_json({"of": Unset()}) == {"of": {"Unset": {"rate": 0.1}}}
    around = argparse.Namespace(rate=0.1)
    around.parent = around
    with pytest.raises(TypeError, match=r"got one that holds itself: of\. Give the numbers"):
        Run(BasicFlags.of(out_dir=tmp_path), jaxpar.make_mesh(), {"rate": 0.1, "of": around})


def test_settings_of_plain_values_are_taken_in_dataclasses_and_enums_too(tmp_path):
    kind = Enum("kind", "ONE TWO")
    taken = {"a": Weighted((1.0, None)), "b": kind.ONE, "c": jnp.float32, "d": np.dtype("int8")}
    more = {"e": Path("a"), "f": types.SimpleNamespace(x=1), "g": float, "h": jnp.float32(2)}
    more |= {"i": jax.sharding.PartitionSpec("data"), "j": jaxpar.make_mesh()}
    with Run(BasicFlags.of(out_dir=tmp_path), jaxpar.make_mesh(), taken | more) as run:
        assert run.out_dir == tmp_path


def test_a_misspelt_flag_of_a_script_is_named():
    with pytest.raises(
        TypeError,
        match=r"must be of a flag; got log_second, budgets\. Did you mean log_seconds, budget\?",
    ):
        BasicFlags.of(log_second=3, budgets=3)
    with pytest.raises(TypeError, match=r"got foo\. Choose from allow_change, .*steps"):
        BasicFlags.of(foo=3)
    with pytest.raises(
        TypeError, match=r"got tensor\. Did you mean mesh=MeshFlags\(tensor=\.\.\.\)\?"
    ):
        BasicFlags.of(tensor=2)


def trained(flags, optimizer, num_rows=4, settings=None, steps=2):
    """What a run of a script of one's own prints."""
    mesh, said = jaxpar.make_mesh(), []
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    grads = jax.value_and_grad(lambda params, batch: jnp.sum((batch["x"] @ params["w"] - 1) ** 2))
    batch = {"x": np.zeros((num_rows, 2), np.float32)}
    with Run(flags, mesh, settings, say=said.append) as run:
        run.restore(lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optimizer, mesh, shardings)
        train_step = run.compile(jaxpar.make_train_step(grads, optimizer), batch)
        state = run.begin()
        for step in run.steps():
            state, metrics = train_step(state, batch)
            run.log(step, state, metrics)
    return [line for line in said if "saved run" in line or "no step is left" in line]


@pytest.fixture
def packed_run(tmp_path):
    """The arguments of a run's ``restore`` for three layers on two stages, but for the optimizer."""
    mesh, layout = jaxpar.make_mesh(stage=2, devices=jax.devices()[:2]), jaxpar.LayerLayout(3, 2)
    init = lambda key: {"outer": {}, "layers": layout.pack({"w": np.ones((3, 4, 4), np.float32)})}
    rules = {"layers/w": jax.P("stage")}
    shardings = jaxpar.shardings_from_paths(jax.eval_shape(init, 0), mesh, rules)
    flags = BasicFlags.of(out_dir=tmp_path / "out", steps=2)
    place = mesh, shardings
    with Run(flags, mesh, say=print) as run:
        yield lambda optimizer: run.restore(init, jax.random.key(0), optimizer, *place)


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_training(packed_run):
    packed_run(optax.adam(0.1))
    with pytest.raises(
        ValueError, match=r"^optimizer state of packed layers must be of each layer"
    ):
        packed_run(optax.sm3(0.1))


def test_labels_of_packed_layers_in_a_dict_are_told_how_to_be_written(packed_run):
    kinds = {"decay": optax.adamw(0.1), "no": optax.adam(0.1)}
    labels = lambda of_layers: lambda params: {"outer": {}, "layers": of_layers}
    packed_run(optax.multi_transform(kinds, labels("decay")))
    with pytest.raises(ValueError, match="pytree") as failed:
        packed_run(optax.multi_transform(kinds, labels({"w": "decay"})))
    assert any('one for all layers: {"layers": "decay"}' in note for note in failed.value.__notes__)


@pytest.mark.parametrize("resume", [False, True])
def test_a_killed_run_is_still_known_as_killed_after_a_start_that_is_refused(tmp_path, resume):
    """As one without --resume is, and one that resumes with other settings."""
    flags = BasicFlags.of(out_dir=tmp_path, steps=2, checkpoint_every=1)
    trained(flags, optax.sgd(0.1), settings={"rows": 4})
    assert LifeWatch(tmp_path).look().state == "ended"
    put(tmp_path, dataclasses.replace(this_process(), start="0", token="another"), 9)
    with pytest.raises(ValueError, match=r"new run needs a folder|rows"):
        trained(flags.replace(resume=resume), optax.sgd(0.1), settings={"rows": 5})
    assert LifeWatch(tmp_path).look().state == "killed"
    trained(flags.replace(resume=True, steps=3), optax.sgd(0.1), settings={"rows": 4})
    assert LifeWatch(tmp_path).look().state == "ended"


@pytest.mark.parametrize("is_left_out", [True, False])
def test_metrics_of_some_steps_alone_are_told_to_need_an_evaluation(tmp_path, is_left_out):
    mesh, said = jaxpar.make_mesh(), []
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    grads = jax.value_and_grad(lambda params, batch: jnp.sum(params["w"] * batch))
    flags, optimizer = BasicFlags.of(out_dir=tmp_path, steps=6), optax.sgd(0.1)
    with Run(flags, mesh, {"a": 1}, say=said.append) as run:
        run.restore(lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optimizer, mesh, shardings)
        train_step = run.compile(jaxpar.make_train_step(grads, optimizer), jnp.zeros(2))
        state = run.begin()
        for step in run.steps():
            state, metrics = train_step(state, jnp.zeros(2))
            if step % 2 == 0:  # at the first step too
                with run.evaluation(metrics) if is_left_out else contextlib.nullcontext():
                    metrics |= {"test_loss": 0.5}
            run.log(step, state, metrics)
    told = [line for line in said if "the one before had not: test_loss. If an evaluation" in line]
    assert len(told) == (0 if is_left_out else 1)


def test_a_step_is_timed_before_anything_waits_for_the_next_one(tmp_path, monkeypatch):
    """The number of steps of a state is read where a checkpoint is due, and waits for the step that made it."""
    events = []
    flushed, checked = MetricsLog.flush, CallOrder.check_state

    def flush(log, *following):
        if log._pending is not None:
            events.append(("written", log._pending[0]))
        flushed(log, *following)

    def check_state(order, step, done, say):
        events.append(("waited for", step))
        checked(order, step, done, say)

    monkeypatch.setattr(MetricsLog, "flush", flush)
    monkeypatch.setattr(CallOrder, "check_state", check_state)
    trained(BasicFlags.of(out_dir=tmp_path, steps=4, checkpoint_every=2), optax.sgd(0.1))
    assert [each for each in events if each[0] == "waited for"] == [
        ("waited for", step) for step in (0, 1, 3)
    ]
    for step in (1, 3):
        assert events.index(("written", step - 1)) < events.index(("waited for", step))


def test_a_resume_tells_what_differs_from_the_saved_run_and_what_it_cannot_compare(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path / "a", steps=2, checkpoint_every=1)
    more = flags.replace(resume=True, steps=3)
    assert trained(flags, optax.adam(1e-2)) == []
    differs, rest = trained(more, optax.adam(5e-3))
    assert differs.startswith(
        "the optimizer is not that of the saved run: its update computes with -0.005 where that of the saved one has -0.01."
    )
    assert rest.startswith(
        "not compared with the saved run, since Run has no settings: the data, the model and the loss. Give"
    )
    rest, differs = trained(more.replace(steps=4), optax.adam(5e-3), num_rows=8)
    assert differs.startswith(
        "a batch is not what it was in the saved run: x float32[8, 2], saved float32[4, 2]. Give what"
    )
    again, kept = (
        BasicFlags.of(out_dir=tmp_path / "b", steps=2, checkpoint_every=1),
        {"batch_size": 4},
    )
    trained(again, optax.adam(1e-2), settings=kept)
    [over] = trained(again.replace(resume=True), optax.adam(1e-2), settings=kept)
    assert over.startswith(
        "resumed from step 2, saved on data=1, stage=1, tensor=1, the last one, so no step is left"
    )
    assert (
        trained(again.replace(resume=True, steps=3), optax.adam(1e-2), num_rows=8, settings=kept)
        == []
    )


def test_the_last_state_is_kept_where_what_is_made_of_it_cannot_be_written(tmp_path):
    flags, said, mesh = BasicFlags.of(out_dir=tmp_path, steps=2), [], jaxpar.make_mesh()
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    with Run(flags, mesh, {"a": 1}, say=said.append) as run:
        init = lambda key: {"w": jnp.ones(2)}
        run.restore(init, jax.random.key(0), optax.sgd(0.1), mesh, shardings)
        grads = jax.value_and_grad(lambda params, batch: jnp.sum((params["w"] - batch) ** 2))
        train_step = run.compile(jaxpar.make_train_step(grads, optax.sgd(0.1)), jnp.zeros(2))
        state = run.begin()
        for step in run.steps():
            state, metrics = train_step(state, jnp.zeros(2))
            run.log(step, state, metrics)
        assert run.checkpoints.latest() is None
        run.keep(state)
        run.keep(state)
        assert [line for line in said if "saved step" in line] == [
            f"saved step 2 in {tmp_path / 'checkpoints'}"
        ]
    resumed = flags.replace(resume=True)
    with Run(resumed, mesh, {"a": 1}, say=said.append) as run:
        run.restore(init, jax.random.key(0), optax.sgd(0.1), mesh, shardings)
        run.compile(jaxpar.make_train_step(grads, optax.sgd(0.1)), jnp.zeros(2))
        again = run.begin()
    assert (int(again.step), run.first_step) == (2, 2)
    np.testing.assert_array_equal(again.params["w"], state.params["w"])
    np.testing.assert_allclose(state.params["w"], [0.64, 0.64], rtol=1e-6)


def test_an_optimizer_with_a_key_is_compared_by_its_numbers(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path, steps=1, checkpoint_every=1)
    noisy = lambda seed: optax.noisy_sgd(0.01, key=jax.random.key(seed))
    assert trained(flags, noisy(1), settings={"rows": 4}) == []
    more = flags.replace(resume=True, steps=2)
    assert trained(more, noisy(1), settings={"rows": 4}) == []
    [told] = trained(more.replace(steps=3), noisy(2), settings={"rows": 4})
    assert told.startswith("the optimizer is not that of the saved run: its update computes with")


@pytest.mark.parametrize(("saved", "now", "how"), [(2, 1, "less"), (1, 2, "more")])
def test_a_number_that_an_optimizer_uses_another_number_of_times_is_told_so(
    tmp_path, saved, now, how
):
    flags = BasicFlags.of(out_dir=tmp_path, steps=1, checkpoint_every=1)
    of = lambda times: optax.chain(*[optax.add_decayed_weights(0.1)] * times, optax.sgd(0.5))
    assert trained(flags, of(saved), settings={"rows": 4}) == []
    [told] = trained(flags.replace(resume=True, steps=2), of(now), settings={"rows": 4})
    assert f"its update computes with 0.1 {how} often than that of the saved run" in told


def test_an_optimizer_that_treats_other_params_with_the_same_numbers_is_told(tmp_path):
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    halves = {"fast": optax.sgd(0.1), "slow": optax.sgd(0.01)}
    of = lambda **labels: numbers_of(optax.partition(halves, labels), params)
    one, other = of(a="fast", b="slow"), of(a="slow", b="fast")
    assert one["updates"] != other["updates"]
    assert one["checksum"] == other["checksum"]
    assert one == of(a="fast", b="slow")


def test_a_decay_of_other_params_or_another_operation_is_told_whatever_the_numbers_are():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}

    def decaying(**mask):
        decay = optax.add_decayed_weights(0.1, mask=mask)  # as is 1 - b1
        return numbers_of(optax.chain(optax.scale_by_adam(), decay, optax.scale(-0.01)), params)

    one, other = decaying(a=True, b=False), decaying(a=False, b=True)
    assert one["updates"] != other["updates"]
    sign = optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))
    with_sign = numbers_of(optax.chain(sign, optax.sgd(0.1)), params)
    assert with_sign["updates"] != numbers_of(optax.sgd(0.1), params)["updates"]
    of_other_shape = numbers_of(
        optax.chain(sign, optax.sgd(0.1)), {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    )
    assert with_sign == of_other_shape


IN_CALLS = {
    "MultiSteps": lambda optimizer: optax.MultiSteps(optimizer, 2),
    "apply_if_finite": lambda optimizer: optax.apply_if_finite(optimizer, 3),
}


@pytest.mark.parametrize("name", IN_CALLS)
def test_a_decay_of_other_params_is_told_inside_calls_too(name):
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    decay = lambda **mask: optax.chain(optax.add_decayed_weights(0.1, mask=mask), optax.sgd(0.1))
    of = lambda **mask: numbers_of(IN_CALLS[name](decay(**mask)), params)["updates"]
    assert of(a=True, b=False) != of(a=False, b=True)


OF_GRADIENTS = {
    "squares": lambda u, p: u**2,
    "cubes": lambda u, p: u**3,
    "u - p": lambda u, p: u - p,
    "p - u": lambda u, p: p - u,
    "in bfloat16": lambda u, p: u.astype(jnp.bfloat16),
    "in float16": lambda u, p: u.astype(jnp.float16),
}


def test_updates_of_the_same_operations_on_other_values_are_told_apart():
    params = {"w": jnp.ones(2)}
    found = set()
    for of in OF_GRADIENTS.values():
        each = optax.stateless(lambda updates, params, of=of: jax.tree.map(of, updates, params))
        found.add(numbers_of(each, params)["updates"])
    assert len(found) == len(OF_GRADIENTS)


def test_another_operation_is_told_beside_a_number_that_the_state_keeps(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path, steps=1, checkpoint_every=1)
    of = lambda change, rate: optax.chain(
        optax.stateless(lambda updates, params: jax.tree.map(change, updates)),
        optax.inject_hyperparams(optax.sgd)(rate),
    )
    assert trained(flags, of(lambda u: u, 0.1), settings={"rows": 4}) == []
    resumed = flags.replace(resume=True, steps=2)
    told = trained(resumed, of(jnp.sign, 0.2), settings={"rows": 4})
    assert any(line.startswith("the optimizer is not that of the saved run") for line in told)


def test_a_number_that_the_optimizer_has_elsewhere_too_is_named(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path, steps=1, checkpoint_every=1)
    of = lambda rate: optax.chain(optax.add_decayed_weights(rate), optax.trace(0.9))
    assert trained(flags, of(0.01), settings={"rows": 4}) == []
    [told] = trained(flags.replace(resume=True, steps=2), of(0.9), settings={"rows": 4})
    assert "its update computes with 0.9 where that of the saved one has 0.01" in told


def test_numbers_of_an_optimizer_that_are_not_shown_are_counted(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path, steps=1, checkpoint_every=1)
    of = lambda *numbers: optax.chain(*map(optax.scale, numbers))
    assert trained(flags, of(0.11, 0.12, 0.13, 0.14, 0.15, 0.16), settings={"rows": 4}) == []
    more = flags.replace(resume=True, steps=2)
    [told] = trained(more, of(0.21, 0.22, 0.23, 0.24, 0.25), settings={"rows": 4})
    assert "computes with 0.21, 0.22, 0.23, 0.24 and 1 more where" in told
    assert "has 0.11, 0.12, 0.13, 0.14 and 2 more" in told


def test_a_schedule_of_another_number_of_steps_is_told_as_such(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path, steps=2, checkpoint_every=1)
    of_steps = lambda flags: optax.adam(optax.cosine_decay_schedule(0.1, flags.common.steps))
    trained(flags, of_steps(flags), settings={"rows": 4})
    more = flags.replace(resume=True, steps=3)
    [told] = trained(more, of_steps(more), settings={"rows": 4})
    assert told.endswith(
        "its update computes with 3.0 where that of the saved one has 2.0. The run has steps=3 now, and had steps=2: a "
        "schedule of the learning "
        "rate that is made of the number of steps has another length from here on. To keep the saved one, make it of 2 steps."
    )


@pytest.mark.parametrize(
    "around",
    [lambda inner: inner, lambda inner: optax.apply_if_finite(inner, 3)],
    ids=["own", "around"],
)
def test_a_rate_that_the_optimizer_keeps_in_its_state_is_told_and_can_be_set(tmp_path, around):
    flags = BasicFlags.of(out_dir=tmp_path, steps=2, checkpoint_every=1)
    of_rate = lambda rate: around(optax.inject_hyperparams(optax.adam)(learning_rate=rate))
    trained(flags, of_rate(0.25), settings={"rows": 4})
    assert trained(flags.replace(resume=True), of_rate(0.25), settings={"rows": 4})[1:] == []
    said, states = [], []
    for steps, change in ((3, lambda state: state), (4, None), (5, lambda state: state)):
        states += trained_at(flags.replace(resume=True, steps=steps), of_rate(0.5), said, change)
    remedy = "dataclasses.replace(state, opt_state=optax.tree.set(state.opt_state, learning_rate=jnp.float32(0.5)))"
    told = [line for line in said if "goes on with the saved state" in line]
    assert len(told) == 2, "once the state has the new rate, nothing is told"
    assert told[0].endswith(
        f"learning_rate=0.25 as saved, not 0.5. To use the new ones, write after `state = run.begin()`: state = {remedy}"
    )
    assert not [line for line in said if "is not that of the saved run" in line]
    assert states == [0.25, 0.5, 0.5]
    assert (
        len(
            [
                line
                for line in said
                if "is 0.5 in the optimizer's state" in line and "0.25 in metrics" in line
            ]
        )
        == 2
    )


def test_rates_of_groups_of_params_are_set_each_by_its_path():
    groups = lambda *rates: optax.multi_transform(
        {
            name: optax.inject_hyperparams(optax.sgd)(rate)
            for name, rate in zip("ab", rates, strict=True)
        },
        {"w": "a", "b": "b"},
    )
    params = {"w": jnp.ones(2), "b": jnp.ones(1)}
    saved = groups(0.25, 0.5).init(params)
    for rates in ((1.0, 0.5), (1.0, 2.0)):
        told = describe(kept_numbers(groups(*rates), params, saved), saved)
        code = told.partition("`state = run.begin()`: ")[2]
        state = jaxpar.TrainState(0, params, saved, 0)
        names = {"state": state, "jax": jax, "jnp": jnp, "jaxpar": jaxpar}
        exec(code, names := names | {"dataclasses": dataclasses})
        now = optax.tree.get_all_with_path(names["state"].opt_state, "learning_rate")
        assert tuple(float(rate) for _, rate in now) == rates


def trained_at(flags, optimizer, said, change):
    """The learning rate that a run ends with, whose first state is changed; None: as its message says."""
    mesh = jaxpar.make_mesh()
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    grads = jax.value_and_grad(lambda params, batch: jnp.sum((batch["x"] @ params["w"] - 1) ** 2))
    batch = {"x": np.zeros((4, 2), np.float32)}
    with Run(flags, mesh, {"rows": 4}, learning_rate=0.25, say=said.append) as run:
        run.restore(lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optimizer, mesh, shardings)
        train_step = run.compile(jaxpar.make_train_step(grads, optimizer), batch)
        state = run.begin()
        if change is None:
            [told] = [line for line in said if "To use the new ones" in line][-1:]
            code = told.rpartition("state = ")[2]
            change = lambda state: eval(
                code, {"state": state, "optax": optax, "jnp": jnp, "dataclasses": dataclasses}
            )
        state = change(state)
        for step in run.steps():
            state, metrics = train_step(state, batch)
            run.log(step, state, metrics)
    return [float(optax.tree.get(state.opt_state, "learning_rate"))]


def test_settings_are_compared_as_plain_numbers_and_lists_whatever_they_were(tmp_path):
    flags = BasicFlags.of(out_dir=tmp_path, steps=np.int64(2), checkpoint_every=1)
    arrays = {
        "rows": np.int64(4),
        "rate": jnp.float32(0.5),
        "names": {"b", "a"},
        "clip": float("inf"),
        "dir": Path("a"),
    }
    trained(flags, optax.adam(1e-2), settings=arrays)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["steps"] == 2, "a number, as given"
    plain = {"rows": 4, "rate": 0.5, "names": ["a", "b"], "clip": "inf", "dir": "a"}
    assert len(trained(flags.replace(resume=True), optax.adam(1e-2), settings=plain)) == 1, (
        "resumed, and nothing differs"
    )
    with pytest.raises(ValueError, match=r"got rows=5 \(saved: 4\)"):
        trained(flags.replace(resume=True), optax.adam(1e-2), settings=plain | {"rows": 5})


def test_another_optimizer_is_refused_with_a_way_that_works(tmp_path):
    first, second = (
        BasicFlags.of(out_dir=tmp_path / name, steps=2, checkpoint_every=1) for name in "ab"
    )
    trained(first, optax.adam(1e-2), settings={"rows": 4})
    with pytest.raises(
        ValueError,
        match=r"got none for opt_state/0/count.* and another optimizer, begin a run in another folder: saved = ",
    ) as refused:
        trained(first.replace(resume=True), optax.sgd(1e-2), settings={"rows": 4})
    assert "run.restore(lambda key: saved.params, key, optimizer, parallel)" in str(refused.value)
    mesh, key = jaxpar.make_mesh(), jax.random.key(0)
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    parallel = jaxpar.Parallel(mesh, shardings)
    target = jaxpar.abstract_state(lambda key: {"w": jnp.ones(2)}, key, optax.adam(1e-2), parallel)
    saved = jaxpar.CheckpointManager(tmp_path / "a" / "checkpoints", mesh).restore(target)
    with Run(second, mesh, {"rows": 4}) as run:
        run.restore(lambda key: saved.params, key, optax.sgd(1e-2), parallel)
        grads = jax.value_and_grad(lambda params, batch: jnp.sum(params["w"]))
        run.compile(jaxpar.make_train_step(grads, optax.sgd(1e-2)), {"x": np.zeros(1, np.float32)})
        np.testing.assert_array_equal(run.begin().params["w"], saved.params["w"])


def test_a_first_step_without_a_gradient_and_a_folder_that_cannot_be_are_told(tmp_path):
    no_gradient = "the gradient of the first step is 0 in all params, so it has trained nothing: look for jax.lax.stop"
    assert remark_on_first_step({"grad_norm": jnp.float32(0.0), "loss": 1.0}).startswith(
        no_gradient
    )
    for metrics in (
        {"loss": 0.0},
        {"grad_norm": 0.0, "skipped": jnp.float32(1)},
        {"grad_norm": np.nan},
        {"grad_norm": 2.0},
    ):
        assert remark_on_first_step(metrics) == "", metrics
    with pytest.raises(
        ValueError,
        match=r"out_dir must be a folder that can be written to; got .*: File name too long. Name",
    ):
        Run(BasicFlags.of(out_dir=tmp_path / ("d" * 300)), jaxpar.make_mesh())


def test_processes_that_begin_and_resume_are_refused_before_they_wait_for_one_another(
    tmp_path, monkeypatch
):
    told = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def refuse(what, values, remedy):
        told.append((what, values))
        raise ValueError("they differ")

    monkeypatch.setattr("jaxpar.run.start.check_agreement", refuse)
    with pytest.raises(ConfigError, match="they differ"):
        Run(BasicFlags.of(out_dir=tmp_path), jaxpar.make_mesh())
    [(what, values)] = told
    assert what == "begin"
    assert values["path of out_dir"] == str(tmp_path)
    assert [values[f"flag {name}"] for name in ("resume", "overwrite", "dry_run")] == [
        False,
        False,
        False,
    ]


def test_processes_of_other_optimizers_and_programs_are_told_what_differs(monkeypatch):
    asked = []
    for module in ("run.traits", "runtime.coordination"):
        monkeypatch.setattr(
            f"jaxpar.{module}.check_agreement",
            lambda what, values, remedy: asked.append((values, remedy)),
        )
    traits = Traits({}, print, steps=2)
    traits.take_state(
        types.SimpleNamespace(params={"w": jnp.ones(2)}), None, None, optax.sgd(0.125), None
    )
    traits.check_same_program("a program")
    (optimizer, _), (program, remedy) = asked
    assert "-0.125" in optimizer["optimizer, by the numbers in its update"]
    assert list(program) == ["program"]
    assert "random numbers of NumPy: put them into the batch" in remedy


def test_what_a_checkpoint_does_not_say_of_the_optimizer_is_told_as_not_compared():
    said = []
    traits = Traits({}, said.append, steps=2)
    traits.take_state(
        types.SimpleNamespace(params={"w": jnp.ones(2)}), None, None, optax.sgd(0.1), None
    )
    for saved in (None, traits.as_json() | {"versions": {"jax": "0.1"}}):
        traits.compare(saved, {})
        assert (
            "since Run has no settings: the numbers of the optimizer, the data, the model and the loss"
            in said.pop()
        )
    traits.compare(traits.as_json(), {})
    assert "since Run has no settings: the data, the model and the loss" in said.pop()
    assert not said
    assert (
        numbers_of(optax.sgd(optax.cosine_decay_schedule(0.5, 100)), {"w": jnp.ones(2)})[
            "numbers"
        ].count("100.0")
        == 1
    )


def test_a_step_that_clips_or_reduces_otherwise_than_the_saved_one_is_told():
    said, mesh = [], jaxpar.make_mesh()
    state = types.SimpleNamespace(params={"w": jnp.ones(2)})

    def of(dtype=None, saved=None, **clip):
        traits = Traits({"rows": 8}, said.append, steps=4)
        parallel = jaxpar.Parallel(mesh, grad_reduce_dtype=dtype)
        traits.take_state(state, None, None, optax.sgd(0.1), parallel)
        traits.compare(saved, {"rows": 8})
        traits.take_step(jaxpar.make_train_step(lambda params, batch: None, optax.sgd(0.1), **clip))
        return traits.as_json()

    saved = of(max_grad_norm=1.0)
    of(saved=saved, max_grad_norm=jnp.float32(1))
    of(saved={name: value for name, value in saved.items() if name != "step"})
    assert not said, "the same, and a checkpoint that does not say"
    of(jnp.float32, saved)
    [line] = said
    assert line == (
        "the step is not that of the saved run: grad_reduce_dtype=float32, saved None, max_grad_norm=None, saved 1.0."
    ), "and no advice to give settings to Run, which this one has"


def test_a_dtype_of_reductions_beside_a_plain_mesh_is_told_too():
    """``value_and_grad`` has it as a keyword, which the state does not know."""
    said, mesh = [], jaxpar.make_mesh()
    state = types.SimpleNamespace(params={"w": jnp.ones(2)})

    def of(saved=None, **settings):
        traits = Traits({"rows": 8}, said.append, steps=4)
        traits.take_state(state, None, None, optax.sgd(0.1), mesh)
        traits.compare(saved, {"rows": 8})
        grad = jaxpar.value_and_grad(
            lambda params, batch: batch, lambda x, batch: x, mesh, **settings
        )
        traits.take_step(jaxpar.make_train_step(grad, optax.sgd(0.1)))
        return traits.as_json()

    saved = of()
    of(saved)
    assert not said
    of(saved, grad_reduce_dtype=jnp.float32)
    [line] = said
    assert line.endswith("the saved run: grad_reduce_dtype=float32, saved None.")


def test_positions_that_a_context_axis_adds_to_a_batch_are_not_told():
    said, batch = [], {"tokens": np.zeros((4, 8), np.int32)}
    meshes = [jaxpar.make_mesh(), jaxpar.make_mesh(context=2)]
    for first, second in (meshes, meshes[::-1]):
        then, now = (Traits({"rows": 4}, said.append, steps=2) for _ in range(2))
        then.take_batch(jaxpar.shard_batch(batch, first))
        now.compare(then.as_json(), {"rows": 4})
        now.take_batch(jaxpar.shard_batch(batch, second))
    assert not said


def test_an_optimizer_that_follows_a_changed_setting_is_told_with_the_setting():
    said = []
    of = lambda steps: Traits({"steps": steps, "rows": 8}, said.append, steps=steps)
    state = types.SimpleNamespace(params={"w": jnp.ones(2)})
    traits = [of(4), of(6)]
    for each, steps in zip(traits, (4.0, 6.0), strict=True):
        each.take_state(
            state, None, None, optax.sgd(optax.linear_schedule(0.1, 0.0, int(steps))), None
        )
    traits[1].compare(traits[0].as_json(), {"steps": 4, "rows": 8})
    [line] = said
    assert (
        "6.0 where that of the saved one has 4, 4.0. The run has steps=6 now, and had steps=4: a"
        in line
    )
    other = Traits({"steps": 4, "rows": 9}, said.append, steps=4)
    other.take_state(state, None, None, optax.sgd(0.2), None)
    other.compare(traits[0].as_json(), {"steps": 4, "rows": 8})
    assert said[-1].endswith(", as may be since other settings are: rows.")


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_restarted_run_says_that_it_deletes_nothing(tmp_path, monkeypatch, overwrite):
    monkeypatch.setenv("JAXPAR_RESUME", "if-any")
    flags, said = BasicFlags.of(out_dir=tmp_path, overwrite=overwrite), []
    assert folder.resumed_if_restarted(flags, said.append) is flags, (
        "there is nothing to go on from"
    )
    monkeypatch.setattr(folder, "has_steps", lambda path: True)
    common = folder.resumed_if_restarted(flags, said.append).common
    assert (common.resume, common.overwrite) == (True, False)
    assert len(said) == overwrite
    assert all(
        "overwrite=True has no effect: JAXPAR_RESUME=if-any goes on from the checkpoints in" in each
        for each in said
    )


RATE = optax.linear_schedule(0.4, 0.0, 8)


def test_a_run_logs_its_learning_rate_calls_back_and_ends_early(tmp_path):
    flags = BasicFlags.of(
        out_dir=tmp_path, steps=20, checkpoint_every=100, keep_best="test_loss", patience=2
    )
    mesh, calls, fifths, said = jaxpar.make_mesh(), [], [], []
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    optimizer, seen = optax.sgd(RATE), []
    grads = jax.value_and_grad(lambda params, batch: jnp.mean((params["w"] - batch) ** 2))
    with Run(flags, mesh, learning_rate=RATE, say=said.append) as run:
        run.restore(lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optimizer, mesh, shardings)
        train_step = run.compile(
            jaxpar.make_train_step(grads, optimizer), jax.ShapeDtypeStruct((2,), "float32")
        )
        state = run.begin()
        run.every(2, lambda step, state, metrics: calls.append((step, float(state.params["w"][0]))))
        run.every(5, lambda step, state, metrics: fifths.append(step))
        for step in run.steps():
            seen.append(step)
            batch = np.full(2, np.nan if step == 1 else 0, np.float32)
            state, metrics = train_step(state, batch)
            if step % 2:
                metrics |= {"test_loss": (3.0, 2.0, 2.5, 2.5)[step // 2]}
            run.log(step, state, metrics)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert seen == [*range(8)], "of 20"
    assert run.checkpoints.latest() == 8, "the last state is saved"
    assert (
        said[-1]
        == "ended early at step 8: 2 evaluations in a row without a better test_loss than 2"
    )
    # Step 1 is skipped, so that the schedule of the optimizer is one behind from then on.
    np.testing.assert_allclose(
        [line["learning_rate"] for line in lines], [0.4, 0.35, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1]
    )
    assert [step for step, _ in calls] == [2, 4, 6, 8]
    assert fifths == [5, 8], "and after the last step"
    assert calls[0][1] == pytest.approx(1 - 0.4), "the state after the step"
    assert "<b>learning rate</b>" in render_page(read_run(tmp_path))


def test_a_learning_rate_is_compared_with_that_of_the_optimizer_where_its_state_has_one():
    params = {"w": jnp.ones(2)}
    of_state = lambda optimizer: optax.chain(optax.clip(1.0), optimizer).init(params)
    injected = of_state(optax.inject_hyperparams(optax.adam)(learning_rate=RATE))
    assert remark_on_rate(injected, 0.4) == "", "the same"
    assert remark_on_rate(injected, jnp.float32(0.3)) == (
        "the learning rate of this step is 0.4 in the optimizer's state (optax.inject_hyperparams), and 0.3 in metrics.jsonl, "
        "as Run(learning_rate=...) says. Give both the same one."
    )
    assert remark_on_rate(of_state(optax.adam(0.3)), 0.1) == "", "kept nowhere"


def test_patience_counts_evaluations_without_a_better_metric_in_a_row():
    lower, higher = EarlyStop("test_loss", 2), EarlyStop("-accuracy", 1)
    values = [3.0, 2.0, 2.5, 1.9, 2.0, float("nan")]
    assert [lower.after({"test_loss": value}) for value in values] == [False] * 5 + [True]
    assert lower.describe() == "2 evaluations in a row without a better test_loss than 1.9"
    assert not lower.after({"loss": 9.0}), "a step without an evaluation"
    assert [higher.after({"accuracy": value}) for value in (0.5, 0.6, 0.6)] == [False, False, True]
    assert higher.describe().endswith("better accuracy than 0.6")
    assert (
        higher.describe()
        != EarlyStop("-accuracy", 1).describe()
        == "1 evaluations in a row whose accuracy is not finite"
    )


def test_a_metric_that_ends_runs_is_the_same_on_all_processes(monkeypatch):
    others = lambda _, mine: [mine, {name: "0.25" for name in mine}]
    monkeypatch.setattr("jaxpar.runtime.coordination.exchange", others)
    with pytest.raises(
        ValueError,
        match=r"must agree on their test_loss before they count an evaluation; got .*0\.25.*Compute it",
    ):
        EarlyStop("test_loss", 2).after({"test_loss": 0.5})
    assert not EarlyStop("-accuracy", 2).after({"accuracy": 0.25})


def test_a_metric_that_no_step_has_is_named_at_the_end_and_calls_and_metrics_must_be_right(
    tmp_path,
):
    flags = BasicFlags.of(out_dir=tmp_path, steps=2, keep_best="test_los", patience=1)
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
        with pytest.raises(TypeError, match=r"num_steps must be a number of steps; got 2\.5\."):
            run.every(2.5, lambda *given: None)
        for step in run.steps():
            state, metrics = train_step(state, np.zeros(2, np.float32))
            for wrong in (jnp.zeros(3), "0.5", None, {"a": 1.0}, 1j):
                with pytest.raises(
                    TypeError, match=r"a metric must be one real number, .*; got 'wrong' "
                ):
                    run.log(step, state, metrics | {"wrong": wrong})
            run.log(step, state, metrics | {"test_loss": np.ones(1), "of_one": jnp.ones((1, 1))})
    assert said[-1].startswith(
        "no step had the metric test_los of keep_best=test_los, so none was the best and none ended"
    )
    assert "of_one, skipped, test_loss, wrong: name one of these" in said[-1]


def test_lines_are_followed_as_they_come_and_once(tmp_path):
    path, looks = tmp_path / "metrics.jsonl", iter(range(9))
    lines = [json.dumps({"step": step, "loss": 1.0 / (step + 1)}) + "\n" for step in range(4)]

    def sleep(seconds):
        look = next(looks)
        if look == 0:
            put(tmp_path, this_process())
            path.write_text(lines[0] + lines[1] + lines[2][:7])  # the last line is not complete
        elif look == 1:
            path.write_text("".join(lines[:3]))
        elif look == 2:
            path.write_text("".join(lines[:2]))  # a resume from an earlier step
        else:
            path.write_text("".join(lines))
            put(tmp_path, dataclasses.replace(this_process(), released=True))

    assert [line["step"] for line in follow(tmp_path, sleep=sleep)] == [0, 1, 2, 3]


def test_who_follows_a_folder_that_is_not_there_is_told_so(tmp_path, capsys):
    sleep = {}.__getitem__  # KeyError: it would wait
    with pytest.raises(KeyError):
        next(follow(tmp_path / "tpyo", sleep=sleep))
    assert "tpyo does not exist yet" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["docs/watching.md", "docs/zh/watching.md"])
def test_the_script_for_another_service_sends_each_line_of_a_run_that_has_ended(
    page, tmp_path, monkeypatch
):
    sent, told = [], {}

    class Service(contextlib.nullcontext):
        def log(self, line, step):
            sent.append((step, line["loss"]))

    def init(**about):
        told.update(about)
        service = Service()
        service.enter_result = service
        return service

    (tmp_path / "config.json").write_text('{"seed": 7}')
    lines = [json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    put(tmp_path, dataclasses.replace(this_process(), released=True))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setattr(sys, "argv", ["wandb_run.py", str(tmp_path)])
    (script, of_mlflow) = re.findall(r"```py\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert len(script.splitlines()) <= 20
    exec(script, {})
    assert sent == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert told == {
        "project": "jaxpar",
        "id": tmp_path.name,
        "resume": "allow",
        "config": {"seed": 7},
    }
    compile(of_mlflow, page, "exec")


LOGGED = """
import logging
import jaxpar, jaxpar.run, jaxpar.checkpoint
logging.basicConfig(level=logging.INFO)
jaxpar.use_fake_devices(2)
flags = jaxpar.run.BasicFlags.of(out_dir="OUT")
with jaxpar.run.Run(flags, jaxpar.make_mesh(data=2), say=logging.info):
    pass
"""


@pytest.mark.full
def test_a_run_can_print_by_logging_that_is_configured_after_the_import(tmp_path):
    script = LOGGED.replace('"OUT"', f"__import__('pathlib').Path({str(tmp_path / 'run')!r})")
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert "INFO:root:devices: 2 fake CPU devices" in ended.stderr, ended.stderr


def test_steps_after_an_evaluation_may_lack_the_best_metric_and_the_best_checkpoint_is_named(
    tmp_path, capsys
):
    """Of steps 2, 4 and 6, which are saved, step 4 is the best."""
    flags = BasicFlags.of(
        out_dir=tmp_path, steps=6, checkpoint_every=2, keep_best="test_loss", keep=1
    )
    mesh = jaxpar.make_mesh()
    shardings = {"w": jax.NamedSharding(mesh, jaxpar.replicated())}
    count = jax.jit(lambda state, batch: dataclasses.replace(state, step=state.step + 1))
    with Run(flags, mesh) as run:
        run.restore(
            lambda key: {"w": jnp.ones(2)}, jax.random.key(0), optax.sgd(0.1), mesh, shardings
        )
        count = run.compile(count, jax.ShapeDtypeStruct((2,), "float32"))
        state = run.begin()
        for step in run.steps():
            state, metrics = count(state, np.zeros(2, np.float32)), {"loss": 1.0}
            if step % 2:
                with run.evaluation(metrics):
                    metrics["test_loss"] = (3.0, 2.0, 2.5)[step // 2]
            run.log(step, state, metrics)
        say_best(run)
    assert run.checkpoints.steps() == (4, 6)
    told = "of the checkpoints, that of step 4 has the best test_loss, 2. To write its model: python -m jaxpar export"
    assert f"{told} {tmp_path} {tmp_path.name}-step-4 --step 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"checkpoint_every": 20},
            "checkpoint_every=20 and eval_every=50. Choose checkpoint_every=50, or eval_every=20.",
        ),
        (
            {"checkpoint_minutes": 5},
            "got checkpoint_minutes, which saves at any step. Choose checkpoint_every=50",
        ),
    ],
)
def test_checkpoints_without_the_metric_that_chooses_the_best_are_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_best_is_saved(
            BasicFlags.of(keep_best="-test_accuracy", **given), 50, ("test_accuracy",)
        )
    check_best_is_saved(BasicFlags.of(keep_best="loss", **given), 50, ())
    check_best_is_saved(
        BasicFlags.of(keep_best="test_loss", checkpoint_every=100), 50, ("test_loss",)
    )
    with pytest.raises(
        ValueError,
        match=r"keep_best must name a metric of the run; got test_los\. Did you mean test_loss\?",
    ):
        check_best_is_saved(
            BasicFlags.of(keep_best="-test_los", checkpoint_every=50), 50, ("test_loss",)
        )
    of_run = BasicFlags.of(keep_best="eval_loss", checkpoint_every=50)
    check_best_is_saved(of_run, 50, ("test_loss",))  # a metric of its steps, which are not known
    with pytest.raises(ValueError, match=r"got eval_loss\. (Did you mean test_loss\?|Choose from)"):
        check_best_is_saved(of_run, 50, ("test_loss",), ("loss", "grad_norm"))


def test_the_end_of_a_run_names_the_files_that_are_there(tmp_path, capsys):
    (tmp_path / "loss.png").touch()
    say_written(tmp_path, "report.html", "loss.png")
    say_written(tmp_path / "deleted", "report.html")
    assert capsys.readouterr().out.splitlines() == [
        f"written: {tmp_path}/ with loss.png",
        f"written: {tmp_path}/deleted/ with nothing, or it was deleted since",
    ]


def test_a_run_goes_on_where_nothing_reads_what_it_prints(monkeypatch, capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    say("lost")
    say("lost too")
    assert capsys.readouterr().err.count("nothing reads standard output any more") == 1
