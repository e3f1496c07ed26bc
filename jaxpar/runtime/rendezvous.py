"""The rendezvous, before JAX starts: process 0 listens at the coordinator's address until every process has connected.

JAX's own start-up (jaxlib 0.10.2) aborts every process with a stack trace if one is missing or two have one number, and names
none; it lets a process join that counts another number of them; and it ends by a segmentation fault if the port is taken.
Therefore each process first sends one line to process 0, with its number, its number of processes and the run's token, and
receives one line in reply: all are present, or an error. Process 0 then frees the port for JAX.

    process 1 -> process 0   jaxpar 1 of 4 5f0c...
    process 0 -> process 1   all are there
                             late: 4 processes must connect ...; missing: process 2     after the timeout
                             wrong: all processes must have the same number of them ...

Anyone who can reach the port can connect. Therefore process 0 parses nothing but a short line of this form, and never blocks on
a single connection: it reads bytes as they arrive, drops connections that send no line in time, and the oldest one if there are
too many. It counts only processes that send the run's token.
"""

import contextlib
import errno
import hmac
import os
import re
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.runtime.host_names import is_loopback
from jaxpar.runtime.output import printable
from jaxpar.runtime.process_env import TOKEN_VARIABLE, ProcessEnv, split_address

MAX_LINE_BYTES = 4096
POLL_SECONDS = 0.1
SECONDS_TO_SPEAK = 5.0  # after connecting: a process of the run sends its line immediately
SECONDS_TO_HANG_UP = 2.0
MAX_SILENT = (
    256  # connections without a line; a process of the run that is dropped among them reconnects
)
LINE = re.compile(rb"jaxpar (\d{1,9}) of (\d{1,9}) ([!-~]*)\n")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s
ALL_THERE, LATE, WRONG = "all are there", "late: ", "wrong: "
WHY_NOT_TO_LISTEN = {
    errno.EADDRINUSE: "which another program listens on. Choose another port, or end the processes of an earlier run",
    errno.EADDRNOTAVAIL: "which is not an address of this machine. Run process 0 on that host, or set "
    "JAX_COORDINATOR_BIND_ADDRESS to an address of this one",
}


def meet(env: ProcessEnv, timeout_seconds: float) -> str:
    """Waits until every process of the run has connected; returns the address that process 0 listens on, "" on the others.

    Raises:
        TimeoutError: A process did not connect in time; the message names it.
        ValueError: The processes disagree about their count or numbers, or an address is unusable for this run.
        OSError: Process 0 cannot listen at the address.
    """
    deadline = time.monotonic() + timeout_seconds
    name = "JAX_COORDINATOR_ADDRESS" if env.bind is None else "JAX_COORDINATOR_BIND_ADDRESS"
    check_reach(env)
    if env.process_id:
        _answer(env, deadline, timeout_seconds)
        return ""
    ip, port = _resolve(env.bind or env.coordinator, name)
    _host(env, (ip, port), name, deadline, timeout_seconds)
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def check_reach(env: ProcessEnv) -> None:
    """Raises ValueError if the coordinator's address is a loopback address and the run spans several hosts."""
    ip, _ = _resolve(env.coordinator, "JAX_COORDINATOR_ADDRESS", must=False)
    if env.on_several_hosts and is_loopback(ip):
        raise ValueError(
            "the coordinator's address must be one that every host can reach; got "
            f"{env.coordinator}, a loopback address ({ip}), with processes on several hosts. Set JAX_COORDINATOR_ADDRESS to "
            "process 0's address in the network between them."
        )


def _resolve(address: str, name: str, *, must: bool = True) -> tuple[str, int]:
    host, port = split_address(address, name)
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
    except socket.gaierror as error:
        if not must:  # a cluster may register a host's name after this process has started
            return "", port
        raise ValueError(
            f"{name} must name a host; got {address}, which does not resolve ({error.strerror}). Give its IP address."
        ) from error


