"""benchmarks/gpu_day.py runs its jobs on any machine, within its minutes and without tyro and rich, and loses no figures."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpt_training
import gpu_day
import jax
import numpy as np
import pytest
import report
import torch_process
from gpt_training import IN_DOCUMENTS, WORKS, make_shape
from gpu_day_parts import (
    attention,
    grouped,
    kernels,
    pipelines,
    published,
    roofline,
    schedule,
    steps,
)
from gpu_day_parts.common import Candidates, Context, off_by

from tests.support.waiting import WAIT_SECONDS

FAR = 4e9  # seconds of the clock, in the year 2096
# The process of a job, which writes a table and then does what its name says.
CHILD = """
import json, pathlib, sys, time
(name,) = [flag for flag in sys.argv if flag in ("attention", "host_waits", "checkpoint")]
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
table = dict(title=name, columns={"run": ""}, rows=[{"run": "x"}], mesh="", note="")
found = dict(tables=[table], outcome=None, seconds=6)
part = folder / f"part-{name}.json"
if name == "host_waits":  # takes too long
    part.write_text(json.dumps(found))
    over = pathlib.Path(__file__).with_name("over")
    over.with_suffix(".new").write_text(sys.argv[sys.argv.index("--until") + 1])
    over.with_suffix(".new").rename(over)
    time.sleep(10**6)
if name == "attention":  # crashes
    part.write_text(json.dumps(found))
    sys.exit(3)
part.write_text(json.dumps(found | {"outcome": "measured"}))
"""

# gpt_torch.py without PyTorch: each loss is the number of the step.
TORCH = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
assert json.loads((folder / "run.json").read_text()) == {"torch": "eager", "attention": "flash", "cpu": True}
assert json.loads((folder / "spec.json").read_text())["num_layers"] == 2 and (folder / "outer.tokens.npy").exists()
print(json.dumps({"torch": "2.11.0", "device": "cuda", "device_kind": "NVIDIA H100 80GB HBM3", "num_params": 2}), flush=True)
steps = 0
for line in sys.stdin:
    losses = [float(steps + i) for i in range(int(line))]
    steps += len(losses)
    print(json.dumps({"seconds": 1.0, "losses": losses, "peak_bytes": 3 * 2**30}), flush=True)
"""


@pytest.fixture
def context(tmp_path):
    return Context("pipelines", tmp_path, True, FAR, FAR)


def without_tyro_and_rich(folder):
    """The environment of a process that has neither."""
    for name in ("tyro", "rich"):
        (folder / f"{name}.py").write_text(f'raise ImportError("{name} is not installed")\n')
    return os.environ | {"PYTHONPATH": f"{folder}:{gpu_day.SCRIPT.parents[1]}"}


# Those that take long here, and whose code others run too.
LONG = ("pipelines", "training-remat", "training-checkpoint", "wide", "gradients")
QUICK = [name for name in schedule.NAMES if name not in LONG and not name.endswith("-torch")]


@pytest.mark.full
@pytest.mark.parametrize(
    "jobs",
    [pytest.param(QUICK, id="quick"), pytest.param(list(LONG), id="long", marks=pytest.mark.slow)],
)
def test_jobs_run_tiny_without_tyro_and_rich(tmp_path, jobs):
    out = tmp_path / "figures.json"
    flags = ["--smoke", "--torch-python", "", "--out", str(out), "--only", *jobs]
    command, env = [sys.executable, str(gpu_day.SCRIPT), *flags], without_tyro_and_rich(tmp_path)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = report.Record.read(out)
    assert report.render(record) in done.stdout, "what is written renders to what was said"
    tables = {table.title: table.rows for table in record.tables}
    outcomes = {row["job"]: row["outcome"] for row in tables[gpu_day.OUTCOMES]}
    assert outcomes == dict.fromkeys(jobs, gpu_day.MEASURED)
    trained = [each for each in schedule.JOBS if each.name in jobs and each.part == "steps"]
    assert [row["run"] for row in tables[steps.TITLE]] == [each.args[1] for each in trained]
    assert all(row["tokens/s"] > 0 and row["peak GiB"] > 0 for row in tables[steps.TITLE])
    assert all(row["jax"] == jax.__version__ for row in tables[steps.TITLE])
    if jobs != QUICK:
        return
    assert "min left of attention" in done.stdout
    planned = {row["job"].partition(",")[0]: row["plan GiB"] for row in tables[roofline.TITLE]}
    assert [name for name, gib in planned.items() if gib is None] == [WORKS["documents"].title]
    (checkpoint,) = next(
        rows for title, rows in tables.items() if title.startswith("A checkpoint of")
    )
    assert checkpoint["restored equal"] == "yes"
    products = [row["product"] for row in tables[grouped.TITLE]]
    assert products == ["dense", "forward", "gradient of rows", "gradient of weights"]


