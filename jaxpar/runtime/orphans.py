"""Ensures that no process outlives its launcher, whether the launcher ends normally, by an error, or by SIGKILL.

    launcher ---- pipe ----> watcher      reads the numbers of the process groups; kills them when the pipe closes,
       |                                  because the launcher has ended
       +-- process 0 and its children, a process group
       +-- process 1 and its children, a process group

The watcher is this file, run as a program. On Linux a process that joins a run also asks the kernel to kill it when the
launcher ends (``end_with_launcher``), in case the watcher was killed or has not yet been told of the process.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable

VARIABLE = "JAXPAR_LAUNCHER_PID"
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
SECONDS_TO_KILL = 5.0


class ProcessGroups:
    """Process groups that are killed when this process ends, or before by ``kill`` or ``close``."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        # -I: files in this folder must not shadow Python's modules. A session of its own: Ctrl-C must not end it.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Adds a process group."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def kill(self, group: int) -> None:
        """Kills what is left of a group, once: after its first process has ended, another may get its number."""
        if group in self._groups:
            self._groups.remove(group)
            kill_groups([group])
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """Kills all groups and waits until the watcher has ended."""
        for group in [*self._groups]:
            self.kill(group)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._watcher.communicate(timeout=SECONDS_TO_KILL)

    def _tell(self, line: str) -> None:
        pipe = self._watcher.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):  # the watcher was killed
                pipe.write(line.encode())
                pipe.flush()


def kill_groups(groups: Iterable[int]) -> None:
    """Kills every process of the groups that can be killed."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def watch() -> None:
    """Runs the watcher: reads the groups that the launcher names, and kills the remaining ones when the launcher has ended."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    kill_groups(groups)


def own_pid() -> dict[str, str]:
    """Returns the environment variable with which a child process asks the kernel to be killed when this process ends.

    The kernel treats the end of the thread that started a process as the end of its parent, so only the main thread, which
    ends last, sets the variable.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return {VARIABLE: str(os.getpid()) if is_main else ""}


def end_with_launcher() -> None:
    """Asks the kernel to kill this process when its launcher ends, at once if it has ended. Only on Linux, with a launcher.

    If a program such as a shell is between the two, only the watcher kills this process: the launcher is not the parent.
    """
    launcher = os.environ.pop(VARIABLE, "")  # the children of this process have another parent
    # The launcher starts each process in its own session.
    if sys.platform != "linux" or not launcher.isdigit() or os.getsid(0) != os.getpid():
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() == int(launcher):
        return
    prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(0))
    if not _exists(int(launcher)):  # the launcher ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    watch()
