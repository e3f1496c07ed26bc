"""Predictions of the small recipes: house prices and digits, one or more instances a request, answered at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar.models import mlp
from jaxpar.models.trained_linear import MODEL, TrainedLinear, read_linear
from jaxpar.models.transformer.prompts import next_power_of_two
from jaxpar.serve.endpoint import Endpoint, Served
from jaxpar.serve.json_body import Schema

PREDICT = "/predict"
MAX_INSTANCES = 64
LARGEST = 1e12  # of a feature, so that no prediction overflows
NUM_PIXELS, NUM_CLASSES, SIDE = 64, 10, 8
ONE = "00000000 00011000 00111000 00011000 00011000 00011000 00011000 00111100"  # a digit to try


@dataclass(frozen=True)
class Prediction:
    """A reply that is sent at once; an ``endpoint.Reply``.

    Attributes:
        predict: Returns the response to a body.
        body: The body.
        usage: Counts of instances.
    """

    predict: Callable[[Any], dict[str, Any]]
    body: Any
    usage: dict[str, int]
    is_stream = False

    def work(self) -> Iterator[dict[str, Any]]:
        """Computes the prediction."""
        yield self.predict(self.body)
        self.usage["instances"] += len(self.body["instances"])

    def events(self, result: Any) -> Sequence[dict[str, Any]]:
        """Returns nothing: there is no stream."""
        return ()

    def last_events(self) -> Sequence[dict[str, Any]]:
        """Returns nothing: there is no stream."""
        return ()

    def whole(self, results: Sequence[Any]) -> dict[str, Any]:
        """Returns the prediction."""
        return results[0]


def house_prices(run: Path, name: str) -> Served:
    """Returns the endpoint of a run of recipes/house_prices.py. Raises ValueError if its model.json is damaged."""
    linear = read_linear(run / MODEL)
    features = {feature: _feature(*seen) for feature, seen in zip(linear.names, linear.seen, strict=True)}
    example = {feature: schema["examples"][0] for feature, schema in features.items()}
    predict = partial(predict_prices, linear)
    about = f"predicts {linear.target} from {', '.join(linear.names)}"
    return _served(name, about, features, example, predict)


def _feature(low: float, high: float) -> dict[str, Any]:
    middle = float(f"{(low + high) / 2:.4g}")
    bounds = {"minimum": -LARGEST, "maximum": LARGEST}
    return {"type": "number", **bounds, "description": f"from {low:g} to {high:g} in training", "examples": [middle]}


def predict_prices(linear: TrainedLinear, body: dict[str, Any]) -> dict[str, Any]:
    """Returns for each instance the target, and the features whose values lie outside the training data."""
    rows = [[float(instance[name]) for name in linear.names] for instance in body["instances"]]
    found = [
        {"prediction": linear.predict(row), "outside_training_range": [linear.names[i] for i in linear.outside(row)]}
        for row in rows
    ]
    return {"target": linear.target, "predictions": found}


def digits(params: PyTree, name: str) -> Served:
    """Returns the endpoint of a run of recipes/digits.py, from its params."""
    pixels = {
        "type": "array",
        "minItems": NUM_PIXELS,
        "maxItems": NUM_PIXELS,
        "items": {"type": "number", "minimum": 0, "maximum": 1, "examples": [0.5]},
        "description": f"{SIDE}x{SIDE} pixels, row by row, from 0 (background) to 1 (ink)",
    }
    example = {"pixels": [int(pixel) for pixel in ONE.replace(" ", "")]}
    return _served(name, "reads handwritten digits", {"pixels": pixels}, example, partial(predict_digits, params))


def predict_digits(params: PyTree, body: dict[str, Any]) -> dict[str, Any]:
    """Returns for each instance (64 pixels) the digit and the 10 probabilities."""
    rows = np.array([instance["pixels"] for instance in body["instances"]], np.float32)
    count = next_power_of_two(len(rows))  # a few programs for all numbers of rows
    padded = np.pad(rows, ((0, count - len(rows)), (0, 0)))
    probabilities = np.asarray(_probabilities(params, padded))[: len(rows)]
    found = [{"digit": int(row.argmax()), "probabilities": [float(each) for each in row]} for row in probabilities]
    return {"predictions": found}


@jax.jit
def _probabilities(params: PyTree, features: jax.Array) -> jax.Array:
    return jax.nn.softmax(mlp.MODEL.apply(params, {"features": jnp.asarray(features)}), axis=-1)


def _served(
    name: str, about: str, fields: dict[str, Any], example: dict[str, Any], predict: Callable[[Any], dict[str, Any]]
) -> Served:
    body, usage = {"instances": [example]}, {"instances": 0}
    make_reply = lambda body: Prediction(predict, body, usage)
    endpoint = Endpoint(PREDICT, f"{about[0].upper()}{about[1:]}.", _schema(fields, body), predict(body), make_reply)
    return Served(name, about, (endpoint,), body, usage=usage)


def _schema(fields: dict[str, Any], example: dict[str, Any]) -> Schema:
    instance = {
        "type": "object",
        "required": list(fields),
        "additionalProperties": False,
        "properties": fields,
        "examples": example["instances"],
    }
    instances = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_INSTANCES,
        "items": instance,
        "description": "what to predict for",
    }
    return {
        "type": "object",
        "required": ["instances"],
        "additionalProperties": False,
        "properties": {"instances": instances | {"examples": [example["instances"]]}},
        "examples": [example],
    }
