"""What a run prints where there is no terminal: its phase, step, loss, rate and the time left, as text and as JSON."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import threading

import pytest

import gpt
import house_prices
from jaxpar.__main__ import main
from jaxpar.commands import recipe as cli
from jaxpar.commands.cli import flag_names
from jaxpar.fields import given_by
from jaxpar.metrics import exporters
from jaxpar.metrics.log import MetricsLog
from jaxpar.metrics.status import JsonStream, StatusLines, level_of, render_status
from jaxpar.run import make_mesh, messages
from jaxpar.run.flags import MeshFlags
from tests.support.prometheus import scrape
from tests.support.waiting import WAIT_SECONDS

LINE = {"step": 99, "loss": 2.5, "grad_norm": 1.0, "step_seconds": 0.5, "tokens_per_second": 2048.0}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def lines(clock, seen, seconds=1000.0):
    return StatusLines(
        300, seconds=seconds, say=lambda values: seen.append(dict(values)), clock=clock
    )


def test_each_phase_of_a_run_is_named_with_its_time():
    clock, seen = Clock(), []
    with lines(clock, seen) as status:
        assert seen == [{"phase": "starting", "elapsed_seconds": 0.0, "phase_seconds": 0.0}], (
            "a line at once"
        )
        clock.now = 10.0
        with status.phase("compiling"):
            clock.now = 72.0
            assert render_status(status.values()) == "[1 min 12 s] compiling, 1 min 2 s so far"
        assert status.values()["phase"] == "after compiling"
        status.open(0)
        assert render_status(status.values()) == "[1 min 12 s] training", "no step is done yet"
        clock.now = 172.0
        status.written(LINE)
        said = render_status(status.values())
        assert (
            said
            == "[2 min 52 s] training, step 100 of 300, loss 2.5, 2,048 tokens/s, 3 min 20 s left"
        )
        with status.phase("sampling"):
            assert status.values()["phase"] == "sampling"
        status.close()
        assert status.values()["phase"] == "finishing"


def test_a_step_that_is_timed_late_does_not_make_the_rate_of_a_line():
    """Its time is missing in the next one, which looks many times as fast."""
    status = lines(Clock(), [])
    status.open(0)
    for seconds in (0.75, 0.25):
        status.written(LINE | {"step_seconds": seconds, "tokens_per_second": 1024 / seconds})
    assert status.values()["tokens_per_second"] == 2048.0


def test_a_line_without_a_new_step_keeps_the_rate_of_the_line_before():
    """The last step alone may look many times as fast."""
    seen = []
    enough = threading.Semaphore(0)

    def say(values):
        seen.append(values)
        enough.release()

    status = StatusLines(300, seconds=0.01, say=say, clock=Clock())
    status.open(0)
    for seconds in (0.75, 0.25):
        status.written(LINE | {"step_seconds": seconds, "tokens_per_second": 1024 / seconds})
    with status:
        for _ in range(4):
            assert enough.acquire(timeout=WAIT_SECONDS)
    assert {values["tokens_per_second"] for values in seen} == {2048.0}


def test_before_it_trains_a_run_returns_to_no_earlier_phase():
    clock, phases = Clock(), []
    status = lines(clock, [])
    reach = lambda: phases.append(status.values()["phase"])
    for begin, then in (
        ("connecting", "setting up"),
        ("compiling", "preparing the first step"),
        ("training on 2", None),
    ):
        reach()
        clock.now += 5.0
        with status.phase(begin, then):
            reach()
            with status.phase("saving"):
                clock.now += 1.0
            assert status.values()["phase"] == begin, "inside a phase its parts return to it"
    reach()
    assert status.values()["phase_seconds"] == 0.0, "its own time, not that of the run"
    status.open(0)
    with status.phase("saving", "done"):
        pass
    reach()
    before = [
        "starting",
        "connecting",
        "setting up",
        "compiling",
        "preparing the first step",
        "training on 2",
    ]
    assert phases == [*before, "after training on 2", "training"]


def test_a_run_without_a_step_for_two_lines_says_so_and_gives_no_rate():
    clock = Clock()
    status = lines(clock, [], seconds=15.0)
    status.open(0)
    clock.now = 100.0
    status.written(LINE)
    clock.now = 130.0
    assert "2,048 tokens/s" in render_status(status.values()), "the lines are 15 s apart"
    clock.now = 145.0
    assert render_status(status.values()) == (
        "[2 min 25 s] training, step 100 of 300, loss 2.5, no step for 45 s, 4 min 50 s left"
    )
    assert not any("_per_second" in name for name in status.values())
    status.written(LINE | {"step": 100, "step_seconds": 45.0})
    clock.now = 270.0
    assert "2,048 tokens/s" in render_status(status.values()), "steps that take 45 s"
    clock.now = 290.0
    assert "no step for 2 min 25 s" in render_status(status.values())


def test_a_resumed_run_s_time_left_counts_its_own_steps_alone():
    clock = Clock()
    status = lines(clock, [])
    status.open(90)
    clock.now = 20.0
    status.written(LINE)
    assert status.values()["seconds_left"] == 400.0, "10 steps took 20 s, and 200 are left"


def test_lines_come_while_the_main_thread_is_busy():
    seen, three = [], threading.Event()

    def say(values):
        seen.append(values)
        if len(seen) == 3:
            three.set()

    with StatusLines(3, seconds=0.01, say=say) as status, status.phase("compiling"):
        assert three.wait(WAIT_SECONDS)
    assert seen[2]["phase"] == "compiling"
    num_seen = len(seen)
    assert not status._thread.is_alive()
    assert len(seen) == num_seen


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf])
def test_an_interval_that_is_none_is_refused(seconds):
    with pytest.raises(
        ValueError,
        match=rf"seconds between two lines must be positive; got {seconds:g}. Choose such as 15.",
    ):
        StatusLines(3, seconds=seconds)


def test_it_learns_of_steps_from_the_metrics_log(tmp_path):
    seen = []
    status = lines(Clock(), seen)
    with MetricsLog(tmp_path, 300, items_per_step=8, watchers=[status]) as log:
        log.log(0, {"loss": 3.0})
        log.log(1, {"loss": 2.0})
        values = status.values()
    assert (values["step"], values["loss"], values["steps"]) == (1, 3.0, 300)
    assert values["rows_per_second"] > 0


def test_a_message_is_one_line_of_json_whatever_is_in_it():
    out = io.StringIO()
    stream = JsonStream(out)
    print('two\nlines, "quoted"', file=stream, flush=True)
    print("error: no", file=stream, flush=True)
    print("\n", file=stream, flush=True)
    stream.emit(level="info", loss=math.nan, step=3)
    first, second, third = map(json.loads, out.getvalue().splitlines())
    assert (first["level"], first["message"]) == ("info", 'two\nlines, "quoted"')
    assert (second["level"], second["message"]) == ("error", "error: no")
    assert (third["loss"], third["step"]) == (None, 3), "JSON has no NaN"
    told = ("NOT SAVED: checkpoint of step 2: no room", "a.py:3: UserWarning: a rule", "Traceback")
    skipped = "step 5 changed nothing, since its loss or gradients were not finite"
    assert [*map(level_of, (*told, skipped))] == ["warning", "warning", "error", "warning"]
    assert all(line["time"].endswith("Z") for line in (first, second, third))


def test_a_recipe_off_a_terminal_prints_json_from_its_start_to_its_end(tmp_path, capsys):
    flags = [
        "--steps",
        "30",
        "--log-seconds",
        "0.05",
        "--log-json",
        "--out-dir",
        str(tmp_path / "run"),
    ]
    cli.run(house_prices.main, house_prices.Config, flags)
    said = capsys.readouterr()
    parsed = [json.loads(line) for text in said for line in text.splitlines()]
    phases = list(dict.fromkeys(line["phase"] for line in parsed if "phase" in line))
    assert phases[0] == "starting"
    assert {"starting", "compiling", "finishing"} <= set(phases)
    told = [line["phase"] for line in parsed if "phase" in line]
    assert "starting" not in told[told.index("compiling") :], "a phase that is over does not return"
    assert any(line.get("message", "").startswith("compiled in") for line in parsed)
    assert not isinstance(sys.stdout, JsonStream), "the streams are given back"
    assert not messages.status_watchers()


def test_a_prediction_is_all_that_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(house_prices, "describe_prediction", lambda *_: "a price")
    monkeypatch.setenv("JAXPAR_LOG_SECONDS", "15")
    cli.run(
        house_prices.main,
        house_prices.Config,
        ["--predict", "1650", "3", "--out-dir", str(tmp_path)],
    )
    assert tuple(capsys.readouterr()) == ("a price\n", "")


def test_the_first_line_is_of_json_like_the_others(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAXPAR_LOG_SECONDS", "900")
    cli.run(
        house_prices.main,
        house_prices.Config,
        ["--log-json", "--dry-run", "--out-dir", str(tmp_path)],
    )
    line = json.loads(capsys.readouterr().err.splitlines()[0])
    assert list(line) == ["time", "level", "phase", "elapsed_seconds", "phase_seconds"]
    assert line["phase"] == "starting"
    assert line["time"].endswith("Z")


@pytest.mark.parametrize("words", [("train",), ("train", "gpt", "--help"), ("train", "nothing")])
def test_no_first_line_is_printed_without_a_run(words, capsys, monkeypatch):
    monkeypatch.setenv("JAXPAR_LOG_SECONDS", "15")
    monkeypatch.setattr(sys, "argv", sys.argv)
    with contextlib.suppress(SystemExit):
        main(list(words))
    assert "starting" not in capsys.readouterr().err


@pytest.mark.full
def test_the_command_prints_its_first_line_once(tmp_path):
    command = [
        sys.executable,
        "-m",
        "jaxpar",
        "train",
        "house-prices",
        "--steps",
        "0",
        "--out-dir",
        str(tmp_path),
    ]
    env = os.environ | {"JAXPAR_LOG_SECONDS": "900"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.stderr.count("starting") == 1, done.stderr
    assert "--steps must be" in done.stderr


def test_log_seconds_of_0_prints_no_line(tmp_path, capsys):
    flags = ["--steps", "3", "--log-seconds", "0", "--dry-run", "--out-dir", str(tmp_path)]
    cli.run(house_prices.main, house_prices.Config, flags)
    assert capsys.readouterr().err == ""


def test_the_environment_says_how_often_a_line_comes(tmp_path, capsys, monkeypatch):
    flags = ["--steps", "3", "--dry-run", "--out-dir", str(tmp_path)]
    monkeypatch.setenv("JAXPAR_LOG_SECONDS", "900")
    cli.run(house_prices.main, house_prices.Config, flags)
    assert capsys.readouterr().err == "[0 s] starting\n"
    for told in ("-1", "often", "nan"):
        monkeypatch.setenv("JAXPAR_LOG_SECONDS", told)
        with pytest.raises(SystemExit) as end:
            cli.run(house_prices.main, house_prices.Config, flags)
        assert end.value.code == 2
        assert (
            f"must be a number of seconds, 0 or more; got {told}. Choose 15, say"
            in capsys.readouterr().err
        )


def test_metrics_are_served_before_the_step_is_compiled(tmp_path, monkeypatch):
    class ReachedError(Exception):
        pass

    served, exporter_of = [], exporters.PrometheusExporter

    def serve(*args, **settings):
        served.append(exporter_of(*args, **settings))
        return served[0]

    def lower(*_):
        (exporter,) = served
        try:
            assert scrape(exporter.port)["jaxpar_steps_total"] == 0
        finally:
            exporter.close()
        raise ReachedError

    monkeypatch.setattr(exporters, "PrometheusExporter", serve)
    monkeypatch.setattr("jaxpar.train.TrainStep.lower", lower)
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ReachedError):
        cli.run(
            house_prices.main,
            house_prices.Config,
            ["--metrics-port", str(port), "--out-dir", str(tmp_path)],
        )


def refusal(capsys, recipe, *flags):
    """What a recipe prints as it refuses flags."""
    with pytest.raises(SystemExit) as end:
        cli.run(recipe.main, recipe.Config, list(flags))
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--mesh.pipe", "--mesh.stage"),
        ("--max_lr", "--learning-rate"),
        ("--max_lr=3", "--learning-rate"),
        ("--tp", "--mesh.tensor"),
        ("--training.steps", "--steps"),
        ("--optimizer.lr", "--learning-rate"),
        ("--parallelism.tensor_parallel_degree", "--mesh.tensor"),
    ],
)
def test_another_trainer_s_name_of_a_flag_is_answered_with_ours(given, meant, capsys):
    assert f"{given.split('=')[0]}: did you mean {meant}?" in refusal(
        capsys, house_prices, given, "3"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--epochs", "jaxpar counts steps; --steps = epochs x rows / --batch-size"),
        (
            "--per_device_train_batch_size",
            "--batch-size has the rows of a step on all devices, in --num-microbatches of each replica",
        ),
        ("--warmup-ratio", "jaxpar counts steps; --warmup-steps = ratio x --steps"),
        (
            "--eval-data",
            "of a folder in --data, files with val or test in their names are held out; else a tenth of the examples",
        ),
        ("--lora-target-modules", "did you mean --lora-targets?"),
        (
            "--load_in_4bit",
            "use --lora-rank with --quantize nf4, which holds frozen weights in four bits",
        ),
        (
            "--bnb_4bit_use_double_quant",
            "use --lora-rank with --quantize nf4-dq, which holds the scales of four bits in a byte each",
        ),
        ("--model.num_layers", "the model's size comes from --model"),
        ("--lr_scheduler.warmup_steps", "did you mean --warmup-steps?"),
    ],
)
def test_a_name_without_an_equal_here_is_answered_with_what_to_use(given, said, capsys):
    assert refusal(capsys, gpt, given, "3").endswith(f"{given}: {said}\n")


@pytest.mark.parametrize("given", ["--num-layers", "--seq-len", "--warmup"])
def test_a_flag_that_a_recipe_lacks_is_not_suggested(given, capsys):
    assert f"{given}: " not in refusal(capsys, house_prices, given, "3")


@pytest.mark.parametrize("flags", [("--dtype", "bfloat"), ("--dtype=bfloat",)])
def test_a_choice_that_there_is_not_is_answered_with_the_nearest(flags, capsys):
    assert refusal(capsys, gpt, *flags).endswith("--dtype: did you mean bfloat16?\n")


def test_a_value_is_not_taken_for_a_flag(capsys):
    assert "lr: " not in refusal(capsys, gpt, "--out-dir", "lr", "--nothing")


def test_suggestions_name_flags_that_recipes_have():
    own = set(flag_names(gpt.Config).values())
    assert set(cli.OTHER_NAMES) <= own
    assert {flag for flag, _ in cli.ADVICE.values()} <= own
    others = [
        other for names in (*cli.OTHER_NAMES.values(), *cli.ADVICE) for other in names.split()
    ]
    assert not own & set(others)
    assert len(set(others)) == len(others)


def test_devices_that_a_mesh_leaves_idle_are_counted(capsys):
    with given_by(flag_names(house_prices.Config)):
        make_mesh(house_prices.Config.of(mesh=MeshFlags(data=2)))
    assert (
        "the mesh has 2 of 8 devices, the others are idle; --mesh.data -1 takes all of them"
        in capsys.readouterr().out
    )
    make_mesh(house_prices.Config.of(mesh=MeshFlags(stage=3)))
    assert capsys.readouterr().out == "the mesh has 3 of 8 devices, the others are idle\n", (
        "no advice that fails"
    )
    make_mesh(house_prices.Config.of(mesh=MeshFlags(data=-1)))
    assert capsys.readouterr().out == ""
