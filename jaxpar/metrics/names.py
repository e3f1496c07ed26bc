"""The names of metrics: those that a training step and metrics.jsonl set, which further metrics must not have."""

from collections.abc import Iterable
from typing import Any

import numpy as np

OF_STEP = ("loss", "grad_norm", "skipped")
OF_LOG = ("step", "step_seconds")  # and a rate


def check_further(metrics: Any) -> None:
    """Raises unless metrics beside those of a training step are a dict of scalars with names of their own."""
    is_dict = isinstance(metrics, dict) and all(isinstance(name, str) for name in metrics)
    if not is_dict or any(np.ndim(value) for value in metrics.values()):
        raise TypeError(
            "what a loss returns beside its value must be a dict of scalars by name, since it becomes metrics of the step; got "
            f'{metrics}. Return such as {{"accuracy": accuracy}}, or use value_and_grad without has_aux.'
        )
    check_names(metrics, (*OF_STEP, *OF_LOG))


def check_names(names: Iterable[str], taken: Iterable[str]) -> None:
    """Raises for metrics whose names are taken."""
    both = sorted(set(names).intersection(taken))
    if both:
        raise ValueError(
            f"a step and its log have metrics named {', '.join(taken)}, so others must be named otherwise; got {both}. Rename "
            "them."
        )
