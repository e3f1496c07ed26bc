"""benchmarks/gpt_gpu.py runs on any machine, says what its figures mean, and refuses to compare two different models."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.models import transformer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpt_gpu


def test_the_smoke_run_needs_no_gpu_and_no_pytorch(tmp_path):
    command = [
        sys.executable,
        gpt_gpu.HERE / "gpt_gpu.py",
        "--smoke",
        "--torch",
        "none",
        "--out",
        tmp_path / "figures.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=gpt_gpu.HERE.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert set(found["rows"]) == {"jaxpar", "jax.value_and_grad", "jaxpar.value_and_grad"}
    assert found["rows"]["jaxpar"]["tokens/s"] > 0
    assert found["rows"]["jaxpar"]["peak GiB"] > 0
    assert set(found["ratios"]) == {"seconds of jaxpar.value_and_grad over jax.value_and_grad"}
    assert "llama-bytes, made tiny" in done.stdout.lower()


@pytest.mark.slow
def test_pytorch_trains_the_same_model_and_the_figures_are_appended(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path / "RESULTS.md").write_text("# Results\n")
    monkeypatch.setattr(gpt_gpu, "RESULTS", tmp_path / "RESULTS.md")
    gpt_gpu.main(gpt_gpu.Config(smoke=True, torch="eager", append=True))
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.startswith("# Results\n\n## Llama of 1B parameters on one GPU\n\n`python benchmarks/gpt_gpu.py")
    assert "| PyTorch |" in text
    assert "tokens/s of jaxpar over PyTorch: " in text


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
