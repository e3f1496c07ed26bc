"""The connections to process 0 during the rendezvous, and which of them are processes of its run.

Process 0 never blocks on a single connection: it reads bytes as they arrive, and a line has a fixed form and a maximum length.
It drops connections that send no line in time, and the oldest one if there are too many. It processes a line further only if it
has the run's token.
"""

import contextlib
import hmac
import re
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.runtime.process_env import TOKEN_VARIABLE, ProcessEnv

MAX_LINE_BYTES = 4096
POLL_SECONDS = 0.1
SECONDS_TO_SPEAK = 5.0  # after connecting: a process of the run sends its line immediately
SECONDS_TO_HANG_UP = 2.0
MAX_SILENT = 256  # connections without a line; a process of the run that is dropped among them reconnects
LINE = re.compile(rb"jaxpar (\d{1,9}) of (\d{1,9}) ([!-~]*)\n")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s


@dataclass(eq=False)
class Caller:
    """A connection to process 0.

    Attributes:
        connection: The socket, non-blocking.
        until: The deadline for its line, on the monotonic clock.
        heard: The bytes received so far.
        number: The number of its process, None until it has sent a valid line; negative if that process is in error.
    """

    connection: socket.socket
    until: float
    heard: bytes = b""
    number: int | None = None


class Connections:
    """The processes of a run that have connected. No method waits for others, except ``reply`` for ``SECONDS_TO_HANG_UP``.

    Args:
        env: The environment of process 0.
        listener: Its listening socket, non-blocking; closed at the end of the ``with``.

    Attributes:
        present: The connections of the processes that have sent a valid line, by number.
        trouble: The first error of a process that has the token.
        num_refused: The number of lines with another token.
    """

    def __init__(self, env: ProcessEnv, listener: socket.socket) -> None:
        self._env, self._listener = env, listener
        self._silent: list[Caller] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self.present: dict[int, Caller] = {}
        self.trouble: ValueError | None = None
        self.num_refused = 0

    def __enter__(self) -> "Connections":
        return self

    def __exit__(self, *_: object) -> None:
        self._drop([*self._silent, *self.present.values()])
        self._selector.close()
        self._listener.close()

    def receive(self) -> None:
        """Handles connections and bytes that arrive within ``POLL_SECONDS``."""
        for key, _ in self._selector.select(POLL_SECONDS):
            if key.data is None:
                self._accept()
            elif key.data.connection.fileno() >= 0:  # else it was dropped earlier in this loop
                self._take(key.data)
        self._drop([caller for caller in self._silent if caller.until < time.monotonic()])

    def reply(self, answer: str) -> None:
        """Sends all processes the same reply, and waits until they close their end: else the port would stay busy for JAX."""
        self._selector.unregister(self._listener)
        self._drop([*self._silent])
        for caller in self.present.values():
            _send(caller, answer)
        deadline = time.monotonic() + SECONDS_TO_HANG_UP
        while self.present and time.monotonic() < deadline:
            self.receive()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the connection is closed already, or this process has too many open files
            self._drop(self._silent[:1])
            time.sleep(POLL_SECONDS / 10)
            return
        connection.setblocking(False)
        caller = Caller(connection, time.monotonic() + SECONDS_TO_SPEAK)
        self._silent.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._drop(self._silent[:-MAX_SILENT])

    def _take(self, caller: Caller) -> None:
        try:
            part = caller.connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:  # a process that closes its connection has ended, and may be restarted
            self._drop([caller])
        elif caller.number is None:
            caller.heard += part
            if b"\n" in part or len(caller.heard) > MAX_LINE_BYTES:
                self._admit(caller)

    def _admit(self, caller: Caller) -> None:
        """Records a process or its error. A connection that is not a process of the run, such as a port scan, is dropped."""
        found = LINE.fullmatch(caller.heard)
        if found is None:
            self._drop([caller])
        elif not hmac.compare_digest(found[3], self._env.token.encode()):
            self.num_refused += 1
            _send(caller, f"wrong: {_wrong_token(self._env, int(found[1]))}")
            caller.heard = b""  # it closes the connection after reading that, or is dropped at its deadline
        elif int(found[2]) == self._env.num_processes <= int(found[1]):
            self._drop([caller])
        else:
            self._count(caller, int(found[1]), int(found[2]))

    def _count(self, caller: Caller, number: int, count: int) -> None:
        wrong = self._wrong(number, count)
        self.trouble = self.trouble or wrong
        caller.number = number if wrong is None else -1 - len(self.present)  # a process in error gets the reply too
        self._silent.remove(caller)
        self.present[caller.number] = caller

    def _wrong(self, number: int, count: int) -> ValueError | None:
        if count != self._env.num_processes:
            return ValueError(
                f"all processes must have the same number of them; got {self._env.num_processes} on process 0 and {count} "
                f"on process {number}. Set the same JAX_NUM_PROCESSES everywhere."
            )
        if number == 0 or number in self.present:
            return ValueError(
                f"each process must have a number of its own; got JAX_PROCESS_ID={number} twice. Count from 0."
            )
        return None

    def _drop(self, callers: Iterable[Caller]) -> None:
        """Resets connections: a connection that this side closes first would keep the port busy for minutes."""
        for caller in callers:
            self._selector.unregister(caller.connection)
            with contextlib.suppress(OSError):
                caller.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            caller.connection.close()
            if caller.number is not None:
                self.present.pop(caller.number)
            else:
                self._silent.remove(caller)


def _send(caller: Caller, answer: str) -> None:
    with contextlib.suppress(OSError):
        caller.connection.send(answer.encode()[: MAX_LINE_BYTES - 1] + b"\n")


def _wrong_token(env: ProcessEnv, number: int) -> str:
    return (
        f"every process of a run must have its token; got another {TOKEN_VARIABLE} on process {number} than on process 0 at "
        f"{env.coordinator}. Set the same one everywhere, or choose another port if two runs share this one."
    )
