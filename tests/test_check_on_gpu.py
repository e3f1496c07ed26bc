"""benchmarks/check_on_gpu.py holds on a CPU in a small form, names what does not, and says why a GPU is not used."""

import os
import subprocess
import sys
from pathlib import Path

import check_on_gpu
import jax
import pytest

from tests.support.waiting import WAIT_SECONDS

SCRIPT = Path(check_on_gpu.__file__)


@pytest.mark.full
def test_all_checks_hold_tiny_on_a_cpu_without_tyro(tmp_path):
    (tmp_path / "tyro.py").write_text('raise ImportError("tyro is not installed")\n')
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{SCRIPT.parents[1]}"}
    command = [sys.executable, str(SCRIPT), "--small"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    count = len(list(check_on_gpu.checks(check_on_gpu.SMALL, on_gpu=False)))
    assert done.stdout.splitlines()[-1] == f"{count} of {count} hold"


def test_parts_are_all_checks_once_and_those_of_kernels_need_a_gpu():
    names = [check.name for check in check_on_gpu.checks(check_on_gpu.Sizes(), on_gpu=True)]
    places = [slice(*check_on_gpu.parse(["--part", f"{part}/3"]).part).start for part in range(3)]
    assert sorted(name for place in places for name in names[place::3]) == sorted(names)
    assert len(set(names)) == len(names)
    assert sum("cuDNN" in name for name in names) == 6
    assert not any(
        "cuDNN" in check.name for check in check_on_gpu.checks(check_on_gpu.SMALL, on_gpu=False)
    )


def test_without_pydantic_only_the_checkpoint_is_left_out(monkeypatch, capsys):
    every = [check.name for check in check_on_gpu.checks(check_on_gpu.SMALL, on_gpu=False)]
    monkeypatch.setattr(check_on_gpu.importlib.util, "find_spec", lambda name: None)
    assert [check.name for check in check_on_gpu.checks(check_on_gpu.SMALL, on_gpu=False)] == every[
        :-1
    ]
    assert capsys.readouterr().out == "left out: a checkpoint, which needs pydantic\n"


@pytest.mark.parametrize("part", ["3/3", "1", "a/b", "0/0"])
def test_a_part_that_there_is_not_is_refused(part, capsys):
    with pytest.raises(SystemExit):
        check_on_gpu.parse(["--part", part])
    assert f"--part must be such as 0/3, 1/3 or 2/3; got {part}." in capsys.readouterr().err


def test_without_a_gpu_it_says_so_in_one_line(capsys):
    assert check_on_gpu.main(check_on_gpu.parse([])) == check_on_gpu.CANNOT_RUN
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("check_on_gpu.py needs a GPU, and there is none here")


def test_two_settings_of_memory_that_keep_jax_off_the_gpu_are_refused(monkeypatch, capsys):
    for name in check_on_gpu.MEMORY:
        monkeypatch.setenv(name, ".3")
    assert check_on_gpu.main(check_on_gpu.parse([])) == 2
    assert (
        "must not both be set: JAX then stays off the GPU. Unset XLA_PYTHON"
        in capsys.readouterr().out
    )


def test_a_check_that_is_off_or_raises_is_named_and_the_others_go_on(monkeypatch, capsys):
    off, broken = check_on_gpu.Check("far off", 1e-5, lambda: float("nan")), lambda: 1 / 0
    given = [
        off,
        check_on_gpu.Check("broken", 1.0, broken),
        check_on_gpu.Check("right", 0.0, lambda: 0.0),
    ]
    monkeypatch.setattr(check_on_gpu, "checks", lambda *_: given)
    precision = jax.config.jax_default_matmul_precision
    assert check_on_gpu.main(check_on_gpu.parse(["--small"])) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 3 hold; not: far off; broken"
    assert jax.config.jax_default_matmul_precision == precision