@pytest.mark.full
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(
            ("no pipeline", "interleaved, four virtual stages", "interleaved, 4 stages"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("no pipeline", "mpmd, four virtual stages", "zb-h1, 4 stages"), marks=pytest.mark.slow
        ),
    ],
)
def test_pipelines_of_a_day_have_the_gradients_of_no_pipeline(context, monkeypatch, runs):
    monkeypatch.setattr(pipelines, "SMOKE", runs)
    (table,) = pipelines.measure(context)
    rows = {row["run"]: row for row in table.rows}
    assert tuple(rows) == runs, table.note
    assert all(row["gradients off by"] < 1e-5 for row in rows.values())
    if "interleaved, 4 stages" in rows:
        row = rows["interleaved, 4 stages"]
        assert (row["devices"], rows["no pipeline"]["devices"]) == (4, 1)
        assert row["of schedule alone"] == pytest.approx((8 + 3 / 2) / 8 / 4), (
            "a bubble of (S - 1) / v"
        )


@pytest.mark.full
def test_attention_under_a_mesh_is_attention(context):
    sizes = attention.TINY
    inputs = attention.random_inputs(sizes, jax.random.key(1))
    mesh = attention.kernels("xla", [])
    assert list(mesh) == ["cuDNN, no mesh", "XLA, no mesh"]
    expected = attention.exact(inputs, True)
    kernel, _ = mesh["XLA, no mesh"]
    found = attention.under(kernel, None, whole=True)(*inputs)
    assert off_by(found, expected) < 0.02
    assert off_by(jax.tree.map(lambda a: a + 1, found), expected) > 0.1, (
        "it would see another function"
    )


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(gpu_day, "find_gpu", lambda: "")
    assert gpu_day.main(gpu_day.parse([])) == report.CANNOT_RUN
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu_day.py needs a GPU, and there is none here")


