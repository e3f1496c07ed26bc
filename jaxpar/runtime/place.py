"""How far the main thread of this process is in its training loops, by which processes tell whether one has passed another.

before a loop    (0, 0)
in its step 5    (1, 6)      the first loop, and the number of steps begun
after it         (1, inf)
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

Place = tuple[int, float]
_here: list[float] = [0, 0]


@dataclass(frozen=True)
class Wait:
    """A call in which the main thread waits for all other processes.

    Attributes:
        name: Its name, with how often it was called before.
        rule: That all must call it.
        began: When it began.
    """

    name: str
    rule: str
    began: float = field(default_factory=time.monotonic)


_waits: list[Wait] = []


@contextlib.contextmanager
def waiting(name: str, rule: str) -> Iterator[None]:
    """Notes that the main thread waits in the ``with`` block for all other processes; it does nothing in other threads."""
    if of_this_thread() is None:
        yield
        return
    _waits.append(Wait(name, rule))
    try:
        yield
    finally:
        _waits.pop()


def wait_of_main_thread() -> Wait | None:
    """Returns the call in which the main thread waits for the others; None if it is in none."""
    return next(iter(_waits[-1:]), None)


def enter_loop() -> None:
    """Notes that a training loop begins."""
    _here[:] = [_here[0] + 1, 0]


def begin(num_steps: int) -> None:
    """Notes how many steps of the loop have begun."""
    _here[1] = max(_here[1], num_steps)


def leave_loop() -> None:
    """Notes that the loop is left."""
    _here[1] = math.inf


def of_main_thread() -> Place:
    """Returns the place of the main thread."""
    return int(_here[0]), _here[1]


def of_this_thread() -> Place | None:
    """Returns the same, for the main thread alone: other threads are at none."""
    return of_main_thread() if threading.current_thread() is threading.main_thread() else None


def describe(place: Place) -> str:
    """Returns a place as text, with the number of its step as a loop counts them."""
    loop, begun = place
    if loop == 0:
        return "before a training loop"
    if begun == math.inf:
        return "after its training loop"
    return (
        f"in step {begun - 1:.0f} of its training loop"
        if begun
        else "before the first step of its training loop"
    )
