"""Before JAX starts: process 0 waits at the coordinator's address until every process of the run has come.

JAX's own start-up aborts the whole process where a peer is missing, and says neither which one nor why. So each process
first says one line to process 0, its number and how many it counts, and gets one line back: that all are there, or what is
wrong. Then the port is JAX's. Nothing that arrives is anything but compared.

    process 1 -> process 0   {"process": 1, "of": 4}
    process 0 -> process 1   {"error": null}                                              once all are there
                             {"error": "4 processes must come ...; missing: process 2"}   when time is up
"""

import contextlib
import errno
import ipaddress
import json
import socket
import time
from typing import Any

from jaxpar.cluster import Place, split_address

MAX_LINE_BYTES = 4096
POLL_SECONDS = 0.1


def call_roll(place: Place, timeout_seconds: float) -> str:
    """Returns where process 0's coordinator is to listen, once every process of the run has come; "" on the others.

    Raises:
        TimeoutError: A process did not come in time; the message names it.
        ValueError: The processes disagree about their count or numbers, or an address cannot serve this run.
        OSError: Process 0 cannot listen at the address.
    """
    deadline = time.monotonic() + timeout_seconds
    name = "JAX_COORDINATOR_ADDRESS" if place.bind is None else "JAX_COORDINATOR_BIND_ADDRESS"
    check_reach(place)
    if place.process_id:
        _answer(place, deadline, timeout_seconds)
        return ""
    ip, port = _resolve(place.bind or place.coordinator, name)
    _host(place, (ip, port), name, deadline, timeout_seconds)
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def check_reach(place: Place) -> None:
    """Raises where the coordinator's address is one that other machines of the run cannot reach."""
    ip, _ = _resolve(place.coordinator, "JAX_COORDINATOR_ADDRESS", must=False)
    if place.on_several_hosts and ip and _is_loopback(ip):
        raise ValueError(
            "the coordinator's address must be one that every host can reach; got "
            f"{place.coordinator}, a loopback address ({ip}), with processes on several hosts. Set JAX_COORDINATOR_ADDRESS to "
            "process 0's address in the network between them."
        )


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.split("%")[0]).is_loopback


def _resolve(address: str, name: str, *, must: bool = True) -> tuple[str, int]:
    host, port = split_address(address, name)
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
    except socket.gaierror as error:
        if not must:  # a name in a cluster may come up after this process
            return "", port
        raise ValueError(
            f"{name} must name a host; got {address}, which does not resolve ({error.strerror}). Give its IP address."
        ) from error


def _host(place: Place, here: tuple[str, int], name: str, deadline: float, timeout_seconds: float) -> None:
    """Process 0: takes a line from each process, then tells all of them the same."""
    present: dict[int, socket.socket] = {}
    trouble: Exception | None = None
    with contextlib.ExitStack() as open_sockets, _listen(here, name) as listener:
        while trouble is None and len(present) < place.num_processes - 1:
            if time.monotonic() > deadline:
                trouble = TimeoutError(_missing(place, present, timeout_seconds))
                break
            with contextlib.suppress(TimeoutError):
                peer = open_sockets.enter_context(listener.accept()[0])
                trouble = _admit(place, present, peer)
        for peer in [*present.values()]:
            with contextlib.suppress(OSError):
                _send(peer, {"error": trouble and str(trouble), "late": isinstance(trouble, TimeoutError)})
                peer.recv(1)  # it hangs up first: else the port would be kept from JAX for a while
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
            why = "which another program listens on. Choose another port, or end what an earlier run left"
        elif error.errno == errno.EADDRNOTAVAIL:
            why = (
                "which is no address of this machine. Run process 0 on that host, or set JAX_COORDINATOR_BIND_ADDRESS to an "
                "address of this one"
            )
        else:
            why = f"which it may not ({error.strerror}). Choose a port of 1024 or more"
        raise OSError(f"process 0 must be able to listen at {name}; got {ip}:{port}, {why}.") from error
    listener.settimeout(POLL_SECONDS)
    return listener


def _admit(place: Place, present: dict[int, socket.socket], peer: socket.socket) -> ValueError | None:
    """Notes who has come; returns what is wrong with it. What is no process of ours, such as a port scan, is passed over."""
    peer.settimeout(2)
    line = _receive(peer)
    if line is None or not isinstance(line.get("process"), int) or not isinstance(line.get("of"), int):
        return None
    number, count = line["process"], line["of"]
    is_new = number not in present and number != 0
    present[number if is_new else -len(present) - 1] = peer  # who is wrong is told so too
    if count != place.num_processes:
        return ValueError(
            f"all processes must count the same number of them; got {place.num_processes} on process 0 and {count} on process "
            f"{number}. Set JAX_NUM_PROCESSES alike everywhere."
        )
    if not is_new:
        return ValueError(
            f"each process must have a number of its own; got JAX_PROCESS_ID={number} twice. Count from 0."
        )
    return None


def _missing(place: Place, present: dict[int, socket.socket], timeout_seconds: float) -> str:
    missing = [str(n) for n in range(1, place.num_processes) if n not in present]
    shown = ", ".join(missing[:16]) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    return (
        f"{place.num_processes} processes must come within {timeout_seconds:g} s; got {len(present) + 1}, missing: process "
        f"{shown}. See their logs, and whether their hosts reach {place.coordinator}.{_hint(place)}"
    )


def _hint(place: Place) -> str:
    ip, _ = _resolve(place.coordinator, "JAX_COORDINATOR_ADDRESS", must=False)
    if ip and _is_loopback(ip):
        return " That is a loopback address, which only processes of the same machine reach."
    return "" if ip else " Its name does not resolve here."


def _answer(place: Place, deadline: float, timeout_seconds: float) -> None:
    """Any other process: says its line to process 0, as soon as that listens, and waits for the answer."""
    answer, why = _say(place, deadline)
    while answer is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"process 0 must answer within {timeout_seconds:g} s; process {place.process_id} of {place.num_processes} got "
                f"none at {place.coordinator}: {why}. See process 0's log, and whether this host reaches it.{_hint(place)}"
            )
        time.sleep(POLL_SECONDS)
        answer, why = _say(place, deadline)
    if answer.get("error"):
        raise TimeoutError(answer["error"]) if answer.get("late") else ValueError(answer["error"])


def _say(place: Place, deadline: float) -> tuple[dict[str, Any] | None, str]:
    """Returns process 0's answer, None where it does not listen yet, and then why there is none."""
    left = max(deadline - time.monotonic(), POLL_SECONDS)
    try:
        with socket.create_connection(split_address(place.coordinator), timeout=min(left, 5)) as connection:
            _send(connection, {"process": place.process_id, "of": place.num_processes})
            connection.settimeout(left + 5)  # process 0 says who is missing when its own time is up
            return _receive(connection), "what listens there is not waiting for it; do all count the same processes"
    except OSError as error:
        return None, error.strerror or str(error)


def _send(connection: socket.socket, line: dict[str, Any]) -> None:
    connection.sendall(json.dumps(line).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Returns the line that came, None for what is no line of ours."""
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < MAX_LINE_BYTES:
            part = connection.recv(MAX_LINE_BYTES)
            if not part:
                return None
            data += part
        line = json.loads(data)
    except (OSError, ValueError):
        return None
    return line if isinstance(line, dict) else None