def test_a_job_that_crashes_or_takes_too_long_costs_no_figures(tmp_path, monkeypatch, capfd):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(gpu_day, "SCRIPT", tmp_path / "child.py")
    over = (
        tmp_path / "over"
    )  # the time to which the clock jumps once the long job has written its figures
    clock = lambda: float(over.read_text()) if over.exists() else 0.0
    monkeypatch.setattr(gpu_day, "time", SimpleNamespace(time=clock))
    monkeypatch.setattr(gpu_day, "GRACE", 0.0)
    monkeypatch.setattr(gpu_day, "find_gpu", lambda: "1 x NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(sys, "argv", ["gpu_day.py"])
    out = tmp_path / "figures.json"
    flags = [
        "--only",
        "checkpoint",
        "host_waits",
        "attention",
        "--minutes",
        "6",
        "--out",
        str(out),
    ]
    assert gpu_day.main(gpu_day.parse(flags)) == 0
    record = report.Record.read(out)
    written = ["attention", "host_waits", published.TITLE, gpu_day.OUTCOMES]
    assert [table.title for table in record.tables] == written
    assert {row["job"]: row["outcome"] for row in record.tables[-1].rows} == {
        "attention": "ended with exit code 3",
        "host_waits": "stopped at the end of its time",
        "checkpoint": "left out: 170 s were left, and it takes about 240",
    }
    assert record.machine.endswith(", 1 x NVIDIA H100 80GB HBM3")
    assert record.tables[0].rows[0]["GPU"] == "1 x NVIDIA H100 80GB HBM3", (
        "each row says where it was measured"
    )


# The schedule ----------------------------------------------------------------------------------------------------------------

FIGURES = Path(gpu_day.SCRIPT).parent / "results" / "gpu_day.json"
FIRST_START, START = (
    30.0,
    10.0,
)  # seconds of the first process on a bare machine, and of another one


def measured_seconds(job):
    """What a job takes by what was measured on an H100: its start, its compilation and its steps; else what it says."""
    tables = {table.title: table.rows for table in report.Record.read(FIGURES).tables}
    ended = {row["job"]: row["seconds"] for row in tables[gpu_day.OUTCOMES]}
    if job.part != "steps":
        return ended[job.name] or job.seconds
    work, run = WORKS[job.args[0]].job, job.args[1].partition(",")[0]
    found = [
        row for row in tables[steps.TITLE] if row["job"] == work and row["run"].startswith(run)
    ]
    if not found or found[0]["first compile s"] is None:
        return job.seconds
    count = gpt_training.CHECKED_STEPS + steps.STEPS * steps.ROUNDS
    return START + found[0]["first compile s"] + count * found[0]["ms a step"] / 1e3


def day(seconds, minutes=gpu_day.MINUTES):
    """Returns when a day ends whose jobs take these seconds, those that ran to their end, and those left out."""
    clock, ran, left_out = [FIRST_START], [], []
    for turn in schedule.turns(schedule.JOBS, 60 * minutes, lambda: clock[-1]):
        if turn.until is None:
            left_out.append(turn.job.name)
            continue
        done, killed = clock[-1] + seconds[turn.job.name], turn.until + schedule.GRACE
        ran += [turn.job.name] if done <= killed else []
        clock.append(min(done, killed))
    return clock[-1], ran, left_out


AS_MEASURED = {job.name: measured_seconds(job) for job in schedule.JOBS}
FOR_MORE = ["attention", "gradients", "host_waits", "checkpoint"]


def test_a_day_ends_within_its_minutes_by_what_was_measured_and_runs_what_is_wanted():
    now, ran, left_out = day(AS_MEASURED)
    assert now <= 60 * gpu_day.MINUTES == 720
    wanted = [name for name in schedule.NAMES if name not in FOR_MORE]
    assert ran[: len(wanted)] == wanted
    assert set(left_out) <= set(FOR_MORE)
    assert all(job.seconds >= AS_MEASURED[job.name] for job in schedule.JOBS), (
        "or it might not fit in what is left"
    )


@pytest.mark.parametrize("slower", [1.3, 1.9, 5.0, math.inf])
def test_a_day_on_a_slower_machine_ends_in_time_too_and_leaves_out_the_least_wanted(slower):
    now, ran, left_out = day({name: slower * seconds for name, seconds in AS_MEASURED.items()})
    assert now <= 60 * gpu_day.MINUTES
    if slower < schedule.PATIENCE:
        assert ran == list(schedule.NAMES[: len(ran)]), "the most wanted ones are those that ran"
        assert len(ran) >= 7
    assert {"gradients", "checkpoint"} <= set(left_out)


def test_with_more_minutes_nothing_is_left_out_and_with_few_a_shorter_job_takes_the_place_of_a_longer_one():
    assert day(AS_MEASURED, minutes=30)[1:] == (list(schedule.NAMES), [])
    _, ran, left_out = day(AS_MEASURED, minutes=2)
    assert ran[0] == "training"
    assert left_out[0] == "training-torch"
    assert "documents" in ran


def test_a_job_that_is_left_out_says_how_much_time_it_lacks():
    (turn,) = schedule.turns([schedule.JOBS[0]], 40.0, lambda: 0.0)
    assert turn.why == "left out: 30 s were left, and it takes about 50"


def test_a_candidate_that_fails_is_named_and_the_others_are_timed(context):
    candidates = Candidates(context)
    candidates.add("double", lambda x: 2 * x, np.ones(3))
    candidates.add_run("too large", lambda: 1 / 0)
    assert list(candidates.timed("too large")) == ["double"]
    assert candidates.note() == "Left out: too large (ZeroDivisionError: division by zero)."


def test_no_candidate_is_started_without_time(tmp_path):
    candidates = Candidates(Context("gradients", tmp_path, False, 0.0, 0.0))
    candidates.add_run("late", lambda: pytest.fail("it was started"))
    assert candidates.left_out == {"late": "no time was left"}


def test_pytorch_runs_in_a_process_on_what_jaxpar_wrote(context, tmp_path, monkeypatch):
    (tmp_path / "gpt_torch.py").write_text(TORCH)
    monkeypatch.setattr(torch_process, "HERE", tmp_path)
    work, run, folder = context.work("llama"), steps.RUNS["PyTorch, torch.compile"], tmp_path
    with pytest.raises(
        RuntimeError, match="there is no PyTorch: install it, or name its interpreter"
    ):
        steps.by_torch(context, work, run, folder)
    context = dataclasses.replace(context, torch_python=sys.executable)
    with pytest.raises(RuntimeError, match="did not write"):
        steps.by_torch(context, work, run, folder)
    torch_process.write_inputs(folder, work, make_shape(work), {"outer/tokens": np.ones(2)}, {})
    found, _ = steps.by_torch(context, work, run, folder)
    assert found["losses"] == [0.0, 1.0, 2.0], "the first step is timed alone, and the losses go on"
    assert found["parameters"] == 2
    assert found["peak GiB"] == 3
    rate = (6 * 2 + 12 * 2 * 32 * 32) * found["tokens/s"]
    assert found["MFU"] == pytest.approx(rate / 989e12), "of the device that PyTorch names"
    assert found["first compile s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_pytorch_trains_the_same_model(context, name):
    if not (python := os.environ.get("JAXPAR_TEST_TORCH_PYTHON") or gpu_day.has_torch()):
        pytest.skip(
            "PyTorch is not installed, and JAXPAR_TEST_TORCH_PYTHON names no Python that has it"
        )
    context = dataclasses.replace(context, torch_python=python)
    for run in (
        "jaxpar",
        "PyTorch, torch.compile",
    ):  # raises unless its losses are those of the first one
        table = next(iter(steps.measure(context, name, run)))
    assert table.rows[0]["run"].endswith(", no compiler")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"losses": [2.0, 1.9, 1.7]},
            r"does not train this model: losses \[2.0, 1.9, 1.7\], \[2.0, 1.9, 1.8\] by jaxpar",
        ),
        ({"parameters": 11}, "another model: 11 parameters, 10 by jaxpar"),
    ],
)
def test_two_models_are_not_compared(context, tmp_path, other, message):
    work, found = context.work("llama"), {"losses": [2.0, 1.9, 1.8], "parameters": 10}
    for run in ("jaxpar", "again"):
        steps.check_same(tmp_path, work, run, found)
    with pytest.raises(RuntimeError, match=message):
        steps.check_same(tmp_path, work, "PyTorch", found | other)


