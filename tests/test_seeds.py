"""Fresh seeds: each failure names those of its test, its fixtures and its module, and one variable repeats them all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import WAIT_SECONDS

CONFTEST = "from tests.support.seeds import pytest_fixture_setup, pytest_runtest_makereport, pytest_runtest_protocol\n"
SUITE = """
import pytest
from tests.support.seeds import fresh_seed

OF_MODULE = fresh_seed()

@pytest.fixture(scope="module", params=[0, 1])
def model(request):
    return fresh_seed()

@pytest.fixture
def rng():
    return fresh_seed()

def test_first(model, rng):
    pass

def test_second(model, rng):
    assert (OF_MODULE, model, rng, fresh_seed(), fresh_seed()) == ()

def test_without():
    assert OF_MODULE < 0
"""


def failures(folder, *chosen, **variables):
    """Runs the suite; returns the seeds that each failure names, and the one of the run."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "JAXPAR_TEST"))
    }
    env |= {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    } | variables
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        *chosen,
    ]
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(
        r"^_+ (test_\S+) _+$(.*?)^(JAXPAR_TEST_SEED=\d+) repeats them", done.stdout, re.M | re.S
    )
    named = {name: text.partition("fresh seeds")[2].strip("- \n") for name, text, _ in found}
    return named, {variable for *_, variable in found}, done.stdout


@pytest.mark.full
def test_a_failure_names_its_seeds_and_one_variable_repeats_them(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)
    named, (variable,), said = failures(tmp_path)
    assert list(named) == ["test_second[0]", "test_second[1]", "test_without"], said
    for name in ("test_second[0]", "test_second[1]"):
        for place in (
            "test_suite:",
            "test_suite.py model:",
            f"test_suite.py::{name} rng:",
            f"test_suite.py::{name}:",
        ):
            (line,) = [line for line in named[name].splitlines() if line.startswith(place)]
            assert all(seed in said for seed in re.findall(r"\d+", line.removeprefix(place)))
    assert named["test_without"].startswith("test_suite: ")
    assert len(set(re.findall(r": (.*)", "\n".join(named.values())))) == 6, (
        "module and its fixture have one each"
    )
    again, _, said = failures(
        tmp_path, "test_suite.py::test_second[1]", **dict([variable.split("=")])
    )
    assert again == {"test_second[1]": named["test_second[1]"]}, said
