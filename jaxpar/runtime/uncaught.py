"""The exit code of an exception that a script does not catch: that of a recipe which fails in the same way.

A supervisor restarts a run by its exit code. An error that jaxpar itself raises about what it was given would be the same after
each restart, so it is one of the configuration; any other error of a script is 1.
"""

import errno
import traceback
from types import TracebackType

from jaxpar._compat import coordination
from jaxpar.runtime.coordination import is_peer_lost
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.interrupt import INTERRUPTED
from jaxpar.runtime.output import FULL

OTHER = 1
DISK_FAULTS = (
    *FULL,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
)  # and of one that has become read-only or unavailable


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of a process that ends by this exception."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if (code := getattr(error, "exit_code", None)) is not None:
        return int(code)
    if isinstance(error, TimeoutError) and is_raised_by_jaxpar(
        error.__traceback__
    ):  # processes that did not connect
        return int(ExitCode.PEER_LOST)
    if coordination().client is not None and is_peer_lost(error):
        return int(ExitCode.PEER_LOST)
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        return int(ExitCode.NOT_SAVED)
    of_values = isinstance(error, (ValueError, TypeError, OSError, ImportError))
    return (
        int(ExitCode.BAD_CONFIG)
        if of_values and is_raised_by_jaxpar(error.__traceback__)
        else OTHER
    )


def is_raised_by_jaxpar(trace: TracebackType | None) -> bool:
    """Returns whether the innermost frame of a traceback is one of jaxpar."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("jaxpar.")
