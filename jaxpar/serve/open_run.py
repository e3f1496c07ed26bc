"""Opens a folder as a model to serve: a run of a recipe, or a language model as transformers writes it.

The models of house prices and of digits answer one or more instances a request, at once.

model.json                                 a run of recipes/house_prices.py that has ended
model/config.json, checkpoints/            a run of recipes/gpt.py
config.json with model_type, *.safetensors a language model
config.json with hidden_layers             a run of recipes/digits.py, with checkpoints/
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from pydantic import Field, create_model

from jaxpar import fields, huggingface
from jaxpar.data.text import ByteTokenizer, Tokenizer
from jaxpar.dtypes import is_float
from jaxpar.huggingface.config import read_config_for
from jaxpar.huggingface.config_keys import dropout_keys
from jaxpar.huggingface.export import RunModel, open_run
from jaxpar.huggingface.finite import cast, check_finite, is_finite, what_is_wrong
from jaxpar.huggingface.folder import (
    CONFIG,
    check_no_adapters,
    download_remedy,
    file_inside,
    read_json,
)
from jaxpar.huggingface.tokenizer import has_tokenizer
from jaxpar.models import mlp
from jaxpar.models.lora import is_weight
from jaxpar.models.trained_linear import MODEL, TrainedLinear, read_linear
from jaxpar.models.transformer import TransformerConfig, param_table
from jaxpar.models.transformer.generate import next_power_of_two
from jaxpar.params import is_spec
from jaxpar.serve.language_model import LanguageModel
from jaxpar.serve.openai_api import language_model
from jaxpar.serve.requests import Body, Endpoint, Reply, Served
from jaxpar.sharding import path_string

Result = TypeVar("Result")
PREDICT = "/predict"
OF_TEXT = ("tokenizer", "dtype", "max_context_tokens", "max_tokens")  # settings of language models
MAX_INSTANCES = 64
LARGEST = 1e12  # of a feature, so that no prediction overflows
NUM_PIXELS, NUM_CLASSES, SIDE = 64, 10, 8
ONE = "00000000 00011000 00111000 00011000 00011000 00011000 00011000 00111100"  # a digit to try


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How a model is opened.

    Attributes:
        model_name: Name that requests give. Without it: that of the folder.
        tokenizer: A folder with the tokenizer.json of a language model. None: that of the run or the folder.
        ignore_config_keys: Keys of a model's config.json to ignore, which jaxpar does not model; dropout always is.
        step: The checkpoint of a run to serve. None: the newest intact one.
        dtype: Dtype of the params and products of a language model.
        max_context_tokens: Tokens of a prompt and its completion together, if the model has no smaller limit.
        max_tokens: Tokens that a request may ask for.
    """

    model_name: str = ""
    tokenizer: Path | None = None
    ignore_config_keys: tuple[str, ...] = ()
    step: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_context_tokens: Annotated[int, Field(ge=2)] = 2048
    max_tokens: Annotated[int, Field(ge=1)] = 512

    def __post_init__(self) -> None:
        fields.check(self, "Leave it out for the default.")


def open_model(folder: Path, settings: ModelSettings) -> Served:
    """Returns the model in a folder.

    Raises:
        FileNotFoundError, ValueError: The folder holds no model that can be served; the message says what to do.
        ImportError: A package is missing.
        BadCheckpointError: All its checkpoints are damaged.
    """
    name = settings.model_name or folder.resolve().name
    is_run = any((folder / each).is_file() for each in (MODEL, Path("model", CONFIG)))
    if is_run and settings.ignore_config_keys:
        raise ValueError(
            f"{fields.arg('ignore_config_keys')} are of the config.json of a model's folder; got them for the run in {folder}, "
            "which has its own. Leave them out."
        )
    if (folder / MODEL).is_file():
        _refuse_settings(settings, ("step", *OF_TEXT), f"the run of house_prices.py in {folder}")
        return house_prices(folder, name)
    if (folder / "model" / CONFIG).is_file():
        return _choosing_again(settings.step, lambda: _gpt_run(folder, name, settings))
    config = (
        read_json(file_inside(folder, CONFIG, str(folder))) if (folder / CONFIG).is_file() else {}
    )
    if "model_type" in config:
        _refuse_settings(settings, ("step",), f"the model in {folder}, which has no steps")
        return _pretrained(folder, name, settings)
    check_no_adapters(folder)
    if {"hidden_layers", "width"} <= set(config):
        _refuse_settings(settings, OF_TEXT, f"the run of digits.py in {folder}")
        params = _choosing_again(settings.step, lambda: _digits(folder, config, settings.step))
        return digits(params, name)
    if {"features", "target"} <= set(config):
        raise ValueError(
            f"a run of house_prices.py is served once it has ended; got no {MODEL} in {folder}. Complete it with --resume."
        )
    if not folder.exists():
        remedy = (
            download_remedy(folder, "serve")
            or "Name the --out-dir of a run, or the folder of a model."
        )
        raise ValueError(
            f"a model to serve must be in a folder; got {folder}, which does not exist. {remedy}"
        )
    raise ValueError(
        f"a folder to serve must be a run of house_prices.py, digits.py or gpt.py, or a model with config.json and "
        f"safetensors; got none in {folder}. Name the --out-dir of a run, or the folder of a model."
    )


