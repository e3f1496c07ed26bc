"""SIGTERM and Ctrl-C as a request, and a second one as an end; tests/test_stopped_runs.py sends them to runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.runtime.preemption import SIGNALS, StopSignals
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_once_by_its_name(number, capfd):
    before, asked = signal.getsignal(number), []
    with StopSignals(asked.append):
        os.kill(os.getpid(), number)
    assert asked == [number.name]
    assert (
        capfd.readouterr().err
        == f"{number.name}: saving at the end of a step, then stopping; a second signal ends it at once\n"
    )
    assert signal.getsignal(number) is before


def test_what_the_outer_took_the_inner_hears(capfd):
    asked, later = [], []
    with StopSignals(later.append):
        os.kill(os.getpid(), signal.SIGTERM)
        with StopSignals(asked.append):
            assert asked == ["SIGTERM"], "it came before the loop, such as while the step compiled"
    assert later == ["SIGTERM"]
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_the_inner_hears_what_the_outer_takes():
    asked, later = [], []
    with StopSignals(later.append), StopSignals(asked.append):
        os.kill(os.getpid(), signal.SIGINT)
    assert (asked, later) == (["SIGINT"], [])


def test_after_the_last_step_it_says_what_is_left_to_do(capfd):
    with StopSignals():
        with StopSignals():
            pass
        os.kill(os.getpid(), signal.SIGINT)
    assert "the run is about to end; a second signal ends it at once" in capfd.readouterr().err


def test_after_an_error_it_does_not_say_that_the_last_step_is_done(capfd):
    with StopSignals():
        with pytest.raises(OSError, match="gone"), StopSignals():
            raise OSError("gone")
        os.kill(os.getpid(), signal.SIGINT)
    assert "the run is about to end by an error; a second signal" in capfd.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_heard_while_the_main_thread_is_in_one_long_call(number):
    program = (
        "import hashlib\n"
        "from jaxpar.runtime.preemption import StopSignals\n"
        "with StopSignals(lambda name: None):\n"
        "    print('in', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"  # minutes in C, without Python's lock, as XLA compiles
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as process:
        assert process.stdout.readline() == "in\n"
        process.send_signal(number)
        assert process.stderr.readline().startswith(f"{number.name}: saving at the end of a step")
        process.send_signal(number)
        assert process.wait(timeout=WAIT_SECONDS) == -number
