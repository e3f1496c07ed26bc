"""When a run may end early: a metric of its evaluations has not improved for long."""

from collections.abc import Mapping
from typing import Any

import numpy as np


class EarlyStop:
    """Counts evaluations in a row that did not improve a metric. All processes count alike, since a metric is the same on all.

    Args:
        metric: The name of the metric, of which smaller is better; with "-" before it, larger. Steps without it do not count.
        patience: The evaluations in a row after which a run ends, at least 1.
    """

    def __init__(self, metric: str, patience: int) -> None:
        self.metric, self.patience = metric.removeprefix("-"), patience
        self._sign = -1.0 if metric.startswith("-") else 1.0
        self._best, self._num_worse = np.inf, 0

    def after(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether the run may end after a step with these metrics; a value that is NaN is no improvement."""
        if self.metric not in metrics:
            return False
        value = self._sign * float(np.asarray(metrics[self.metric]))
        self._num_worse = 0 if value < self._best else self._num_worse + 1
        self._best = value if value < self._best else self._best
        return self._num_worse >= self.patience

    def describe(self) -> str:
        """Returns why a run ends."""
        return f"{self.patience} evaluations in a row without a better {self.metric} than {self._sign * self._best:.6g}"