def _refuse_settings(settings: ModelSettings, names: Sequence[str], what: str) -> None:
    """Raises ValueError for settings that have no effect on a model, unless they have their defaults."""
    idle = [name for name in names if getattr(settings, name) != getattr(ModelSettings, name)]
    if idle:
        raise ValueError(f"{fields.arg(*idle)} applies to other models; got {what}. Leave it out.")


def _choosing_again(step: int | None, read: Callable[[], Result]) -> Result:
    from jaxpar.checkpoint.stored_params import choosing_again  # here, since it imports Orbax

    return choosing_again(step, read)


def _digits(folder: Path, config: dict[str, Any], step: int | None) -> PyTree:
    """Returns the params of a run of digits.py on the first device."""
    from jaxpar.checkpoint.stored_params import as_tree, open_stored_params

    width, num_hidden = config["width"], config["hidden_layers"]
    if not all(type(size) is int and 0 < size < 2**20 for size in (width, num_hidden)):
        raise ValueError(
            f"width and hidden_layers must be positive integers; got {width!r} and {num_hidden!r} in {folder / CONFIG}. Give "
            "the folder of a run of digits.py."
        )
    stored, _ = open_stored_params(folder / "checkpoints", step)
    table = mlp.param_table(NUM_PIXELS, NUM_CLASSES, width=width, num_hidden=num_hidden)
    return _on_device(as_tree(stored, table), table, "float32")


def _gpt_run(folder: Path, name: str, settings: ModelSettings) -> Served:
    run = open_run(folder, settings.step, keeps_codes=True)
    run = replace(run, params=_on_device(run.params, param_table(run.config), settings.dtype))
    place = _place_of_tokenizer(folder, run.source)
    return _language_model(run, place, name, f"step {run.step} of {folder.name}", settings)


def _place_of_tokenizer(folder: Path, source: Path) -> Path:
    """Returns the folder of a run's tokenizer: its own copy, or where it has none the folder that it was given."""
    if has_tokenizer(source) or not (folder / CONFIG).is_file():
        return source
    named = read_json(folder / CONFIG).get("tokenizer")
    return Path(named) if isinstance(named, str) else source


def _pretrained(folder: Path, name: str, settings: ModelSettings) -> Served:
    ignored = (*dropout_keys(folder), *settings.ignore_config_keys)
    config = read_config_for(folder, ignored)
    read = RunModel(
        config, huggingface.read_params(folder, config, dtype=settings.dtype), folder, 0
    )
    return _language_model(read, folder, name, f"the language model in {folder.name}", settings)


def _language_model(
    run: RunModel, place: Path, name: str, about: str, settings: ModelSettings
) -> Served:
    tokenizer = _tokenizer(run.config, settings.tokenizer or place)
    eos = huggingface.stop_tokens(run.source) or (() if tokenizer.end is None else (tokenizer.end,))
    config = replace(run.config, compute_dtype=settings.dtype)
    model = LanguageModel(config, run.params, tokenizer, eos, settings.max_context_tokens)
    return language_model(model, name, about, settings.max_tokens)


def _tokenizer(config: TransformerConfig, folder: Path) -> Tokenizer:
    """Returns the tokenizer in a folder; for a model of bytes without one, that of bytes."""
    if has_tokenizer(folder):
        return huggingface.read_tokenizer(folder)
    if config.tokens == "bytes":
        return ByteTokenizer()
    raise FileNotFoundError(
        f"a language model is served with its tokenizer; got no tokenizer.json in {folder}. Name a folder that "
        "has it by --tokenizer."
    )