def _host(
    env: ProcessEnv, here: tuple[str, int], name: str, deadline: float, timeout_seconds: float
) -> None:
    """Runs on process 0: receives a line from each process, then sends all of them the same reply."""
    with Connections(env, _listen(here, name)) as connections:
        while not connections.trouble and connections.missing() and time.monotonic() < deadline:
            connections.receive()
        trouble: Exception | None = connections.trouble
        if trouble is None and connections.missing():
            trouble = TimeoutError(_late(env, connections, timeout_seconds))
        kind = LATE if isinstance(trouble, TimeoutError) else WRONG
        connections.reply(ALL_THERE if trouble is None else f"{kind}{trouble}")
    if trouble is not None:
        raise trouble


def _listen(here: tuple[str, int], name: str) -> socket.socket:
    ip, port = here
    try:
        listener = socket.create_server(
            here, family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=128
        )
    except OSError as error:
        not_permitted = f"which is not permitted ({os.strerror(error.errno or 0)}). Choose a port of 1024 or more"
        why = WHY_NOT_TO_LISTEN.get(error.errno or 0, not_permitted)
        raise OSError(
            f"process 0 must be able to listen at {name}; got {ip}:{port}, {why}."
        ) from error
    listener.setblocking(False)
    return listener


@dataclass(eq=False)
class Caller:
    """A connection to process 0.

    Attributes:
        connection: The socket, non-blocking.
        until: The deadline for its line, on the monotonic clock.
        heard: The bytes received so far.
        number: The number of its process; None until it has sent a valid line.
    """

    connection: socket.socket
    until: float
    heard: bytes = b""
    number: int | None = None


class Connections(contextlib.AbstractContextManager["Connections"]):
    """The processes of a run that have connected. No method waits for others, except ``reply`` for ``SECONDS_TO_HANG_UP``.

    Args:
        env: The environment of process 0.
        listener: Its listening socket, non-blocking; closed at the end of the ``with``.

    Attributes:
        trouble: The first error of a process that has the token.
        num_refused: The number of lines with another token.
    """

    def __init__(self, env: ProcessEnv, listener: socket.socket) -> None:
        self._env, self._listener = env, listener
        self._callers: list[
            Caller
        ] = []  # the oldest first; a process in error has its number too, for the reply
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self.trouble: ValueError | None = None
        self.num_refused = 0

    def __exit__(self, *_: object) -> None:
        self._drop([*self._callers])
        self._selector.close()
        self._listener.close()

    @property
    def present(self) -> set[int]:
        """The numbers of the processes that have sent a valid line."""
        return {caller.number for caller in self._callers if caller.number is not None}

    def missing(self) -> list[int]:
        """Returns the numbers of the processes that have not sent a valid line."""
        return sorted(set(range(1, self._env.num_processes)) - self.present)

    def _silent(self) -> list["Caller"]:
        return [caller for caller in self._callers if caller.number is None]

    def receive(self) -> None:
        """Handles connections and bytes that arrive within ``POLL_SECONDS``."""
        for key, _ in self._selector.select(POLL_SECONDS):
            if key.data is None:
                self._accept()
            elif key.data.connection.fileno() >= 0:  # else it was dropped earlier in this loop
                self._take(key.data)
        self._drop([caller for caller in self._silent() if caller.until < time.monotonic()])

    def reply(self, answer: str) -> None:
        """Sends all processes the same reply, and waits until they close their end: else the port would stay busy for JAX."""
        self._selector.unregister(self._listener)
        self._drop(self._silent())
        for caller in self._callers:
            _send(caller, answer)
        deadline = time.monotonic() + SECONDS_TO_HANG_UP
        while self._callers and time.monotonic() < deadline:
            self.receive()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the connection is closed already, or this process has too many open files
            self._drop(self._silent()[:1])
            time.sleep(POLL_SECONDS / 10)
            return
        connection.setblocking(False)
        caller = Caller(connection, time.monotonic() + SECONDS_TO_SPEAK)
        self._callers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._drop(self._silent()[:-MAX_SILENT])

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
            return self._drop([caller])
        number, count, token = int(found[1]), int(found[2]), found[3]
        if not hmac.compare_digest(token, self._env.token.encode()):
            self.num_refused += 1
            _send(caller, f"{WRONG}{_wrong_token(self._env, number)}")
            caller.heard = (
                b""  # it closes the connection after reading that, or is dropped at its deadline
            )
        elif count == self._env.num_processes <= number:
            self._drop([caller])
        else:
            self.trouble = self.trouble or self._wrong(number, count)
            caller.number = number

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
            self._callers.remove(caller)


