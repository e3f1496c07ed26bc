"""The exit codes are what the documentation and a supervisor take them for."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxpar.__main__ import main
from jaxpar.runtime import interrupt
from jaxpar.runtime.exit_codes import ExitCode, describe_exit
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]


def test_each_exit_code_has_its_own_number_and_meaning():
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "BAD_CONFIG": 2,
        "BAD_DATA": 65,
        "PEER_LOST": 70,
        "NOT_SAVED": 74,
        "PREEMPTED": 75,
        "NOT_FINITE": 86,
        "STUCK": 124,
    }
    assert len({code.meaning for code in ExitCode}) == len(ExitCode)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0: done"),
        (65, "exit code 65: a bad checkpoint, or bad data met while training"),
        (3, "exit code 3: an error"),
        (-6, "ended by SIGABRT"),
        (-250, "ended by signal 250"),
    ],
)
def test_an_exit_is_told_in_words(code, words):
    assert describe_exit(code) == words


def test_ctrl_c_ends_a_command_that_has_swallowed_it(monkeypatch):
    """As JAX's callback of the garbage collector does."""
    monkeypatch.setattr(interrupt, "SECONDS_TO_END", 0.05)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which a shell's background job ignores
    ended = threading.Event()
    with interrupt.ended_by_interrupt(end=lambda code: ended.set() if code == 130 else None):
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert ended.wait(WAIT_SECONDS)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


PROGRAM = """
import hashlib, signal, threading, time
from jaxpar.runtime import interrupt
interrupt.SECONDS_TO_HANDLE = 0.3
interrupt.end_if_unhandled()
{handler}
threading.Timer(0.3, print, ["in"], {{"flush": True}}).start()
try:
    {work}
except KeyboardInterrupt:
    print("caught", flush=True)
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("handler", "work", "code", "out", "err"),
    [
        (
            "",
            "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
            130,
            "in\n",
            'File "<string>", line ',
        ),
        ("", "signal.pause()", 0, "in\ncaught\n", ""),
        (
            "signal.signal(signal.SIGINT, lambda *_: print('mine'))",
            "time.sleep(2)",
            0,
            "in\nmine\n",
            "",
        ),
    ],
    ids=["stuck in C", "caught by the script", "a handler of its own"],
)
def test_one_ctrl_c_ends_a_process_that_cannot_handle_it_and_no_other(
    handler, work, code, out, err
):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program, environment = (
        PROGRAM.format(handler=handler, work=work),
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        more, said = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, first + more) == (code, out)
    assert err in said
    assert said.startswith("SIGINT: this process did not handle it within 0.3 s") == bool(err)


def test_an_interrupted_command_says_so_and_ends_with_130(monkeypatch, capsys):
    def command(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxpar.__main__.command", lambda name: command)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
