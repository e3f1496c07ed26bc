"""The limits of a server and the names that it answers to, which are also flags of `python -m jaxpar serve`."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits, for all clients together, and whom the server answers."""

    max_waiting: int = 16
    """Requests that may wait while one is computed; those beyond get 503."""
    max_body_bytes: int = 2**20
    """Size of a request's body."""
    timeout_seconds: float = 60.0
    """Seconds to answer a request, including its wait; after that it gets 503. Stopping takes at most 5 s longer."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of this server that a request's Host may have, * for any. Without it: localhost, 127.0.0.1 and [::1] at a loopback
    address, any at others."""

    def __post_init__(self) -> None:
        for name, least in (("max_waiting", 0), ("max_body_bytes", 1)):
            if not least <= getattr(self, name) < 2**31:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {least} and under 2**31; got {getattr(self, name)}. Choose "
                    f"{max(least, 16)}, say."
                )
        if not 0 < self.timeout_seconds < math.inf:
            raise ValueError(f"--timeout-seconds must be positive; got {self.timeout_seconds:g}. Choose 60, say.")
