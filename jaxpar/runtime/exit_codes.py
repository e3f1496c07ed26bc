"""The exit codes of a run: a supervisor decides by them whether to restart, and a job's status shows them.

    0    done
    2    bad configuration, or another run writes to the folder: nothing was trained or written
    65   a damaged or foreign checkpoint, or bad data, from which the run cannot continue: needs inspection
    70   another process of the run is gone, or disagrees
    74   trained, but the newest state, or another file of the run, could not be written
    75   asked to stop (SIGTERM, SIGINT): saved, and can be resumed
    86   the loss or gradients were not finite, so many times that continuing is pointless
    124  stuck: a phase took longer than its budget

65, 70, 74 and 75 are codes of BSD's sysexits.h; 124 is that of timeout(1).
"""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a process of a run."""

    DONE = 0
    BAD_CONFIG = 2
    BAD_DATA = 65
    PEER_LOST = 70
    NOT_SAVED = 74
    PREEMPTED = 75
    NOT_FINITE = 86
    STUCK = 124

    @property
    def meaning(self) -> str:
        """A short description of the exit code."""
        return _MEANINGS[self]


SHELL_SIGNAL = 128
# A restarted run would end the same way, or needs inspection first.
FINAL_CODES = (ExitCode.BAD_CONFIG, ExitCode.BAD_DATA, ExitCode.NOT_SAVED, ExitCode.NOT_FINITE)

_MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.BAD_CONFIG: "bad configuration",
    ExitCode.BAD_DATA: "a bad checkpoint or bad data",
    ExitCode.PEER_LOST: "another process was lost",
    ExitCode.NOT_SAVED: "the newest state could not be saved",
    ExitCode.PREEMPTED: "asked to stop; saved",
    ExitCode.NOT_FINITE: "the loss or gradients were not finite",
    ExitCode.STUCK: "stuck longer than its budget",
}


def describe_exit(code: int) -> str:
    """Returns a description of a process's exit code; a negative one is the signal that ended it, as in ``subprocess``.

    Shells report a signal as 128 plus its number.

    >>> describe_exit(75), describe_exit(-15), describe_exit(143), describe_exit(1)
    ('exit code 75: asked to stop; saved', 'ended by SIGTERM', 'exit code 143: ended by SIGTERM', 'exit code 1: an error')
    """
    if code < 0:
        return f"ended by {_signal_name(-code)}"
    if code - SHELL_SIGNAL in set(signal.Signals):
        return f"exit code {code}: ended by {_signal_name(code - SHELL_SIGNAL)}"
    meaning = _MEANINGS[ExitCode(code)] if code in set(ExitCode) else "an error"
    return f"exit code {code}: {meaning}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