def test_mfu_is_that_of_the_formula():
    work, kind = WORKS["llama"], "NVIDIA H100 80GB HBM3"
    shape = make_shape(work)
    found = gpt_training.figures(work, shape, 1_100_048_384, 0.5, kind)
    assert found["tokens/s"] == 4 * 4096 * 2
    assert found["MFU"] == pytest.approx(
        (6 * 1_100_048_384 + 12 * 22 * 2048 * 4096) * 32768 / 989e12
    )
    assert gpt_training.figures(work, shape, 1, 1.0, "cpu")["MFU"] == "unknown", (
        "a CPU's peak is in no table"
    )
    frozen = gpt_training.figures(
        WORKS["lora"], make_shape(WORKS["lora"]), 8_030_261_248, 0.5815, kind
    )
    assert frozen["MFU"] == pytest.approx(0.549, abs=2e-3), "as it was measured"


def test_tables_of_one_title_are_one_and_steps_are_compared_with_the_first_of_their_job(tmp_path):
    row = dict.fromkeys(steps.COLUMNS)
    for name, job, seconds in (
        ("training", "a", 2.0),
        ("gpt2", "b", 5.0),
        ("documents", f"a{IN_DOCUMENTS}", 4.0),
        ("training-torch", "a", 3.0),
    ):
        rows = [row | {"job": job, "ms a step": seconds}]
        table = report.Table(steps.TITLE, steps.COLUMNS, rows, "one device", steps.NOTE)
        gpu_day.part_file(tmp_path, name).write_text(
            json.dumps({"tables": [dataclasses.asdict(table)]})
        )
    (table,) = gpu_day.tables_of(tmp_path, schedule.NAMES)
    assert table.note == steps.NOTE
    assert [each["time ratio"] for each in steps.with_ratios(table).rows] == [1.0, 1.5, 2.0, 1.0]


