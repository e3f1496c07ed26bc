"""A trained linear regression, as a run writes it to model.json, with weights in the units of the data."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import FiniteFloat

from jaxpar import fields
from jaxpar.runtime.output import printable

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


@dataclass(frozen=True)
class _Written:
    features: tuple[str, ...]
    target: str
    weights: tuple[FiniteFloat, ...]
    intercept: FiniteFloat
    seen: tuple[tuple[float, float], ...]


def read_linear(path: Path) -> TrainedLinear:
    """Returns the model in a file; raises ValueError if it is damaged."""
    try:
        model = fields.read_json(_Written, path.read_bytes(), MODEL, "Train again.")
        if not 0 < len(model.features) == len(model.weights) == len(model.seen):
            raise ValueError
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{MODEL} must be one that a run has written; got {path}, which is not. Train again, in another --out-dir."
        ) from error
    names = tuple(map(printable, model.features))
    return TrainedLinear(names, printable(model.target), np.array(model.weights), model.intercept, model.seen)


def write_linear(path: Path, linear: TrainedLinear) -> None:
    """Writes a model as ``read_linear`` reads it."""
    model = {
        "features": list(linear.names),
        "target": linear.target,
        "weights": linear.weights.tolist(),
        "intercept": linear.intercept,
        "seen": [list(ends) for ends in linear.seen],
    }
    path.write_text(json.dumps(model, indent=2) + "\n")


def describe_prediction(folder: Path, values: Sequence[int | float]) -> str:
    """Returns the prediction of the model in a run's folder for one value of each feature, as a sentence.

    Raises:
        ValueError: There is no model, or the values are not of its features; the message is about the flag --predict.
    """
    path = folder / MODEL
    if not path.is_file():
        raise ValueError(
            f"--predict needs a run that has ended; got no {MODEL} in {folder}. Train first, or name its folder by "
            "--out-dir; --resume completes a run that was stopped."
        )
    linear = read_linear(path)
    if len(values) != len(linear.names):
        raise ValueError(
            f"--predict must have one value for each feature, {', '.join(linear.names)}; got {len(values)}. Give "
            f"{len(linear.names)}."
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(f"--predict must have finite numbers; got {' '.join(map(str, values))}. Correct them.")
    outside = [f"{linear.names[i]} {linear.seen[i][0]:g} to {linear.seen[i][1]:g}" for i in linear.outside(values)]
    given = ", ".join(f"{name} {value:g}" for name, value in zip(linear.names, values, strict=True))
    warning = f" (a guess: the model has only seen {', '.join(outside)})" if outside else ""
    return f"{linear.target} {linear.predict(values):,.6g} for {given}{warning}"