def _on_device(params: PyTree, table: PyTree, dtype: str) -> PyTree:
    """Returns stored params on the first device; raises ValueError if they have not a table's shapes, or are not finite."""
    shapes = [spec.full_shape for spec in jax.tree.leaves(table, is_leaf=is_spec)]
    found = [
        getattr(leaf, "weight", leaf).shape for leaf in jax.tree.leaves(params, is_leaf=is_weight)
    ]
    if wrong := [pair for pair in zip(found, shapes, strict=True) if pair[0] != pair[1]]:
        raise ValueError(
            f"a checkpoint must have the shapes of its model; got {wrong[0][0]} for {wrong[0][1]}. Give the checkpoints and "
            "the description of one run."
        )
    wrong = {}

    def put(path: tuple, leaf: Any) -> jax.Array:
        host = np.asarray(leaf)
        is_of_codes = path_string(path).endswith(("/codes", "/scales"))
        found = host if is_of_codes else cast(host, np.dtype(dtype))
        if not is_float(found):
            return jnp.asarray(found)
        if not is_finite(found):
            wrong[path_string(path)] = what_is_wrong(host, np.dtype(dtype))
        return jnp.asarray(found)

    placed = jax.tree_util.tree_map_with_path(put, params)
    check_finite(wrong, "of the checkpoint", np.dtype(dtype), "Serve an earlier step by --step.")
    return placed


def house_prices(run: Path, name: str) -> Served:
    """Returns the endpoint of a run of recipes/house_prices.py. Raises ValueError if its model.json is damaged."""
    linear = read_linear(run / MODEL)
    middles = [float(f"{(low + high) / 2:.4g}") for low, high in linear.seen]
    features: dict[str, Any] = {}  # under names of our own, since a column may have any name
    for i, (feature, (low, high)) in enumerate(zip(linear.features, linear.seen, strict=True)):
        rule = {
            "ge": -LARGEST,
            "le": LARGEST,
            "description": f"from {low:g} to {high:g} in training",
        }
        features[f"feature_{i}"] = float, Field(alias=feature, examples=[middles[i]], **rule)
    example = dict(zip(linear.features, middles, strict=True))
    about = f"predicts {linear.target} from {', '.join(linear.features)}"
    instance = create_model("House", __base__=Body, **features)
    return _predictor(name, about, instance, example, partial(predict_prices, linear))


def predict_prices(linear: TrainedLinear, instances: Sequence[Body]) -> dict[str, Any]:
    """Returns for each instance the target, and the features whose values lie outside the training data."""
    rows = [list(instance.model_dump().values()) for instance in instances]
    found = [
        {
            "prediction": linear.predict(row),
            "outside_training_range": [linear.features[i] for i in linear.outside(row)],
        }
        for row in rows
    ]
    return {"target": linear.target, "predictions": found}


class Image(Body):
    """A handwritten digit."""

    pixels: list[Annotated[float, Field(ge=0, le=1, examples=[0.5])]] = Field(
        min_length=NUM_PIXELS,
        max_length=NUM_PIXELS,
        description=f"{SIDE}x{SIDE} pixels, row by row, from 0 (background) to 1 (ink)",
    )


def digits(params: PyTree, name: str) -> Served:
    """Returns the endpoint of a run of recipes/digits.py, from its params."""
    example = {"pixels": [int(pixel) for pixel in ONE.replace(" ", "")]}
    return _predictor(
        name, "reads handwritten digits", Image, example, partial(predict_digits, params)
    )


def predict_digits(params: PyTree, instances: Sequence[Image]) -> dict[str, Any]:
    """Returns for each instance (64 pixels) the digit and the 10 probabilities."""
    rows = np.array([instance.pixels for instance in instances], np.float32)
    count = next_power_of_two(len(rows))  # a few programs for all numbers of rows
    padded = np.pad(rows, ((0, count - len(rows)), (0, 0)))
    probabilities = np.asarray(_probabilities(params, padded))[: len(rows)]
    found = [
        {"digit": int(row.argmax()), "probabilities": [float(each) for each in row]}
        for row in probabilities
    ]
    return {"predictions": found}


@jax.jit
def _probabilities(params: PyTree, features: jax.Array) -> jax.Array:
    return jax.nn.softmax(mlp.MODEL.apply(params, {"features": jnp.asarray(features)}), axis=-1)


def _predictor(
    name: str,
    about: str,
    instance: type[Body],
    example: dict[str, Any],
    predict: Callable[[Any], dict[str, Any]],
) -> Served:
    """Returns the one endpoint of a model that predicts for a list of instances."""
    instances = Field(
        min_length=1,
        max_length=MAX_INSTANCES,
        fail_fast=True,
        description="what to predict for",
        examples=[[example]],
    )
    kind: Any = create_model("Instances", __base__=Body, instances=(list[instance], instances))
    usage = {"instances": 0}

    def make_reply(body: Any) -> Reply:
        def work() -> Iterator[dict[str, Any]]:
            yield predict(body.instances)
            usage["instances"] += len(body.instances)

        return Reply(work, whole=lambda results: results[0])

    asked = {"instances": [example]}
    response = predict(kind.model_validate(asked).instances)
    endpoint = Endpoint(
        PREDICT, f"{about[0].upper()}{about[1:]}.", kind, asked, response, make_reply
    )
    return Served(name, about, (endpoint,), asked, usage=usage)
