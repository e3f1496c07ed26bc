"""A line a step in metrics.jsonl, also across a resume and when a step's loss is not finite."""

import contextlib
import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.guard import Guard
from jaxpar.metrics.jumps import find_jumps
from jaxpar.metrics.log import MetricsLog, read_metrics
from jaxpar.run import BasicFlags, Run
from tests.support import tiny
from tests.support.waiting import WAIT_SECONDS


def test_a_file_of_metrics_that_is_deleted_while_it_is_written_is_told_once(tmp_path, capsys):
    with MetricsLog(tmp_path, 10, items_per_step=47) as log:
        for step in range(6):
            if step == 2:
                assert "deleted" not in capsys.readouterr().err
                (tmp_path / "metrics.jsonl").unlink()
            log.log(step, {"loss": 1.0})
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl was deleted while the run writes to it: its lines, also") == 1


def test_a_folder_that_is_renamed_while_a_run_writes_to_it_is_told_once(tmp_path, capsys):
    with MetricsLog(tmp_path / "a", 10, items_per_step=47) as log:
        for step in range(6):
            if step == 2:
                (tmp_path / "a").rename(tmp_path / "b")
            log.log(step, {"loss": 1.0})
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl was renamed, or its folder, while the run writes to it") == 1


def log_steps(folder, steps, *, loss=lambda step: 1 / (1 + step), first_step=0):
    with MetricsLog(folder, 10, items_per_step=47, first_step=first_step) as log:
        for step in steps:
            log.log(
                step,
                {"grad_norm": jnp.float32(2), "loss": jnp.float32(loss(step)), "weights/area": 3.5},
            )
    return log


def test_each_step_has_a_line_with_loss_norm_seconds_and_rate(tmp_path):
    log = log_steps(tmp_path / "run", range(3))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = ["step", "loss", "grad_norm", "weights/area", "step_seconds", "rows_per_second"]
    assert [list(line) for line in lines] == [names] * 3
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["loss"] for line in lines] == pytest.approx([1, 1 / 2, 1 / 3])
    assert all(
        line["rows_per_second"] == pytest.approx(47 / line["step_seconds"]) for line in lines
    )
    assert log.last == lines[-1]


class OnDevice:
    """A value that a device has computed at some time of a clock, which advances only where the host waits."""

    dtype, shape, size = np.dtype("float32"), (), 1

    def __init__(self, clock, at):
        self.clock, self.at = clock, at

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.at)
        return self

    def is_ready(self):
        return self.clock.now >= self.at

    def __array__(self, dtype=None, copy=None):
        self.block_until_ready()
        return np.asarray(1.0, dtype)


def test_no_step_s_time_includes_an_evaluation(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0, idle_at=0.0)
    monkeypatch.setattr("jaxpar.metrics.log.time", SimpleNamespace(perf_counter=lambda: clock.now))

    def dispatch(seconds):
        clock.idle_at = max(clock.now, clock.idle_at) + seconds
        return OnDevice(clock, clock.idle_at)

    with MetricsLog(tmp_path, 6, items_per_step=8) as log:
        for step in range(6):
            metrics = {"loss": dispatch(0.5)}
            if step in (0, 3, 5):
                with log.pause(metrics):
                    clock.now += 40  # compiles
                    metrics |= {"test_loss": dispatch(100).block_until_ready()}
            log.log(step, metrics)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert clock.now == 6 * 0.5 + 3 * 140
    assert [line["step_seconds"] for line in lines] == [0.5] * 6
    assert [line["rows_per_second"] for line in lines] == [16] * 6
    assert [line["step"] for line in lines if "test_loss" in line] == [0, 3, 5]


