"""The exit codes of a run: a supervisor decides by them whether to restart, and a job's status shows them.

    0    done
    2    bad configuration, data found bad before training, or another run writes to the folder: nothing was trained or written
    65   a damaged or foreign checkpoint, or a bad row first read while training, from which the run cannot continue: needs
         inspection
    70   another process of the run is gone, or disagrees
    74   trained, but the newest state, or another file of the run, could not be written
    75   asked to stop (SIGTERM, SIGINT): saved, and can be resumed
    86   the loss or gradients were not finite, so many times that continuing is pointless
    124  stuck: a phase took longer than its budget

65, 70, 74 and 75 are codes of BSD's sysexits.h; 124 is that of timeout(1).
"""

import signal
from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """The exit code of a process of a run.

    Attributes:
        meaning: A short description of it.
    """

    meaning: str
    DONE = 0, "done"
    BAD_CONFIG = 2, "bad configuration or data"
    BAD_DATA = 65, "a bad checkpoint, or bad data met while training"
    PEER_LOST = 70, "another process was lost"
    NOT_SAVED = 74, "the newest state could not be saved"
    PREEMPTED = 75, "asked to stop; saved"
    NOT_FINITE = 86, "the loss or gradients were not finite"
    STUCK = 124, "stuck longer than its budget"

    def __new__(cls, code: int, meaning: str) -> Self:  # noqa: D102
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member


SHELL_SIGNAL = 128
# A restarted run would end the same way, or needs inspection first.
FINAL_CODES = (ExitCode.BAD_CONFIG, ExitCode.BAD_DATA, ExitCode.NOT_SAVED, ExitCode.NOT_FINITE)


def describe_exit(code: int) -> str:
    """Returns a description of a process's exit code; a negative one is the signal that ended it, as in ``subprocess``.

    Shells report a signal as 128 plus its number.

    >>> describe_exit(75), describe_exit(-15), describe_exit(143), describe_exit(1)
    ('exit code 75: asked to stop; saved', 'ended by SIGTERM', 'exit code 143: ended by SIGTERM', 'exit code 1: an error')
    """
    names = {each.value: each.name for each in signal.Signals}
    if code < 0:
        return f"ended by {names.get(-code, f'signal {-code}')}"
    if code - SHELL_SIGNAL in names:
        return f"exit code {code}: ended by {names[code - SHELL_SIGNAL]}"
    return (
        f"exit code {code}: {next((each.meaning for each in ExitCode if each == code), 'an error')}"
    )
