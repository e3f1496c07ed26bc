"""Simulates a failing disk, for any user: each change of a file by Python raises a given errno."""

import contextlib
import errno
import os
import signal
import sys

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
STOP = -1
_broken: dict[str, int] = {}  # part of a path to errno


def fail_writes(part, name):
    """Makes changes of paths that contain ``part`` fail with the named errno from now on."""
    _break(part, getattr(errno, name))


def stop_at_write(part):
    """The next change of such a path stops the process, as SIGSTOP does."""
    _break(part, STOP)


def _break(part, number):
    if not _hooked:
        sys.addaudithook(_look)
        _hooked.append(True)
    _broken[part] = number


def mend():
    _broken.clear()


@contextlib.contextmanager
def failing(part, name):
    fail_writes(part, name)
    try:
        yield
    finally:
        mend()


_hooked: list[bool] = []


def _look(event, args):
    if not _broken or event not in CHANGES or (event == "open" and args[1] in ("r", "rb", None)):
        return
    for part, number in _broken.items():
        if part in str(args[0]) and number == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif part in str(args[0]):
            raise OSError(number, os.strerror(number), str(args[0]))
