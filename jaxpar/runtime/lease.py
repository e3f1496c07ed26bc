"""One run per folder: a lease names the process that may write to it, and its owner renews it while it runs. No JAX.

    runs/gpt/.lease/7.json      {"host": "node3", "pid": 4711, "since": "2026-07-01 12:00:05 UTC", ..., "beats": 12}

The file with the highest number is the lease. A process that wants the folder creates the file with the next number, which
succeeds for only one process, and reads it back. It may do so when the lease is released, when its owner has ended (on the same
machine, where that can be detected), or when its ``beats`` have not changed for ``STALE_SECONDS`` (on another machine); it then
takes other folders of that owner at once. The owner increments ``beats`` every ``BEAT_SECONDS``, and has lost the lease when it
finds a higher number or another owner.

It only creates, reads and overwrites files, so it works where ``flock`` does not: on NFS, and on object stores mounted as a
folder. If a store lets two processes create the same file, the one whose file was overwritten detects it at its next beat. It
compares no times of day: a clock that jumps, or machines that disagree on the time, have no effect.
"""

import contextlib
import functools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from jaxpar.fields import arg, switch
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import tell

NAME = ".lease"
BEAT_SECONDS = 5.0  # between two renewals
STALE_SECONDS = 60.0  # without one, after which a lease of another machine has expired
PATIENCE_SECONDS = (
    6.0  # a worker ends within 5 s of its launcher, and must not make a restarted run fail
)
POLL_SECONDS = 0.1
UNREADABLE = "a process whose lease cannot be read"
FILE_BYTES = (
    512  # overwritten in one write of a fixed length, so that a reader never sees half of it
)


class HeldError(ValueError):
    """Another run writes to the folder."""


class LostError(OSError):
    """Another run has taken the folder from this one, which must no longer write to it."""

    exit_code = ExitCode.NOT_SAVED


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
        return (
            bool(self.machine)
            and self.machine == _machine_here()
            and start_of(self.pid) is not None
        )

    def is_gone(self) -> bool:
        """Returns whether the process is known to have ended, or has released the lease."""
        return self.released or (self.is_here() and start_of(self.pid) != self.start)


