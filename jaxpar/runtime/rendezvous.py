"""The rendezvous, before JAX starts: process 0 listens at the coordinator's address until every process has connected.

JAX's own start-up aborts the process if a peer is missing, and reports neither which one nor why. Therefore each process first
sends one line to process 0, with its number, its number of processes and the run's token, and receives one line in reply: all
are present, or an error. Process 0 then frees the port for JAX.

    process 1 -> process 0   jaxpar 1 of 4 5f0c...
    process 0 -> process 1   all are there
                             late: 4 processes must connect ...; missing: process 2     after the timeout
                             wrong: all processes must have the same number of them ...

Anyone who can reach the port can connect. Therefore process 0 parses nothing but a short line of this form, never blocks on a
single connection, and counts only processes that send the run's token.
"""

import errno
import ipaddress
import socket
import time

from jaxpar.runtime.printable import printable
from jaxpar.runtime.process_env import TOKEN_VARIABLE, ProcessEnv, split_address
from jaxpar.runtime.rendezvous_server import MAX_LINE_BYTES, POLL_SECONDS, Connections

ALL_THERE, LATE, WRONG = "all are there", "late: ", "wrong: "


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
    if env.on_several_hosts and ip and _is_loopback(ip):
        raise ValueError(
            "the coordinator's address must be one that every host can reach; got "
            f"{env.coordinator}, a loopback address ({ip}), with processes on several hosts. Set JAX_COORDINATOR_ADDRESS to "
            "process 0's address in the network between them."
        )


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.split("%")[0]).is_loopback


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


def _host(env: ProcessEnv, here: tuple[str, int], name: str, deadline: float, timeout_seconds: float) -> None:
    """Runs on process 0: receives a line from each process, then sends all of them the same reply."""
    with Connections(env, _listen(here, name)) as connections:
        while (
            not connections.trouble and len(connections.present) < env.num_processes - 1 and time.monotonic() < deadline
        ):
            connections.receive()
        trouble = connections.trouble
        if trouble is None and len(connections.present) < env.num_processes - 1:
            trouble = TimeoutError(_missing(env, connections, timeout_seconds))
        kind = LATE if isinstance(trouble, TimeoutError) else WRONG
        connections.reply(ALL_THERE if trouble is None else f"{kind}{trouble}")
    if trouble is not None:
        raise trouble


def _listen(here: tuple[str, int], name: str) -> socket.socket:
    ip, port = here
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ip, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            why = "which another program listens on. Choose another port, or end the processes of an earlier run"
        elif error.errno == errno.EADDRNOTAVAIL:
            why = (
                "which is not an address of this machine. Run process 0 on that host, or set JAX_COORDINATOR_BIND_ADDRESS to "
                "an address of this one"
            )
        else:
            why = f"which is not permitted ({error.strerror}). Choose a port of 1024 or more"
        raise OSError(f"process 0 must be able to listen at {name}; got {ip}:{port}, {why}.") from error
    listener.setblocking(False)
    return listener


def _missing(env: ProcessEnv, connections: Connections, timeout_seconds: float) -> str:
    present = len(connections.present) + 1
    missing = [str(n) for n in range(1, env.num_processes) if n not in connections.present]
    shown = ", ".join(missing[:16]) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    others = f" {connections.num_refused} connected with another {TOKEN_VARIABLE}." if connections.num_refused else ""
    return (
        f"{env.num_processes} processes must connect within {timeout_seconds:g} s; got {present}, missing: "
        f"process {shown}.{others} Check their logs, and that their hosts can reach {env.coordinator}.{_hint(env)}"
    )


def _hint(env: ProcessEnv) -> str:
    ip, _ = _resolve(env.coordinator, "JAX_COORDINATOR_ADDRESS", must=False)
    if ip and _is_loopback(ip):
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
        with socket.create_connection(split_address(env.coordinator), timeout=min(left, 5)) as connection:
            connection.sendall(f"jaxpar {env.process_id} of {env.num_processes} {env.token}\n".encode())
            # Process 0 reports the missing processes after its own timeout, a little later.
            answer = _receive(connection, time.monotonic() + left + 2)
            return answer, "what listens there does not expect this process; do all have the same JAX_NUM_PROCESSES"
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
