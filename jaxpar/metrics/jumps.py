"""Sudden jumps of the loss: a step whose loss is far above that of the steps before it.

A device that computes wrongly, or rows that are unlike all others, can raise the loss a
millionfold for a single step. The step is finite, so it is not skipped, and later losses may not
show it.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

FACTOR = 100.0  # of the usual loss, from which on a loss is a jump
WINDOW, LEAST = 20, 5  # steps whose median is the usual loss, and the fewest
SMALLEST = 1e-6  # the least usual loss: below it losses vary by rounding


class Jumps:
    """Finds the jumps among the losses of steps, given one after another."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def usual_before(self, loss: Any) -> float | None:
        """Takes a step's loss, and returns the median of those before it if this one is a jump, else None."""
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            return None
        before = statistics.median(self._recent) if len(self._recent) >= LEAST else math.inf
        self._recent.append(abs(loss))
        return before if abs(loss) > FACTOR * max(before, SMALLEST) else None


def find_jumps(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Returns the steps taken, the loss and the usual loss of each jump in the lines of a metrics.jsonl."""
    jumps = Jumps()
    found = [(line, jumps.usual_before(line.get("loss"))) for line in lines]
    return [
        {"step": int(line["step"]) + 1, "loss": float(line["loss"]), "usual": usual}
        for line, usual in found
        if usual is not None
    ]
