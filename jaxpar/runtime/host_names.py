"""The addresses of servers, and the names by which one may be asked for, in a request's Host header.

A page of another site can make a browser send requests to this machine under that site's name (DNS rebinding). A server for
this machine alone therefore answers only requests that name it.
"""

import ipaddress
from collections.abc import Collection, Sequence

from jaxpar.fields import arg

LOCAL = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"


def with_port(address: str, port: int) -> str:
    """Returns ``host:port`` as a URL has it, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Returns whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def allowed_hosts(address: str, given: Sequence[str] = ()) -> frozenset[str] | None:
    """Returns the names to answer to; None: any.

    Args:
        address: The address that the server listens on.
        given: Names that the user allows, ``*`` for any. None of them: those of this machine for a loopback address, else any.

    Raises:
        ValueError: A name has a port or a path.
    """
    for name in given:
        bare = name.removeprefix("[").removesuffix("]")
        if not name or any(letter in bare for letter in "/ ,@") or (":" in bare and bare == name):
            raise ValueError(
                f"{arg('allowed_hosts')} must be names of hosts, without ports; got {name!r}. Give such as gpu-box.example, or "
                f"{ANY} for any."
            )
    if ANY in given or not (given or is_loopback(address)):
        return None
    own = f"[{address}]" if ":" in address else address
    return frozenset(
        name.lower().removesuffix(".")
        for name in (*given, *(LOCAL if is_loopback(address) else ()), own)
    )


def is_allowed(host: str, allowed: Collection[str] | None) -> bool:
    """Returns whether a request with this Host header is to be answered."""
    return allowed is None or _name_in(host) in allowed


def is_by_address(host: str) -> bool:
    """Returns whether a Host header has an IP address in place of a name, by which no page of another site can ask.

    The probes of Kubernetes, and Prometheus, ask a pod by its address.
    """
    try:
        ipaddress.ip_address(_name_in(host).removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _name_in(host: str) -> str:
    """Returns the name in a Host header, without its port and the dot that may end a full name."""
    name, _, port = host.lower().rpartition(":")
    return (name if port.isdecimal() else host.lower()).removesuffix(".")
