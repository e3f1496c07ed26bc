"""A trained linear regression, as recipes/house_prices.py writes it to model.json, with weights in the units of the data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpar.runtime.printable import printable

MODEL = "model.json"


@dataclass(frozen=True)
class TrainedLinear:
    """``target = features . weights + intercept``, in the units of the data.

    Attributes:
        names: The features' names.
        target: The target's name.
        weights: ``[features]``.
        intercept: The target where all features are 0.
        seen: The smallest and the largest value of each feature in the rows that the model was trained on.
    """

    names: tuple[str, ...]
    target: str
    weights: np.ndarray
    intercept: float
    seen: tuple[tuple[float, float], ...]

    def predict(self, values: Sequence[int | float]) -> float:
        """Returns the target for one value of each feature."""
        return float(np.array(values, float) @ self.weights + self.intercept)

    def outside(self, values: Sequence[int | float]) -> list[int]:
        """Returns the indices of the features whose values lie outside the training data."""
        return [
            i for i, (value, (low, high)) in enumerate(zip(values, self.seen, strict=True)) if not low <= value <= high
        ]


def read_linear(path: Path) -> TrainedLinear:
    """Returns the model in a file; raises ValueError if it is damaged."""
    try:
        model = json.loads(path.read_text())
        names = tuple(map(printable, model["features"]))
        weights, seen = (
            np.array(model["weights"], float),
            tuple((float(low), float(high)) for low, high in model["seen"]),
        )
        linear = TrainedLinear(names, printable(model["target"]), weights, float(model["intercept"]), seen)
        if not (
            0 < len(names) == len(seen)
            and weights.shape == (len(names),)
            and np.isfinite([*weights, linear.intercept]).all()
        ):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{MODEL} must be one that a run has written; got {path}, which is not. Train again, in another --out-dir."
        ) from error
    return linear
