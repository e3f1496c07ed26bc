"""A run in a loop of one's own: what it refuses, and what it prints by."""

import logging
import subprocess
import sys

import pytest

import jaxpar
from jaxpar.run import BasicFlags, Run
from jaxpar.runtime.output import logging_kept
from tests.support.waiting import WAIT_SECONDS


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -4}, "steps must be at least 1; got -4"),
        ({"checkpoint_every": -1}, "checkpoint_every must be at least 0; got -1"),
        ({"max_skipped": -1}, "max_skipped must be at least 0; got -1"),
    ],
)
def test_flags_that_no_command_line_has_checked_are_checked(tmp_path, wrong, message):
    flags = BasicFlags.of(out_dir=tmp_path / "run", **wrong)
    with pytest.raises(ValueError, match=message):
        Run(flags, jaxpar.make_mesh())
    assert not (tmp_path / "run").exists()


def test_an_import_leaves_the_root_logger_as_it_was():
    before = logging.root.handlers[:]
    with logging_kept():
        logging.root.addHandler(logging.NullHandler())
    assert logging.root.handlers == before


LOGGED = """
import logging
import jaxpar, jaxpar.run, jaxpar.checkpoint
logging.basicConfig(level=logging.INFO)
jaxpar.use_fake_devices(2)
flags = jaxpar.run.BasicFlags.of(out_dir="OUT")
with jaxpar.run.Run(flags, jaxpar.make_mesh(data=2), say=logging.info):
    pass
"""


@pytest.mark.full
def test_a_run_can_print_by_logging_that_is_configured_after_the_import(tmp_path):
    script = LOGGED.replace('"OUT"', f"__import__('pathlib').Path({str(tmp_path / 'run')!r})")
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    assert "INFO:root:devices: 2 fake CPU devices" in ended.stderr, ended.stderr
