"""The benchmarks run, and what they count without a clock is what the README claims."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def smoke(tmp_path, script, *flags):
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / script), "--smoke", "--out", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout


def test_traffic_of_a_step_is_the_least_on_each_axis(tmp_path):
    rows, _ = smoke(tmp_path, "traffic.py")
    own = [row for row in rows if row["step"].startswith("jaxpar")]
    assert {row["axis"] for row in own} == {"data", "tensor", "stage"}
    for row in own:
        ratio = row["sent"] / row["least"]
        assert 1 <= ratio < 1.005, f"{row}: {ratio}"  # beside the gradients go a loss and a weight


def test_1f1b_keeps_the_same_for_more_microbatches_and_a_quarter_of_what_gpipe_by_autodiff_does(tmp_path):
    figures, _ = smoke(tmp_path, "memory.py")
    own, gpipe = figures["jaxpar 1f1b"], figures["GPipe by jax.grad"]
    assert own["8"] == own["32"]
    assert own["32"] < gpipe["32"] / 4


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("scaling.py", ()),
        ("checkpoint.py", ("--fake-devices", "2")),
        ("pipeline.py", ("--schedules", "1f1b", "--free")),
    ],
)
def test_benchmarks_run(tmp_path, script, flags):
    figures, said = smoke(tmp_path, script, *flags)
    assert figures
    assert said


def test_peers_step_in_turn_and_have_the_same_losses(tmp_path):
    figures, _ = smoke(tmp_path, "peers.py", "--only", "data")
    assert {"jax.jit with shardings, DP 2", "jaxpar, DP 2"} <= set(figures["questions"]["data"])
