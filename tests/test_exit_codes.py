"""The exit codes are what the documentation and a supervisor take them for."""

import pytest

from jaxpar.runtime.exit_codes import ExitCode, describe_exit


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
