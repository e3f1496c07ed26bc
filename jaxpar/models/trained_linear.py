"""A trained linear regression, as a run writes it to model.json, with weights in the units of the data."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
        features: The features' names.
        target: The target's name.
        weights: That of each feature.
        intercept: The target where all features are 0.
        seen: The smallest and the largest value of each feature in the rows that the model was trained on.
    """

    features: tuple[str, ...]
    target: str
    weights: tuple[FiniteFloat, ...]
    intercept: FiniteFloat
    seen: tuple[tuple[float, float], ...]

    def predict(self, values: Sequence[int | float]) -> float:
        """Returns the target for one value of each feature."""
        return float(np.array(values, float) @ np.array(self.weights) + self.intercept)

    def outside(self, values: Sequence[int | float]) -> list[int]:
        """Returns the indices of the features whose values lie outside the training data."""
        return [
            i
            for i, (value, (low, high)) in enumerate(zip(values, self.seen, strict=True))
            if not low <= value <= high
        ]


def read_linear(path: Path) -> TrainedLinear:
    """Returns the model in a file; raises ValueError if it is damaged."""
    try:
        model = fields.read_json(TrainedLinear, path.read_bytes(), MODEL, "Train again.")
        if not 0 < len(model.features) == len(model.weights) == len(model.seen):
            raise ValueError
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{MODEL} must be one that a run has written; got {path}, which is not. Train again, in another --out-dir."
        ) from error
    return replace(
        model, features=tuple(map(printable, model.features)), target=printable(model.target)
    )


def write_linear(path: Path, linear: TrainedLinear) -> None:
    """Writes a model as ``read_linear`` reads it."""
    path.write_text(json.dumps(asdict(linear), indent=2) + "\n")


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
    if len(values) != len(linear.features):
        raise ValueError(
            f"--predict must have one value for each feature, {', '.join(linear.features)}; got {len(values)}. Give "
            f"{len(linear.features)}."
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(
            f"--predict must have finite numbers; got {' '.join(map(str, values))}. Correct them."
        )
    outside = [
        f"{linear.features[i]} {linear.seen[i][0]:g} to {linear.seen[i][1]:g}"
        for i in linear.outside(values)
    ]
    given = ", ".join(
        f"{name} {value:g}" for name, value in zip(linear.features, values, strict=True)
    )
    warning = f" (a guess: the model has only seen {', '.join(outside)})" if outside else ""
    return f"{linear.target} {linear.predict(values):,.6g} for {given}{warning}"