def test_kernels_of_a_profile_are_told_apart_by_their_names():
    spent = {
        "nvjet_sm90_tst_128x160": 3.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": 2.0,
        "memcpy128": 1.0,
    }
    by_kind, longest = kernels.tables(
        "a job", spent | {"loop_add_fusion": 4.0}, dict.fromkeys([*spent, "loop_add_fusion"], 1)
    )
    kinds = [(row["kernels"], row["ms a step"]) for row in by_kind.rows]
    assert kinds == [(kernels.OTHER, 4.0), ("products", 3.0), ("attention", 2.0), ("copies", 1.0)]
    assert sum(row["share"] for row in by_kind.rows) == pytest.approx(1)
    assert longest.rows[0]["kernel"] == "loop_add_fusion"


def record_of(part, **changes):
    table = report.Table(part, {"run": ""}, [{"run": "x"}])
    outcomes = gpu_day.outcome_table([{"job": part, "seconds": 60.0, "outcome": "measured"}])
    given = {
        "commit": "abc1234",
        "machine": "A processor",
        "versions": {"jax": "0.11.2"},
        "smoke": False,
    } | changes
    command = f"python benchmarks/gpu_day.py --only {part}"
    return report.Record("gpu_day", command=command, tables=[table, *outcomes], **given)


def test_figures_of_several_commands_are_joined(tmp_path, capsys):
    for name in ("training", "attention"):
        record_of(name).write(tmp_path / f"{name}.json")
    paths = [tmp_path / "training.json", tmp_path / "attention.json"]
    assert gpu_day.join(paths, tmp_path / "joined.json") == 0
    joined = report.Record.read(tmp_path / "joined.json")
    assert [table.title for table in joined.tables] == [
        "training",
        "attention",
        published.TITLE,
        gpu_day.OUTCOMES,
    ]
    assert [row["job"] for row in joined.tables[-1].rows] == ["training", "attention"]
    assert joined.command.count("--only") == 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            record_of("attention", commit="0123abc"),
            r"one commit; got 0123abc; abc1234\. Measure again",
        ),
        (record_of("training"), r"different jobs; got one twice\. Leave one of the files out"),
    ],
)
def test_figures_that_do_not_belong_together_are_not_joined(tmp_path, second, message):
    record_of("training").write(tmp_path / "a.json")
    second.write(tmp_path / "b.json")
    with pytest.raises(SystemExit, match=message):
        gpu_day.join([tmp_path / "a.json", tmp_path / "b.json"], None)