def test_a_save_after_a_step_that_has_ended_leaves_each_step_its_time(tmp_path, monkeypatch):
    """A device that computes before the host goes on, as CPUs do: a save writes the line of the last step at once."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("jaxpar.metrics.log.time", SimpleNamespace(perf_counter=lambda: clock.now))
    with MetricsLog(tmp_path, 6, items_per_step=8) as log:
        for step in range(6):
            clock.now += 0.5
            log.log(step, {"loss": OnDevice(clock, clock.now)})
            if step in (2, 4):
                clock.now += 0.25
                log.flush()
    seconds = [line["step_seconds"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert seconds == [0.5, 0.5, 0.5, 0.75, 0.5, 0.75], "the save is in the time of the next step"


def test_steps_that_are_seen_to_have_ended_together_have_equal_parts_of_the_time(
    tmp_path, monkeypatch
):
    """A device on which each second step ends while the host prepares the next one."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("jaxpar.metrics.log.time", SimpleNamespace(perf_counter=lambda: clock.now))
    with MetricsLog(tmp_path, 4, items_per_step=8) as log:
        for step in range(4):
            clock.now += 0.5
            log.log(step, {"loss": OnDevice(clock, clock.now + (0.25 if step % 2 == 0 else 0))})
    seconds = [line["step_seconds"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert seconds == [0.5] * 4


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_steps_of_a_run_that_have_ended_together_have_equal_parts_too(
    tmp_path, monkeypatch, is_evaluated
):
    """``Run.log`` and an evaluation write the line of the step before first, and know whether the next step has ended."""
    mesh, batch = jaxpar.make_mesh(), tiny.make_batch()
    sgd = optax.sgd(0.1)
    step = jaxpar.make_train_step(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh), sgd)
    shardings = tiny.shardings(mesh, tiny.make_params())
    clock = SimpleNamespace(now=0.0)
    with Run(BasicFlags.of(out_dir=tmp_path, steps=4), mesh, {}) as run:
        run.restore(tiny.init, jax.random.key(0), sgd, mesh, shardings)
        train_step = run.compile(step, jaxpar.shard_batch(batch, mesh))
        state = run.begin()
        time = SimpleNamespace(perf_counter=lambda: clock.now)
        monkeypatch.setattr("jaxpar.metrics.log.time", time)
        for number in run.steps():
            state, _ = train_step(state, jaxpar.shard_batch(batch, mesh))
            clock.now += 0.5
            metrics = {"loss": OnDevice(clock, clock.now + (0.25 if number % 2 == 0 else 0))}
            if is_evaluated and number == 1:
                with run.evaluation(metrics):
                    clock.now += 40
            run.log(number, state, metrics)
    seconds = [line["step_seconds"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert seconds == [0.5] * 4


@pytest.mark.full
def test_the_rate_of_a_run_is_that_of_its_items_or_else_of_steps(tmp_path):
    mesh, batch = jaxpar.make_mesh(), tiny.make_batch()
    step = jaxpar.make_train_step(
        jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh), optax.sgd(0.1)
    )
    for count, rate in ((None, "steps_per_second"), (16, "rows_per_second")):
        with Run(
            BasicFlags.of(out_dir=tmp_path / rate, steps=2), mesh, items_per_step=count
        ) as run:
            run.restore(
                tiny.init,
                jax.random.key(0),
                optax.sgd(0.1),
                mesh,
                tiny.shardings(mesh, tiny.make_params()),
            )
            train_step = run.compile(step, jaxpar.shard_batch(batch, mesh))
            state = run.begin()
            for number in run.steps():
                state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
                run.log(number, state, metrics)
        lines = [
            json.loads(line)
            for line in (tmp_path / rate / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line[rate] for line in lines] == [
            pytest.approx((count or 1) / line["step_seconds"]) for line in lines
        ]


def test_a_number_of_the_state_is_a_metric_though_the_next_step_donates_it(tmp_path):
    mesh, batch = jaxpar.make_mesh(), tiny.make_batch()
    optimizer = optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.4, 0.0, 4))
    step = jaxpar.make_train_step(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh), optimizer)
    shardings = tiny.shardings(mesh, tiny.make_params())
    with Run(BasicFlags.of(out_dir=tmp_path, steps=4), mesh) as run:
        run.restore(tiny.init, jax.random.key(0), optimizer, mesh, shardings)
        train_step = run.compile(step, jaxpar.shard_batch(batch, mesh))
        state = run.begin()
        for number in run.steps():
            state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
            rate = state.opt_state.hyperparams["learning_rate"]
            run.log(number, state, metrics | {"rate": rate})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["rate"] for line in lines] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_a_metric_that_is_donated_before_its_line_is_written_is_named(tmp_path):
    kept = jnp.ones(())
    said = "a metric must be there until its line .*; got 'sigma', an array that a step has donated"
    with MetricsLog(tmp_path, 10, items_per_step=1) as log:
        log.log(0, {"loss": 1.0, "sigma": kept})
        kept.delete()
        with pytest.raises(ValueError, match=said):
            log.flush()
        with pytest.raises(ValueError, match=said):
            log.log(1, {"loss": 1.0, "sigma": kept})


