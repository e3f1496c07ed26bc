"""How a run ended, as the exit code of its process: a supervisor decides by it, and a person reads it in a job's status.

    0    done
    2    bad configuration, or another run writes to the folder: nothing was trained or written
    65   a checkpoint or data that cannot be gone on from: someone has to look
    70   another process of the run is gone, or disagrees
    74   trained, but the newest state, or another file of the run, could not be written
    75   asked to stop (SIGTERM, SIGINT): saved, and can be resumed
    86   the loss or gradients were not finite, so many times that going on is pointless
    124  stuck: a phase took longer than its budget

65, 70, 74 and 75 are those of BSD's sysexits.h; 124 is that of timeout(1).
"""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process of a run returns."""

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
        """What happened, in a few words."""
        return _MEANINGS[self]


# Started again the run would end the same way, or someone has to look first.
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
    """Returns a process's exit code in words; a negative one is the signal that ended it, as ``subprocess`` gives it.

    >>> describe_exit(75), describe_exit(-9), describe_exit(1)
    ('exit code 75: asked to stop; saved', 'killed by SIGKILL', 'exit code 1: an error')
    """
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    meaning = _MEANINGS[ExitCode(code)] if code in set(ExitCode) else "an error"
    return f"exit code {code}: {meaning}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
