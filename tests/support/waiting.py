"""How long tests wait, the same everywhere: so long that only what never ends takes longer, however busy the machine is.

No test measures time. Where a duration is the property, as of a watchdog or a lease, a test replaces the clock, or sets
every other way to the same end so late that only the right one comes before ``WAIT_SECONDS`` are over.
"""

import time
from collections.abc import Callable

WAIT_SECONDS = 900.0  # for a process, a thread, an answer, a file
# For devices that wait for one another in a collective: XLA would end the process after 40 s.
XLA_WAITS = " ".join(
    f"--xla_cpu_collective_call_{what}_timeout_seconds={WAIT_SECONDS:.0f}"
    for what in ("warn_stuck", "terminate")
)
NEVER = 100 * WAIT_SECONDS  # for what must not end by itself while a test waits


def wait_until(
    holds: Callable[[], object], what: str | Callable[[], str] = "the condition must hold by now"
) -> None:
    """Waits until a condition holds; fails with ``what`` after WAIT_SECONDS."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(what if isinstance(what, str) else what())
        time.sleep(0.02)