def test_a_run_compares_replicas_unless_its_flags_say_otherwise(tmp_path, monkeypatch):
    guarded, ignore = [], lambda *_: None
    guard = SimpleNamespace(before_step=ignore, leave_loop=ignore)
    monkeypatch.setattr(
        "jaxpar.run.run.Guard",
        lambda *args, **kwargs: guarded.append(kwargs) or contextlib.nullcontext(guard),
    )
    for given in ({}, {"compare_every": 7}):
        with Run(
            BasicFlags.of(out_dir=tmp_path / str(len(guarded)), steps=2, **given),
            jaxpar.make_mesh(),
        ) as run:
            run._order.begin(run.flags, 0)
            next(run.steps())
    assert [kwargs["compare_every"] for kwargs in guarded] == [100, 7]


@pytest.mark.parametrize("has_evaluations", [True, False])
def test_a_run_refuses_steps_out_of_order_and_a_best_metric_that_it_does_not_have(
    tmp_path, capsys, has_evaluations
):
    flags, mesh = (
        BasicFlags.of(out_dir=tmp_path, keep_best="-test_loss", patience=9),
        jaxpar.make_mesh(),
    )
    with Run(flags, mesh, has_evaluations=has_evaluations) as run:
        with pytest.raises(
            RuntimeError, match=r"must restore before it compiles; .* Call run\.restore first"
        ):
            run.compile(None, None)
        with pytest.raises(
            RuntimeError,
            match=r"must compile its step before it begins; .* Call run\.compile first",
        ):
            run.begin()
        with pytest.raises(
            RuntimeError, match=r"must begin before its steps; .* Call run\.begin first"
        ):
            next(run.steps())
        run._order.begin(flags, 0)
        run._order.begin_loop()
        run._log, run._guard = MetricsLog(tmp_path, 1, items_per_step=1), Guard(num_steps=1)
        metrics = {"loss": 1.0, "test_accuracy": 0.5}
        if has_evaluations:
            with run.evaluation(metrics):
                pass
        with pytest.raises(SystemExit, match="2"):
            run.log(0, None, metrics)
    assert "error: keep_best must name a metric of the run; got test_loss" in (
        said := capsys.readouterr().err
    )
    assert "Choose from loss, test_accuracy." in said


@pytest.mark.parametrize("name", ["step", "step_seconds", "rows_per_second"])
def test_a_metric_with_the_name_of_a_column_of_the_log_is_refused(tmp_path, name):
    message = (
        rf"metrics named step, step_seconds, rows_per_second, .*got \['{name}'\]\. Rename them"
    )
    with MetricsLog(tmp_path, 2, items_per_step=8) as log, pytest.raises(ValueError, match=message):
        log.log(0, {"loss": 1.0, name: 2.0})


def test_a_resumed_run_says_which_lines_before_it_are_missing(tmp_path, capfd):
    """As after a full disk, which may have held the checkpoint of a later step."""
    for first_step, missing in ((0, ""), (2, ""), (5, "step 5"), (9, "steps 7 to 9")):
        with MetricsLog(tmp_path, 10, items_per_step=1, first_step=first_step) as log:
            for step in range(first_step, first_step + (1 if first_step == 5 else 2)):
                log.log(step, {"loss": 1.0})
        told = f"has no lines of {missing}, which were trained" if missing else ""
        assert told in capfd.readouterr().err
        assert (told == "") == (first_step < 5)


def test_a_resumed_run_goes_on_behind_the_lines_of_its_steps(tmp_path):
    log_steps(tmp_path, range(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a crash cut it short
    log_steps(tmp_path, range(4, 8), loss=lambda step: 100 + step, first_step=4)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["loss"] for line in lines[3:5]] == [0.25, 104]


def test_a_loss_that_jumps_for_a_step_is_told_also_after_a_resume(tmp_path, capfd):
    usual = lambda step: 2.0 + 0.5 * (step % 3)
    log_steps(tmp_path, range(30), loss=lambda step: 2.0**40 if step == 25 else usual(step))
    said = capfd.readouterr().err.splitlines()
    assert [line.split(". ")[0] for line in said] == [
        "the loss of step 26 is 1.0995e+12, after a median of 2.5 in the steps before it"
    ]
    log_steps(
        tmp_path,
        range(30, 40),
        loss=lambda step: -3e5 if step == 30 else usual(step),
        first_step=30,
    )
    assert "the loss of step 31 is -3e+05, after a median of 2.5" in capfd.readouterr().err
    assert find_jumps(read_metrics(tmp_path / "metrics.jsonl")) == [
        {"step": 26, "loss": 2.0**40, "usual": 2.5},
        {"step": 31, "loss": -3e5, "usual": 2.5},
    ]


def test_of_many_jumps_the_first_are_told(tmp_path, capfd):
    log_steps(tmp_path, range(200), loss=lambda step: 1e6 if step % 10 == 9 else 1.0)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 10
    assert said[-1].endswith("look at its rows. Further jumps are in the report alone.")
    assert len(find_jumps(read_metrics(tmp_path / "metrics.jsonl"))) == 20


@pytest.mark.parametrize(
    "losses",
    [
        [1e9 * 0.5**step for step in range(60)],
        [5.0, 4.0, 3.0, 2.0, 1e12],
        [1e-12 * 10 ** (step % 5) for step in range(60)],
        [math.nan, 2.0, math.nan, math.inf, 2.0, 3.0, 2.5, 2.0, math.inf, 40.0, None, "2"],
    ],
    ids=["falls", "begins", "rounding", "not finite"],
)
def test_losses_that_fall_or_vary_or_are_not_finite_are_no_jumps(losses):
    assert find_jumps([{"step": step, "loss": loss} for step, loss in enumerate(losses)]) == []


def test_a_new_run_begins_a_new_file(tmp_path):
    log_steps(tmp_path, range(6))
    log_steps(tmp_path, range(2))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_loss_that_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path):
    log_steps(tmp_path, range(2), loss=lambda step: math.nan if step else 1.0)
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(text[1], parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[1]["loss"])


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