class Lease:
    """The right of one process to write to a folder.

    Args:
        folder: The folder of the run. Created if needed, as are those above it, and removed at the end if nothing else was
            written to it.
        remedy: What to do where another process holds it; None: as for the folder of a run.
        is_kept: Whether the lease stays in the folder after it was released, for those who ask whether the run still runs.
        is_begun: Whether the run begins with the lease; if not, set it once the run has passed its checks. A start that is
            refused before leaves the lease of the run before as it was, which may have been killed.
        follows: Whether it is taken from a run that ends while this one waits for it; a run that deletes the earlier one would
            delete results that nobody has seen.

    Attributes:
        lost: A message that names the run which took the folder from this process; empty if it was not lost.
        when_lost: Called once when it is lost, possibly from another thread.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        remedy: str | None = None,
        is_kept: bool = True,
        is_begun: bool = True,
        follows: bool = True,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._remedy, self._is_kept, self.is_begun = remedy, is_kept, is_begun
        self._follows = follows
        self._files = self.folder / NAME
        self.lost = ""
        self.when_lost: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._me: Owner | None = None  # as it was last written; None: not taken
        self._number, self._is_wanted = 0, False
        self._before: Owner | None = None  # who had it, as a start that is refused leaves it
        self._silent = (
            ""  # the token of the owner from whom it was taken since its beats stood still
        )
        self._made: list[
            Path
        ] = []  # the folder and those above it that this lease created, the inner ones first
        self._over = threading.Event()

    def take(self) -> None:
        """Waits until this process holds the folder; does nothing if it holds it already.

        Raises:
            HeldError: Another process holds it and is alive.
            OSError: The folder cannot be read or written to.
        """
        with self._lock:
            self._is_wanted = True
            if self._me is None:
                self._wait_until_taken()
                _taken.append(self)
                self._over = threading.Event()
                threading.Thread(
                    target=self._renew, args=(self._over,), name="jaxpar-lease", daemon=True
                ).start()

    def _wait_until_taken(self) -> None:
        begun, seen, quiet_since, has_beaten, named = time.monotonic(), None, 0.0, False, None
        waited_for = None
        while True:
            now, newest = time.monotonic(), self.newest()
            number, owner = newest
            if owner is not None and owner.token == _token() and not owner.released:
                self._number, self._me = (
                    newest  # another Lease of this process has taken the folder, and shares it
                )
                self._before = owner
                return
            if newest != seen:
                has_beaten, seen, quiet_since = seen is not None, newest, now
            named = owner or named
            is_here = owner is not None and owner.is_here()
            is_silent = now - quiet_since >= STALE_SECONDS or (owner and _is_silent(owner))
            is_stale = not is_here and is_silent
            if number == 0 or is_stale or (owner is not None and owner.is_gone()):
                if owner and owner.token == waited_for and not (is_stale or self._follows):
                    raise HeldError(
                        f"{switch('overwrite')} deletes an earlier run; got {self.folder}, whose run ended while this one "
                        f"waited: {owner}. Look at what it has left, then start this one again, or give another folder "
                        f"({arg('out_dir')})."
                    )
                if self._create(number + 1):
                    self._before = owner
                    self._silent = owner.token if is_stale and owner is not None else ""
                    return
            elif now - begun >= PATIENCE_SECONDS and (is_here or has_beaten):
                wait = f"Wait until it ends, stop it, or give another folder ({arg('out_dir')})."
                raise HeldError(
                    f"one run at a time may write to a folder; got {self.folder}, which is held by {named or UNREADABLE}. "
                    f"{self._remedy or wait}"
                )
            else:
                waited_for = owner and owner.token
                if quiet_since == now and not has_beaten:
                    tell(f"waiting for {self.folder}: it is held by {owner or UNREADABLE}")
                time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """Releases the folder, so that another run can take it at once, and removes it if nothing was written to it."""
        with self._lock:
            self._over.set()
            self._is_wanted = False
            if self in _taken:
                _taken.remove(self)
            with contextlib.suppress(OSError):
                if self._me is not None and not self.lost and self._is_mine():
                    before = None if self.is_begun else self._before
                    self._write(before or replace(self._me, released=True))
                    is_empty = os.listdir(self.folder) == [NAME]
                    is_kept = self._is_kept and (self.is_begun or before is not None)
                    if is_empty or not is_kept:
                        self._path(self._number).unlink()
                        self._files.rmdir()
                    for made in self._made if is_empty else ():
                        made.rmdir()
            self._me = None

    def check(self) -> None:
        """Raises unless this process may write to the folder, because it holds it or never took it.

        Raises:
            LostError: Another process holds it.
            OSError: The lease cannot be read or written.
        """
        with self._lock:
            if not self._is_wanted:
                return
            try:
                if self._me is None:
                    self.take()
                elif (
                    not self.lost
                    and not self._path(self._number).exists()
                    and self.newest()[0] <= self._number
                ):
                    self._create(self._number + 1)  # the file was deleted
            except HeldError as error:
                raise LostError(str(error)) from error
            if not self._still_holds():
                raise LostError(self.lost)

    def _renew(self, over: threading.Event) -> None:
        while not over.wait(BEAT_SECONDS):
            with self._lock, contextlib.suppress(OSError):  # the next beat may succeed
                if over.is_set() or self._me is None or not self._still_holds():
                    return
                self._write(replace(self._me, beats=self._me.beats + 1))

    def _still_holds(self) -> bool:
        if not self.lost and not self._is_mine():
            self.lost = (
                f"one run at a time may write to a folder; got {self.folder}, which another run has taken from this one: "
                f"{self.newest()[1] or UNREADABLE}. This run did not renew its lease for {STALE_SECONDS:g} s, or "
                "its lease was overwritten"
            )
            self.when_lost()
        return not self.lost

    def _is_mine(self) -> bool:
        """Returns whether this process's file is the newest and was not overwritten by another process.

        Raises:
            OSError: It is missing, or cannot be read.
        """
        if max(self._numbers(), default=0) > self._number:
            return False
        owner = _parse(self._path(self._number).read_bytes())
        return (
            owner is None or owner.token == _token()
        )  # a partial file is this process's own: no other writes to it

    # -- files ---------------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._files / f"{number}.json"

    def _numbers(self) -> list[int]:
        names = os.listdir(self._files) if self._files.is_dir() else []
        return [
            int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()
        ]

    def newest(self) -> tuple[int, Owner | None]:
        """Returns the highest number, 0 if there is none, and its owner, None if the file is not valid."""
        number = max(self._numbers(), default=0)
        try:
            return number, _parse(self._path(number).read_bytes()) if number else None
        except FileNotFoundError:  # a successor has just deleted it
            return number, None

    def _create(self, number: int) -> bool:
        """Creates the file of a number; returns whether this process did so, and that file is the newest."""
        self._made = self._made or [
            each for each in (self.folder, *self.folder.parents) if not each.exists()
        ]
        self._files.mkdir(parents=True, exist_ok=True)
        self._number = number
        try:
            self._write(this_process(), "xb")
        except (
            FileExistsError,
            FileNotFoundError,
        ):  # another process was first, or has just removed the folder
            return False
        except OSError:
            self._path(number).unlink(missing_ok=True)
            raise
        if not self._is_mine():
            self._path(number).unlink(missing_ok=True)
            self._me = None
            return False
        for older in filter(lambda other: other < number, self._numbers()):
            with contextlib.suppress(OSError):
                self._path(older).unlink()
        return True

    def _write(self, me: Owner, mode: Literal["r+b", "xb"] = "r+b") -> None:
        with self._path(self._number).open(mode, buffering=0) as file:
            file.write(json.dumps(asdict(me)).ljust(FILE_BYTES - 1).encode() + b"\n")
            os.fsync(file.fileno())
        self._me = me


_taken: list[Lease] = []  # the leases that this process has taken


def _is_silent(owner: Owner) -> bool:
    """Returns whether this process holds another folder of an owner, whose beats stood still there."""
    return any(lease._silent == owner.token for lease in _taken)


@contextlib.contextmanager
def released_at_end() -> Iterator[None]:
    """Releases all leases of this process at the end of the ``with``."""
    try:
        yield
    finally:
        for lease in reversed(tuple(_taken)):  # a folder inside of another one is taken after it
            lease.release()


# -- processes ---------------------------------------------------------------------------------------------------------


def this_process() -> Owner:
    """Returns this process as the owner of a lease that begins now."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Owner(
        socket.gethostname(),
        os.getpid(),
        since,
        _machine_here(),
        start_of(os.getpid()) or "",
        _token(),
    )


def _token() -> str:
    return f"{os.getpid()}-{_RANDOM}"  # a forked child is another process


_RANDOM = secrets.token_hex(16)


@functools.cache
def _machine_here() -> str:
    """Returns a string that is equal for processes that can see one another; empty if it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> str | None:
    """Returns when a process of this machine started; empty if it has ended, None if that is unknown."""
    with contextlib.suppress(OSError, IndexError):
        state, *columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else columns[18]
    try:
        os.kill(pid, 0)  # some systems hide other users' processes
    except ProcessLookupError:
        return ""
    except (OSError, OverflowError):
        pass
    return None


def _parse(data: bytes) -> Owner | None:
    """Returns the owner that a file describes; None if it is not valid."""
    try:
        owner = Owner(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None
    return (
        owner
        if all(type(getattr(owner, each.name)) is each.type for each in fields(Owner))
        else None
    )