def _send(caller: Caller, answer: str) -> None:
    with contextlib.suppress(OSError):
        caller.connection.send(answer.encode()[: MAX_LINE_BYTES - 1] + b"\n")


def _wrong_token(env: ProcessEnv, number: int) -> str:
    return (
        f"every process of a run must have its token; got another {TOKEN_VARIABLE} on process {number} than on process 0 at "
        f"{env.coordinator}. Set the same one everywhere, or choose another port if two runs share this one."
    )


def _late(env: ProcessEnv, connections: Connections, timeout_seconds: float) -> str:
    missing = [str(number) for number in connections.missing()]
    num_there = env.num_processes - len(missing)
    shown = ", ".join(missing[:16]) + (
        f" and {len(missing) - 16} more" if len(missing) > 16 else ""
    )
    others = (
        f" {connections.num_refused} connected with another {TOKEN_VARIABLE}."
        if connections.num_refused
        else ""
    )
    return (
        f"{env.num_processes} processes must connect within {timeout_seconds:g} s; got {num_there}, missing: "
        f"process {shown}.{others} Check their logs, and that their hosts can reach {env.coordinator}.{_hint(env)}"
    )


def _hint(env: ProcessEnv) -> str:
    ip, _ = _resolve(env.coordinator, "JAX_COORDINATOR_ADDRESS", must=False)
    if is_loopback(ip):
        return " That is a loopback address, which only processes on the same machine can reach."
    return "" if ip else " Its name does not resolve here."


def _answer(env: ProcessEnv, deadline: float, timeout_seconds: float) -> None:
    """Runs on all other processes: sends a line to process 0, as soon as that listens, and waits for the reply."""
    answer, why = _ask(env, deadline)
    while answer is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"process 0 must answer within {timeout_seconds:g} s; process {env.process_id} of {env.num_processes} got "
                f"none at {env.coordinator}: {why}. Check process 0's log, and that this host can reach it.{_hint(env)}"
            )
        time.sleep(POLL_SECONDS)
        answer, why = _ask(env, deadline)
    if answer.startswith(LATE):
        raise TimeoutError(answer.removeprefix(LATE))
    if answer != ALL_THERE:
        raise ValueError(answer.removeprefix(WRONG))


def _ask(env: ProcessEnv, deadline: float) -> tuple[str | None, str]:
    """Returns process 0's reply, or None if there is none yet, and the reason to report in that case."""
    left = max(deadline - time.monotonic(), POLL_SECONDS)
    try:
        with socket.create_connection(
            split_address(env.coordinator), timeout=min(left, 5)
        ) as connection:
            connection.sendall(
                f"jaxpar {env.process_id} of {env.num_processes} {env.token}\n".encode()
            )
            # Process 0 reports the missing processes after its own timeout, a little later.
            answer = _receive(connection, time.monotonic() + left + 2)
            return (
                answer,
                "what listens there does not expect this process; do all have the same JAX_NUM_PROCESSES",
            )
    except OSError as error:
        return None, error.strerror or str(error)


def _receive(connection: socket.socket, until: float) -> str | None:
    """Returns the reply received before ``until``, with control characters escaped; None if it is not one of ours."""
    heard = b""
    while not heard.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(MAX_LINE_BYTES)
        if not part or len(heard) > MAX_LINE_BYTES or time.monotonic() > until:
            return None
        heard += part
    answer = printable(heard[:-1].decode(errors="replace"))
    return answer if answer.startswith((ALL_THERE, LATE, WRONG)) else None