# -- disks that take nothing -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk():
    """A disk that takes 7 bytes more, then none."""
    real, room = os.write, [7]

    def write(handle, data):
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data[: room.pop()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.metrics.lines.os.write", write)
        yield


def test_lines_that_the_disk_does_not_take_are_written_when_it_has_room_again(tmp_path, capsys):
    with MetricsLog(tmp_path, 10, items_per_step=1) as log:
        log_on(log, range(3))
        with full_disk():
            log_on(log, range(3, 6))
            assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 2
        log_on(log, range(6, 9))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(9))
    assert (
        capsys.readouterr().err
        == f"{tmp_path}/metrics.jsonl: No space left on device; its lines wait in memory\n"
    )


def log_on(log, steps):
    for step in steps:
        log.log(step, {"loss": 1.0})


MISSING = r"must have a line for each step; got No space left on device, so that its last 4 lines may be missing"


def test_lines_that_never_were_written_are_said_to_be_missing_at_the_end(tmp_path):
    with (
        full_disk(),
        pytest.raises(OSError, match=MISSING) as end,
        MetricsLog(tmp_path, 10, items_per_step=1) as log,
    ):
        log_on(log, range(4))
    assert end.value.errno == errno.ENOSPC


def test_missing_lines_do_not_hide_how_a_run_ended(tmp_path, capsys):
    def stop_after(steps):
        with full_disk(), MetricsLog(tmp_path, 10, items_per_step=1) as log:
            log_on(log, steps)
            raise SystemExit(75)

    with pytest.raises(SystemExit, match="75"):
        stop_after(range(4))
    assert re.search(MISSING, capsys.readouterr().err)


def test_a_resumed_run_that_cannot_write_leaves_the_old_lines(tmp_path, monkeypatch):
    log_steps(tmp_path, range(6))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(handle):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("jaxpar.metrics.lines.os.fsync", fail)
    with pytest.raises(OSError, match="quota"):
        log_steps(tmp_path, [], first_step=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("event", ["open", pytest.param("os.rename", marks=pytest.mark.full)])
def test_a_resume_that_is_killed_loses_no_line(tmp_path, event):
    log_steps(tmp_path, range(6))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    code = (
        "import os, signal, sys\n"
        "from jaxpar.metrics.log import MetricsLog\n"
        "from pathlib import Path\n"
        "def kill(name, args):\n"
        f"    if name == {event!r} and str(args[0]).endswith('metrics.jsonl.part'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(kill)\n"
        "MetricsLog(Path(sys.argv[1]), 10, items_per_step=1, first_step=4).__enter__()\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    log_steps(tmp_path, range(4, 6), first_step=4)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(6))
    assert (
        (tmp_path / "metrics.jsonl")
        .read_bytes()
        .startswith(b"".join(before.splitlines(keepends=True)[:4]))
    )


@pytest.mark.parametrize(
    "damage",
    [b"12\n", b"[]\n", b'{"loss": 1}\n', b'{"step": "x"}\n', b"\xff\xfe\n", b"[" * 9999, b"\0\n"],
)
def test_a_damaged_line_is_left_out(tmp_path, damage):
    log_steps(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage.rstrip(b"\n") + b"\n" + b"".join(others))
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2]
    log_steps(tmp_path, [2], first_step=2)
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2]
    assert damage not in path.read_bytes()
