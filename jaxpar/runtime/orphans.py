"""No process outlives the launcher that started it, however that ends: done, by an error, or killed by SIGKILL.

    launcher ---- pipe ----> watcher      reads which groups there are; where the pipe ends, since the launcher has
       |                                  ended, it kills them
       +-- process 0 and what it starts, a process group
       +-- process 1 and what it starts, a process group

The watcher is this file, run as a program. On Linux a process that joins a run asks the kernel too to be killed with the
launcher (``end_with_launcher``): that holds where the watcher was killed, or had not heard of the process yet.
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
        # -I: a file beside this one must not be taken for a module of Python's. Its session: Ctrl-C must not end it.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Takes in a process group."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def kill(self, group: int) -> None:
        """Kills what is left of a group, once: when its first process has ended another may get its number."""
        if group in self._groups:
            self._groups.remove(group)
            kill_groups([group])
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """Kills all groups; returns once that is done."""
        for group in [*self._groups]:
            self.kill(group)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._watcher.communicate(timeout=SECONDS_TO_KILL)

    def _tell(self, line: str) -> None:
        pipe = self._watcher.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):  # someone has killed the watcher
                pipe.write(line.encode())
                pipe.flush()


def kill_groups(groups: Iterable[int]) -> None:
    """Kills every process of the groups that can be killed."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def watch() -> None:
    """What the watcher does: notes the groups that the launcher names, and kills those left when the launcher has ended."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    kill_groups(groups)


def own_pid() -> dict[str, str]:
    """Returns what a process that is started now is to find in its environment, so that the kernel ends it with this one.

    The kernel takes the end of the thread that started a process for the end of its parent, so only the main thread, which
    ends last, may say so.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return {VARIABLE: str(os.getpid()) if is_main else ""}


def end_with_launcher() -> None:
    """Has the kernel kill this process when its launcher ends; at once if it has. Does nothing without one, or elsewhere.

    Where another program stands between, such as a shell, only the watcher ends this process: its parent is not the launcher.
    """
    launcher = os.environ.pop(VARIABLE, "")  # what this process starts has another parent
    if (
        sys.platform != "linux" or not launcher.isdigit() or os.getsid(0) != os.getpid()
    ):  # each has a session of its own
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() == int(launcher):
        return
    prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(0))
    if not _exists(int(launcher)):  # it ended before the call
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
