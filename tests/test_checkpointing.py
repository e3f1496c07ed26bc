"""Recipes that are asked to stop and then go on; signals come at a given step, in this process or in real ones."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import digits
import gpt
import house_prices
from jaxpar.commands import recipe as cli
from jaxpar.metrics.log import MetricsLog
from jaxpar.run import Run
from tests.support.flags import replaced
from tests.support.plain_recipe import make_plain
from tests.support.real_runs import PLAIN
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]


STEPS, STOP = 6, 3
MODULES = {"house_prices": house_prices, "digits": digits, "gpt": gpt}
PICTURES = {
    "house_prices": ("report.html", "loss.png", "surface.png"),
    "digits": ("report.html", "loss.png"),
    "gpt": ("report.html", "loss.png", "timeline.svg"),
}
ONE_AND_SLOW_OTHERS = [
    pytest.param(name, marks=() if name == "house_prices" else pytest.mark.slow) for name in MODULES
]


def arguments(recipe, folder):
    """The command line of a short run with data in ``folder``."""
    text = folder / "text.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz, " * 200)
    own = {
        "house_prices": ["--batch-size", "8", "--mesh.data", "2"],
        "digits": ["--hidden-layers", "2", "--width", "8"],
        "gpt": [
            "--data",
            str(text),
            "--seq",
            "8",
            "--batch-size",
            "4",
            "--warmup-steps",
            "2",
            "--eval-rows",
            "4",
        ],
    }
    return ["--steps", str(STEPS), *own[recipe]]


def run(recipe, folder, *flags):
    """Runs a recipe in this process, which has 8 devices."""
    module, out = MODULES[recipe], ["--out-dir", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        for slower in (gpt, house_prices):  # which compiles for longer than the rest takes
            patch.setattr(slower, "conclude", lambda *_: None)
        make_plain(digits, patch.setattr)
        cli.run(module.main, module.Config, replaced([*arguments(recipe, folder), *out, *flags]))


def send_at_step(monkeypatch, number, step):
    log = MetricsLog.log

    def log_then_send(self, at, metrics):
        log(self, at, metrics)
        if at == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(MetricsLog, "log", log_then_send)


def send_while_compiling(monkeypatch, number):
    compile_step = Run.compile

    def send_then_compile(*args):
        os.kill(os.getpid(), number)
        return compile_step(*args)

    monkeypatch.setattr(Run, "compile", send_then_compile)


def checkpoints(folder):
    return sorted(path.name for path in (folder / "out" / "checkpoints").iterdir())


def curve(folder):
    lines = [
        json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [
        "house_prices",
        "digits",
        pytest.param("gpt", marks=pytest.mark.slow),
    ],  # which tests/test_recipes_gpt.py resumes
)
def test_a_recipe_that_is_asked_to_stop_saves_and_draws_and_goes_on_to_the_same_numbers(
    recipe, tmp_path, monkeypatch, capfd
):
    run(recipe, tmp_path)
    want = curve(tmp_path)
    assert not (tmp_path / "out" / "checkpoints").exists(), "none was asked for"
    for picture in PICTURES[recipe]:
        (tmp_path / "out" / picture).unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        send_at_step(patch, signal.SIGINT, STOP - 1)
        with pytest.raises(SystemExit, match="75"):
            run(recipe, tmp_path, "--overwrite")
    assert checkpoints(tmp_path) == [str(STOP)]
    assert curve(tmp_path) == want[:STOP], "a line for each step that was saved"
    for picture in PICTURES[recipe]:
        assert (tmp_path / "out" / picture).stat().st_size > 1000, picture
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("SIGINT: saving at the end of a step")
    where = tmp_path / "out" / "checkpoints"
    assert said[1:] == [
        f"SIGINT: saved step {STOP}; go on with --resume, which reads it from {where}"
    ]
    run(recipe, tmp_path, "--resume")
    assert f"resumed from step {STOP}" in capfd.readouterr().out
    assert curve(tmp_path) == want, "bit for bit"


@pytest.mark.full
@pytest.mark.parametrize("recipe", ONE_AND_SLOW_OTHERS)
def test_a_recipe_asked_to_stop_while_it_compiles_saves_its_first_step(
    recipe, tmp_path, monkeypatch
):
    send_while_compiling(monkeypatch, signal.SIGTERM)
    with pytest.raises(SystemExit, match="75"):
        run(recipe, tmp_path)
    assert checkpoints(tmp_path) == ["1"]
    assert len(curve(tmp_path)) == 1


@pytest.mark.parametrize("recipe", ONE_AND_SLOW_OTHERS)
def test_a_dry_run_makes_no_params(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jaxpar.init_state", lambda *_, **__: pytest.fail("a dry run needs shapes alone")
    )
    run(recipe, tmp_path, "--dry-run")


def test_ctrl_c_where_nothing_is_trained_is_one_line(tmp_path, monkeypatch, capfd):
    send_while_compiling(monkeypatch, signal.SIGINT)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore Ctrl-C
    try:
        with pytest.raises(SystemExit, match="130"):
            run("house_prices", tmp_path, "--dry-run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == "error: interrupted; nothing was saved\n"


@pytest.fixture
def script():
    """Starts recipes as scripts, and lets none outlive its test."""
    started = []

    def start(recipe, folder, *flags, launch=()):
        given = replaced([*arguments(recipe, folder), "--out-dir", str(folder / "out"), *flags])
        own = [PLAIN, recipe, *given]
        clean = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
        environment = clean | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(
            subprocess.Popen([sys.executable, *launch, *own], cwd=ROOT, env=environment, **pipes)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def stop(process, folder, number, until):
    """Sends a signal to a run once it says ``until``; gives the step that it saved."""
    said = ""
    while until not in said:
        line = process.stdout.readline()
        assert line, f"it never said {until!r}: {said}"
        said += line
    process.send_signal(number)
    rest, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 75, rest
    assert "Traceback" not in rest
    [saved] = set(re.findall(rf"{number.name}: saved step (\d+); go on with --resume", rest))
    assert checkpoints(folder) == [saved]
    assert len(curve(folder)) == int(saved)
    return int(saved)


LONG = ("--steps", "1000000", "--fake-devices", "2")


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "number", "until"),
    [
        ("house_prices", signal.SIGINT, "compiled in"),
        pytest.param("digits", signal.SIGTERM, "hidden layers of", marks=pytest.mark.slow),
        pytest.param("gpt", signal.SIGINT, "frequencies alone", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_a_script_saves_and_exits_75(tmp_path, script, recipe, number, until, capsys):
    saved = stop(script(recipe, tmp_path, *LONG), tmp_path, number, until)
    run(recipe, tmp_path, "--steps", str(saved + 3), "--resume", "--allow-change", "steps")
    assert f"resumed from step {saved}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "until"), [(signal.SIGINT, "each step takes"), (signal.SIGTERM, "compiled in")]
)
def test_a_signal_to_a_launcher_stops_all_its_processes_after_one_step(
    tmp_path, script, number, until
):
    launch = ("-m", "jaxpar", "launch", "-n", "2", "--log-dir", str(tmp_path / "logs"))
    process = script("house_prices", tmp_path, "--steps", "1000000", launch=launch)
    stop(process, tmp_path, number, until)
