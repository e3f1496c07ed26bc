"""benchmarks/gpt_gpu.py runs on any machine, says what its figures mean, and refuses to compare two different models."""

import sys
from types import SimpleNamespace

import gpt_gpu
import pytest
import report

from jaxpar.models import transformer


@pytest.mark.full
def test_the_smoke_run_needs_no_gpu_and_no_pytorch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpt_gpu.py"])
    gpt_gpu.main(gpt_gpu.Config(smoke=True, torch="none", out=tmp_path / "figures.json"))
    said = capsys.readouterr().out
    steps, pair = report.Record.read(tmp_path / "figures.json").tables
    assert [row["run"] for row in steps.rows] == ["jaxpar"]
    assert steps.rows[0]["tokens/s"] > 0
    assert steps.rows[0]["peak GiB"] > 0
    assert [row["run"] for row in pair.rows] == ["jax.value_and_grad", "jaxpar.value_and_grad"]
    assert report.render(report.Record.read(tmp_path / "figures.json")) in said
    assert "llama-bytes, made tiny" in said


def test_without_a_gpu_it_says_so_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        gpt_gpu.main(gpt_gpu.Config())
    assert ended.value.code == report.CANNOT_RUN
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpt_gpu.py needs a GPU, and there is none here")


@pytest.mark.slow
def test_pytorch_trains_the_same_model(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", ["gpt_gpu.py"])
    gpt_gpu.main(gpt_gpu.Config(smoke=True, torch="eager", out=tmp_path / "figures.json"))
    record = report.Record.read(tmp_path / "figures.json")
    assert [row["run"] for row in record.tables[0].rows] == ["jaxpar", "PyTorch"]
    assert "(eager, cpu)" in record.versions["torch"]


def test_mfu_is_that_of_the_formula():
    shape = transformer.preset("tinyllama-1.1b")
    config = gpt_gpu.Config(peak_tflops=989.0)
    found = gpt_gpu.figures(config, shape, 1_100_048_384, 0.5)
    assert found["tokens/s"] == 4 * 4096 * 2
    assert found["MFU"] == pytest.approx((6 * 1_100_048_384 + 12 * 22 * 2048 * 4096) * 32768 / 989e12, abs=1e-4)
    assert gpt_gpu.figures(gpt_gpu.Config(), shape, 1, 1.0)["MFU"] == "unknown", "a CPU's peak is in no table"


@pytest.mark.parametrize(
    ("about", "losses", "message"),
    [
        (11, [2.0, 1.9, 1.8], "the models differ: 10 parameters, 11 in PyTorch"),
        (10, [2.0, 1.9, 1.81], "do not train one model"),
    ],
)
def test_two_models_are_not_compared(about, losses, message):
    ours = SimpleNamespace(num_params=10, train=lambda count: [2.0, 1.9, 1.8][:count])
    steps = iter(losses)
    theirs = SimpleNamespace(
        about={"num_params": about}, facts={}, train=lambda count: [next(steps) for _ in range(count)]
    )
    with pytest.raises(SystemExit, match=message):
        gpt_gpu.check_same(transformer.preset("llama-bytes"), ours, theirs)
