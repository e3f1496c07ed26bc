"""Whether the run in a folder still runs, as its lease tells to those who only read it. No JAX.

On the machine of the run its process can be looked up. On another one, the lease's beats say it: they change every few seconds.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from jaxpar.runtime.lease import STALE_SECONDS, Lease, Owner

State = Literal["running", "ended", "killed", "silent", "unknown"]


class Life(NamedTuple):
    """What is known of a run: its state, and a text that says so."""

    state: State
    text: str


ENDED = Life("ended", "ended")
RUNNING = Life("running", "running")


class LifeWatch:
    """Looks at the lease of a folder, once or again and again; it writes nothing.

    Args:
        folder: The folder of the run.
        clock: Returns seconds; replaces ``time.monotonic`` in tests.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease, self._clock = Lease(folder), clock
        self._seen: tuple[int, Owner] | None = (
            None  # the lease when it last changed, and when that was
        )
        self._changed_at, self._has_beaten = clock(), False

    def look(self) -> Life:
        """Returns what is known now; of another machine more is known at the second look than at the first."""
        number, owner = self._lease.newest()
        if owner is None:
            return Life("unknown", "whether it runs is not known: it has no lease")
        if owner.released:
            return ENDED
        if owner.is_here():
            return (
                Life("killed", f"killed: {owner} has ended, and did not say so")
                if owner.is_gone()
                else RUNNING
            )
        return self._of_beats(number, owner)

    def _of_beats(self, number: int, owner: Owner) -> Life:
        if self._seen != (number, owner):
            self._has_beaten = self._seen is not None
            self._seen, self._changed_at = (number, owner), self._clock()
        quiet = self._clock() - self._changed_at
        if quiet >= STALE_SECONDS:
            return Life("silent", f"no sign of life for {quiet:.0f} s from {owner}")
        return (
            RUNNING
            if self._has_beaten
            else Life("unknown", f"whether it runs is not known yet: {owner} is elsewhere")
        )
