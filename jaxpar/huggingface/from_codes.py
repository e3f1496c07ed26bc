"""The params of a run whose weights are in codes: values by the layer for files, or codes to serve.

    codes and scales --of one layer, with factors merged--> float32, as write_model indexes it

A model that is merged is not in codes. So one that is served keeps its codes and its factors.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.huggingface.params import specs_of
from jaxpar.huggingface.peft import MergedArray
from jaxpar.models.lora import Adapted, is_adapted, is_weight
from jaxpar.models.quantized import Quantized, dense, is_quantized, quantize_weight
from jaxpar.models.transformer import LAYER_WEIGHTS, TransformerConfig
from jaxpar.shard_map import take_layer
from jaxpar.sharding import fetch, path_string

_values = jax.jit(dense)


class LayersInCodes:
    """Stacked weights in codes, decoded when they are indexed: ``array[layer]`` is one layer, on the host.

    Attributes:
        shape: That of the weights.
        dtype: That of the values, float32.
    """

    def __init__(self, weight: Quantized) -> None:
        self.shape, self.dtype, self._weight = weight.shape, weight.dtype, weight

    def __getitem__(self, layer: int) -> np.ndarray:
        of_layer = lambda array: array[layer]
        return np.asarray(_values(jax.tree.map(of_layer, self._weight)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(np.stack([self[layer] for layer in range(self.shape[0])]), dtype)


class LayersOnMesh:
    """A stacked array on a mesh, of which ``array[layer]`` is one layer, on every host.

    Attributes:
        shape: That of the array.
        dtype: That of the array.
    """

    def __init__(self, array: jax.Array) -> None:
        self.shape, self.dtype, self._array = array.shape, array.dtype, array

    def __getitem__(self, layer: int) -> np.ndarray:
        return fetch(take_layer(self._array, layer))


def has_codes(params: PyTree) -> bool:
    """Returns whether any weight of params is in codes."""
    return any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))


def layer_by_layer(params: PyTree) -> PyTree:
    """Returns params on a mesh, with merged weights that are computed when they are indexed."""

    def of(path: tuple, node: Any) -> Any:
        if is_quantized(node):
            return LayersInCodes(jax.tree.map(LayersOnMesh, node))
        if not is_adapted(node):
            return node
        lora_a, lora_b = LayersOnMesh(node.lora_a), LayersOnMesh(node.lora_b)
        return MergedArray(of(path, node.weight), lora_a, lora_b, node.scale, path_string(path))

    return jax.tree_util.tree_map_with_path(of, params, is_leaf=is_weight)


def decoded(
    stored: Mapping[str, Any], config: TransformerConfig, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns stored params, by path, with weights in place of codes, decoded when they are indexed.

    Args:
        stored: Stored params.
        config: The model.
        settings: The settings of the run that stored them.
    """
    found = dict(stored)
    for path in [own for each in specs_of(config) for own in (each, f"{each}/weight")]:
        if f"{path}/codes" in stored:
            weight = _weight(stored, path, config, settings)
            for at, _ in jax.tree_util.tree_leaves_with_path(weight):
                del found[f"{path}/{path_string(at)}"]
            found[path] = LayersInCodes(weight)
    return found


def in_codes_of(
    stored: Mapping[str, Any],
    config: TransformerConfig,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns stored params by a model's paths, with the codes and factors that they have."""
    scale = settings["lora_alpha"] / settings["lora_rank"]

    def of(path: str) -> Any:
        if f"{path}/codes" in stored:
            return _weight(stored, path, config, settings)
        if f"{path}/lora_a" not in stored:
            return stored[path]
        lora_a, lora_b = stored[f"{path}/lora_a"], stored[f"{path}/lora_b"]
        return Adapted(of(f"{path}/weight"), lora_a, lora_b, scale)

    return {path: of(path) for path in specs_of(config)}


def _weight(
    stored: Mapping[str, Any],
    path: str,
    config: TransformerConfig,
    settings: Mapping[str, Any],
) -> Quantized:
    of_model = path.removesuffix("/weight")
    num_in = LAYER_WEIGHTS[of_model.split("/")[-1]]
    shape = jax.ShapeDtypeStruct(specs_of(config)[of_model].shape, "float32")
    quantize = lambda weight: quantize_weight(weight, settings["quantize"], num_in, 0, path)
    one = jax.eval_shape(quantize, shape)
    return jax.tree_util.tree_map_with_path(lambda at, _: stored[f"{path}/{path_string(at)}"], one)
