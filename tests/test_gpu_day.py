"""benchmarks/gpu_day.py runs its parts on any machine, in time and without tyro and rich, and loses no figures."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import gpu_day
import jax
import numpy as np
import pytest
import report
import torch_process
from gpt_training import make_shape
from gpu_day_parts import attention, pipelines, roofline, training
from gpu_day_parts.common import Candidates, Context, off_by

from tests.support.waiting import WAIT_SECONDS

FAR = 4e9  # seconds of the clock, in the year 2096
# The process of a part, which writes a table and then does what its name says.
CHILD = """
import json, pathlib, sys, time
(name,) = [flag for flag in sys.argv if flag in ("attention", "host_waits", "checkpoints")]
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
table = dict(title=name, columns={"run": ""}, rows=[{"run": "x"}], mesh="", note="")
found = dict(tables=[table], outcome=None, minutes=0.1)
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
assert json.loads((folder / "run.json").read_text()) == {"torch": "compile", "attention": "cudnn", "cpu": False}
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


QUICK = [name for name in gpu_day.MINUTES if name != "pipelines"]  # those run in this process below


@pytest.mark.full
@pytest.mark.parametrize(
    "parts", [pytest.param(QUICK, id="quick"), pytest.param(list(gpu_day.MINUTES), id="all", marks=pytest.mark.slow)]
)
def test_parts_run_tiny_without_tyro_and_rich(tmp_path, parts):
    out = tmp_path / "figures.json"
    command = [
        sys.executable,
        str(gpu_day.SCRIPT),
        "--smoke",
        "--torch-python",
        "",
        "--out",
        str(out),
        "--only",
        *parts,
    ]
    env = without_tyro_and_rich(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = report.Record.read(out)
    assert report.render(record) in done.stdout, "what is written renders to what was said"
    tables = {table.title.partition(" of ")[0]: table.rows for table in record.tables}
    outcomes = {row["part"]: row["outcome"] for row in tables[gpu_day.OUTCOMES]}
    assert outcomes == dict.fromkeys(parts, "measured")
    assert "min left of attention" in done.stdout

    steps = {row["run"]: row for row in tables["Training steps"]}
    assert list(steps) == list(training.chosen(Context("training", tmp_path, True, 0, 0)))
    assert all(row["tokens/s"] > 0 and row["peak GiB"] > 0 for row in steps.values())
    planned = {
        row["run"]: row["plan GiB"] for row in tables["The same steps by the roofline, the planner and the device"]
    }
    assert planned["jaxpar"] > 0
    gradients = tables["Loss and gradients"]
    assert {row["run"] for row in gradients if "remat" in row} <= {"jax.value_and_grad", "jaxpar.value_and_grad"}
    (checkpoint,) = tables["A checkpoint"]
    assert checkpoint["restored equal"] == "yes"
    assert None not in checkpoint.values()


@pytest.mark.full
@pytest.mark.parametrize(
    "runs",
    [
        ("no pipeline", "interleaved, four virtual stages", "interleaved, 4 stages"),
        pytest.param(("no pipeline", "mpmd, four virtual stages", "zb-h1, 4 stages"), marks=pytest.mark.slow),
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
        assert row["of schedule alone"] == pytest.approx((8 + 3 / 2) / 8 / 4), "a bubble of (S - 1) / v"


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
    assert off_by(jax.tree.map(lambda a: a + 1, found), expected) > 0.1, "it would see another function"


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(gpu_day, "find_gpu", lambda: "")
    assert gpu_day.main(gpu_day.parse([])) == report.CANNOT_RUN
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu_day.py needs a GPU, and there is none here")


def test_a_part_that_crashes_or_takes_too_long_costs_no_figures(tmp_path, monkeypatch, capfd):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(gpu_day, "SCRIPT", tmp_path / "child.py")
    over = tmp_path / "over"  # the time to which the clock jumps once the long part has written its figures
    monkeypatch.setattr(
        gpu_day, "time", SimpleNamespace(time=lambda: float(over.read_text()) if over.exists() else 0.0)
    )
    monkeypatch.setattr(gpu_day, "GRACE", 0.0)
    monkeypatch.setattr(gpu_day, "find_gpu", lambda: "1 x NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(sys, "argv", ["gpu_day.py"])
    out = tmp_path / "figures.json"
    flags = ["--only", "checkpoints", "host_waits", "attention", "--minutes", "0.1", "--out", str(out)]
    assert gpu_day.main(gpu_day.parse(flags)) == 0
    record = report.Record.read(out)
    assert [table.title for table in record.tables] == ["attention", "host_waits", "checkpoints", gpu_day.OUTCOMES]
    assert {row["part"]: row["outcome"] for row in record.tables[-1].rows} == {
        "attention": "ended with exit code 3",
        "host_waits": "stopped at the end of its time",
        "checkpoints": "measured",
    }
    assert record.machine.endswith(", 1 x NVIDIA H100 80GB HBM3")


def test_each_part_gets_its_share_of_the_time_that_is_left(monkeypatch):
    args = gpu_day.parse(["--minutes", "11", "--only", "attention", "training", "host_waits"])
    monkeypatch.setattr(gpu_day, "time", SimpleNamespace(time=lambda: now))
    now = 1e6
    (first, until, end), *others = list(gpu_day.turns(args, now))
    assert first == ["training"], "the order is that of what is most wanted"
    assert end - now == pytest.approx(660)
    assert until - now == pytest.approx(660 * 9.5 / 13)
    assert [names for names, _, _ in others] == [["attention"], ["host_waits"]]
    assert others[-1][1] == pytest.approx(end), "the last part gets all that is left"


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
    context = dataclasses.replace(context, torch_python=sys.executable)
    candidate = training.CANDIDATES["PyTorch, torch.compile, cuDNN's attention"]
    assert "did not write" in training.by_torch(context, candidate)["error"]
    (context.folder / "torch").mkdir()
    shape = make_shape(context.work())
    torch_process.write_inputs(context.folder / "torch", context.work(), shape, {"outer/tokens": np.ones(2)}, {})
    found = training.by_torch(context, candidate)
    assert found["losses"] == [0.0, 1.0, 2.0], "the first step is timed alone, and the losses go on"
    assert found["parameters"] == 2
    assert found["peak GiB"] == 3
    rate = (6 * 2 + 12 * 2 * 32 * 32) * found["tokens/s"]
    assert found["MFU"] == pytest.approx(rate / 989e12), "of the device that PyTorch names"
    assert found["first compile s"] > 0


def test_runs_of_other_models_are_left_out_of_the_table_of_steps(context, monkeypatch):
    answers = iter([[2.0, 1.9, 1.8], [2.0, 1.9, 1.7]])
    figures = {"parameters": 10, "ms a step": 1.0, "MFU": 0.5, "spread": 0.0, "tokens/s": 1.0}
    monkeypatch.setattr(training, "answer_of", lambda context, name: figures | {"losses": next(answers)})
    *_, table = training.measure(context)
    assert [row["run"] for row in table.rows] == ["jaxpar"]
    assert "it does not train this model: losses [2.0, 1.9, 1.7], [2.0, 1.9, 1.8]" in table.note


def test_a_measured_step_is_held_against_its_roofline_and_its_plan():
    found = {
        "jaxpar": {"bounds": {"measured ms": 3.0, "as compiled ms": 2.0}},
        "PyTorch": {},
        "x": {"bounds": {"error": "E"}},
    }
    table = roofline.table(found)
    assert [row["run"] for row in table.rows] == ["jaxpar", "x"]
    assert table.note.endswith(" x: E.")


def record_of(part, **changes):
    table = report.Table(part, {"run": ""}, [{"run": "x"}])
    outcomes = gpu_day.outcome_table([{"part": part, "minutes": 1.0, "outcome": "measured"}])
    given = {"commit": "abc1234", "machine": "A processor", "versions": {"jax": "0.11.2"}, "smoke": False} | changes
    command = f"python benchmarks/gpu_day.py --only {part}"
    return report.Record("gpu_day", command=command, tables=[table, *outcomes], **given)


def test_figures_of_several_commands_are_joined(tmp_path, capsys):
    for name in ("training", "attention"):
        record_of(name).write(tmp_path / f"{name}.json")
    paths = [tmp_path / "training.json", tmp_path / "attention.json"]
    assert gpu_day.join(paths, tmp_path / "joined.json") == 0
    joined = report.Record.read(tmp_path / "joined.json")
    assert [table.title for table in joined.tables] == ["training", "attention", gpu_day.OUTCOMES]
    assert [row["part"] for row in joined.tables[-1].rows] == ["training", "attention"]
    assert joined.command.count("--only") == 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (record_of("attention", commit="0123abc"), r"one commit; got 0123abc; abc1234\. Measure again"),
        (record_of("training"), r"different parts; got a table twice\. Leave one of the files out"),
    ],
)
def test_figures_that_do_not_belong_together_are_not_joined(tmp_path, second, message):
    record_of("training").write(tmp_path / "a.json")
    second.write(tmp_path / "b.json")
    with pytest.raises(SystemExit, match=message):
        gpu_day.join([tmp_path / "a.json", tmp_path / "b.json"], None)
