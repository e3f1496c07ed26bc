"""One run per folder: a lease names the process that may write to it, and its owner renews it while it runs. No JAX.

    runs/gpt/.lease/7.json      {"host": "node3", "pid": 4711, "since": "2026-07-01 12:00:05 UTC", ..., "beats": 12}

The file with the highest number is the lease. A process that wants the folder creates the file with the next number, which
succeeds for only one process, and reads it back. It may do so when the lease is released, when its owner has ended (on the same
machine, where that can be detected), or when its ``beats`` have not changed for ``STALE_SECONDS`` (on another machine). The
owner increments ``beats`` every ``BEAT_SECONDS``, and has lost the lease when it finds a higher number or another owner.

It only creates, reads and overwrites files, so it works where ``flock`` does not: on NFS, and on object stores mounted as a
folder. If a store lets two processes create the same file, the one whose file was overwritten detects it at its next beat. It
compares no times of day: a clock that jumps, or machines that disagree on the time, have no effect.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from jaxpar.runtime.owner import Owner, parse, this_process, token
from jaxpar.runtime.printable import tell

NAME = ".lease"
BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
PATIENCE_SECONDS = 6.0  # a worker ends within 5 s of its launcher, and must not make a restarted run fail
POLL_SECONDS = 0.1
UNREADABLE = "a process whose lease cannot be read"
FILE_BYTES = 512  # overwritten in one write of a fixed length, so that a reader never sees half of it


class HeldError(ValueError):
    """Another run writes to the folder."""


class LostError(OSError):
    """Another run has taken the folder from this one, which must no longer write to it."""


class Lease:
    """The right of one process to write to a folder.

    Args:
        folder: The folder of the run. Created if needed, and removed at the end if nothing else was written to it.
        beat_seconds: The interval between two renewals.
        stale_seconds: A lease of another machine expires when it was not renewed for this long.
        patience_seconds: How long to wait for a live owner to release the folder before raising HeldError.
        say: Called with a message when it has to wait; by default prints to standard error.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        say: Callable[[str], None] = tell,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._files = self.folder / NAME
        self._beat_seconds, self._stale_seconds, self._patience = beat_seconds, stale_seconds, patience_seconds
        self._say = say
        self.when_lost: Callable[[], None] = lambda: None  # called once, possibly from another thread
        self._lock = threading.RLock()
        self._me: Owner | None = None  # as it was last written; None: not taken
        self._number, self._is_wanted, self._is_maker, self._lost = 0, False, False, ""
        self._over = threading.Event()

    # -- taking and giving back ----------------------------------------------------------------------------------------

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
                threading.Thread(target=self._renew, args=(self._over,), name="jaxpar-lease", daemon=True).start()

    def _wait_until_taken(self) -> None:
        begun, seen, quiet_since, has_beaten, named = time.monotonic(), None, 0.0, False, None
        while not self._is_shared():
            now, newest = time.monotonic(), self._newest()
            if newest != seen:
                has_beaten, seen, quiet_since = seen is not None, newest, now
            number, owner = newest
            named = owner or named
            is_here = owner is not None and owner.is_here()
            is_stale = not is_here and now - quiet_since >= self._stale_seconds
            if number == 0 or is_stale or (owner is not None and owner.is_gone()):
                if self._create(number + 1):
                    return
            elif now - begun >= self._patience and (is_here or has_beaten):
                raise HeldError(
                    f"one run at a time may write to a folder; got {self.folder}, which is held by {named or UNREADABLE}. "
                    "Wait until it ends, stop it, or give another folder (--out-dir)."
                )
            else:
                if quiet_since == now and not has_beaten:
                    self._say(f"waiting for {self.folder}: it is held by {owner or UNREADABLE}")
                time.sleep(POLL_SECONDS)

    def _is_shared(self) -> bool:
        """Returns whether another Lease of this process holds the folder, which this one then shares."""
        number, owner = self._newest()
        if owner is None or owner.token != token() or owner.released:
            return False
        self._number, self._me = number, owner
        return True

    def release(self) -> None:
        """Releases the folder, so that another run can take it at once."""
        with self._lock:
            self._over.set()
            self._is_wanted = False
            if self in _taken:
                _taken.remove(self)
            if self._me is None:
                return
            with contextlib.suppress(OSError):
                if not self._lost and self._is_mine():
                    self._write(replace(self._me, released=True))
                    self._tidy()
            self._me = None

    def _tidy(self) -> None:
        """Removes the lease if nothing else was written to the folder, such as by a run that was refused."""
        if os.listdir(self.folder) == [NAME]:
            self._path(self._number).unlink()
            self._files.rmdir()
            if self._is_maker:
                self.folder.rmdir()

    # -- holding -------------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> str:
        """A message that names the run which took the folder from this process; empty if it was not lost."""
        return self._lost

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
                elif not self._lost and not self._path(self._number).exists() and self._newest()[0] <= self._number:
                    self._create(self._number + 1)  # the file was deleted
            except HeldError as error:
                raise LostError(str(error)) from error
            if self._lost or not self._is_mine():
                self._lose()
                raise LostError(self._lost)

    def _renew(self, over: threading.Event) -> None:
        while not over.wait(self._beat_seconds):
            with self._lock, contextlib.suppress(OSError):  # the next beat may succeed
                if over.is_set() or self._me is None:
                    return
                if self._lost or not self._is_mine():
                    self._lose()
                    return
                self._write(replace(self._me, beats=self._me.beats + 1))

    def _lose(self) -> None:
        if not self._lost:
            _, owner = self._newest()
            self._lost = (
                f"one run at a time may write to a folder; got {self.folder}, which another run has taken from this one: "
                f"{owner or UNREADABLE}. This run did not renew its lease for {self._stale_seconds:g} s, or "
                "its lease was overwritten"
            )
            self.when_lost()

    def _is_mine(self) -> bool:
        """Returns whether this process's file is the newest and was not overwritten by another process.

        Raises:
            OSError: It is missing, or cannot be read.
        """
        if max(self._numbers(), default=0) > self._number:
            return False
        owner = parse(self._path(self._number).read_bytes())
        return owner is None or owner.token == token()  # a partial file is this process's own: no other writes to it

    # -- files ---------------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._files / f"{number}.json"

    def _numbers(self) -> list[int]:
        names = os.listdir(self._files) if self._files.is_dir() else []
        return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()]

    def _newest(self) -> tuple[int, Owner | None]:
        """Returns the highest number, 0 if there is none, and its owner, None if the file is not valid."""
        number = max(self._numbers(), default=0)
        try:
            return number, parse(self._path(number).read_bytes()) if number else None
        except FileNotFoundError:  # a successor has just deleted it
            return number, None

    def _create(self, number: int) -> bool:
        """Creates the file of a number; returns whether this process did so, and that file is the newest."""
        self._is_maker = self._is_maker or not self.folder.exists()
        self._files.mkdir(parents=True, exist_ok=True)
        path, me = self._path(number), this_process()
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except (FileExistsError, FileNotFoundError):  # another process was first, or has just removed the folder
            return False
        os.close(handle)
        self._number = number
        try:
            self._write(me)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        if not self._is_mine():
            path.unlink(missing_ok=True)
            return False
        for older in filter(lambda other: other < number, self._numbers()):
            with contextlib.suppress(OSError):
                self._path(older).unlink()
        return True

    def _write(self, me: Owner) -> None:
        with self._path(self._number).open("r+b", buffering=0) as file:
            file.write(json.dumps(asdict(me)).ljust(FILE_BYTES - 1).encode() + b"\n")
            os.fsync(file.fileno())
        self._me = me


_taken: list[Lease] = []  # the leases that this process has taken


@contextlib.contextmanager
def released_at_end() -> Iterator[None]:
    """Releases all leases of this process at the end of the ``with``."""
    try:
        yield
    finally:
        for lease in tuple(_taken):
            lease.release()
