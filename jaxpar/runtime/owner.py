"""The owner of a lease (``lease.py``), and whether it still runs, as far as this machine can tell. Does not use JAX."""

import functools
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease, as the lease's file describes it.

    Attributes:
        host: The name of its machine, for messages.
        pid: Its process id there.
        since: The time of day at which it took the lease, for messages.
        machine: The scope in which ``pid`` and ``start`` identify a process: this boot of this machine, this container. Empty:
            unknown.
        start: When the process started, in the machine's own units.
        token: A random string, one per process.
        beats: The number of renewals.
        released: Whether its owner has released it.
    """

    host: str
    pid: int
    since: str
    machine: str
    start: str
    token: str
    beats: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!r} since {self.since!r}"

    def is_here(self) -> bool:
        """Returns whether it is a process of this machine and container, where its end can be detected."""
        return bool(self.machine) and self.machine == machine_here() and start_of(self.pid) is not None

    def is_gone(self) -> bool:
        """Returns whether the process is known to have ended."""
        return self.released or (self.is_here() and start_of(self.pid) != self.start)


def this_process() -> Owner:
    """Returns this process as the owner of a lease that begins now."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Owner(socket.gethostname(), os.getpid(), since, machine_here(), start_of(os.getpid()) or "", token())


def token() -> str:
    """Returns a random string that is unique to this process."""
    return _token_of(os.getpid())


@functools.cache
def _token_of(pid: int) -> str:  # a forked child is another process
    return secrets.token_hex(16)


@functools.cache
def machine_here() -> str:
    """Returns a string that is equal for processes that can see one another; empty if it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> str | None:
    """Returns when a process of this machine started; empty if it has ended, None if that is unknown."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)  # some systems hide other users' processes
    except ProcessLookupError:
        return ""
    except (OSError, OverflowError):
        pass
    return None


def parse(data: bytes) -> Owner | None:
    """Returns the owner that a file describes; None if it is not valid."""
    try:
        owner = Owner(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = (str, int, str, str, str, str, int, bool)
    return (
        owner if all(type(value) is kind for value, kind in zip(asdict(owner).values(), kinds, strict=True)) else None
    )
