"""What the metrics of a run's first step tell about its gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np

NO_GRADIENT = (
    "the gradient of the first step is 0 in all params, so it has trained nothing: look for jax.lax.stop_gradient, for "
    "operations without a gradient, such as argmax, round and comparisons, and for masks or weights that are all 0"
)


def remark(metrics: Mapping[str, Any]) -> str:
    """Returns what to say of the metrics of a first step; "" if there is nothing."""
    norm, skipped = (np.asarray(metrics.get(name, 1.0)) for name in ("grad_norm", "skipped"))
    is_zero = norm.size == 1 and norm == 0 and not (skipped.size == 1 and "skipped" in metrics and skipped != 0)
    return NO_GRADIENT if is_zero else ""
