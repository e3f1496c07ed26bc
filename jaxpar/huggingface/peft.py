"""The factors of LoRA as a folder that the library peft reads, adapter_config.json and adapter_model.safetensors, or merged.

    layers/attention/w_qkv/lora_a [embed, rank] --> ...layers.{}.self_attn.q_proj.lora_A.weight [rank, in], and for k and v
                           lora_b [rank, ...]   --> ...layers.{}.self_attn.q_proj.lora_B.weight [out, rank], a part for each

**Reference**: peft 0.21, tuners/lora and utils/save_and_load.py; tests/test_peft_live.py checks the folders against it.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.huggingface.config import family_of
from jaxpar.huggingface.finite import check_finite, is_finite, what_is_wrong
from jaxpar.huggingface.folder import ADAPTER_CONFIG, write_json
from jaxpar.huggingface.params import Piece, names_of, split_dims, tensors_of
from jaxpar.layered_model import LAYERS, is_packed
from jaxpar.models.lora import FIELDS, Adapted, is_adapted
from jaxpar.models.transformer import LAYER_WEIGHTS, TransformerConfig
from jaxpar.params import ParamSpec
from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.output import write_atomically
from jaxpar.sharding import fetch, path_string

ADAPTER_MODEL = "adapter_model.safetensors"
RANK = "rank"
# What every adapter_config.json says.
COMMON = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "lora_dropout": 0.0,
    "bias": "none",
    "inference_mode": True,
}


def write_adapters(
    folder: Path | str, config: TransformerConfig, params: PyTree, *, base: str | None = None
) -> None:
    """Writes the factors among a transformer's params as a folder for ``peft``, or replaces it; every process must call it.

    ``PeftModel.from_pretrained(model, folder)`` then has the logits of ``params``. Every process fetches the factors.

    Args:
        folder: The folder, created if needed; the first process writes to it.
        config: The model, which ``transformers`` must have a class for.
        params: Its params with factors, from ``Lora.init``: on the host, on a mesh, or packed for a pipeline.
        base: The name or folder of the model that was adapted, for ``adapter_config.json``.

    Raises:
        ImportError: The extra ``hf`` is not installed.
        ValueError: The model is of no family, no weight has factors, or a factor is NaN or infinite.
    """
    from jaxpar.checkpoint.export import load_save_file  # here, since it imports Orbax

    save_file, kind = load_save_file(), family_of(config)
    nodes = _adapted_layers(params)
    if not nodes:
        raise ValueError(
            "adapters are written of params with factors; got no weight that has any. Make them: jaxpar.models.lora.Lora.init."
        )
    tensors = dict(_tensors(config, nodes))
    wrong = {
        name: what_is_wrong(tensor, tensor.dtype)
        for name, tensor in tensors.items()
        if not is_finite(tensor)
    }
    check_finite(
        wrong,
        f"to be written to {folder}",
        np.dtype("float32"),
        "Write those of a step before they appeared.",
    )
    node = next(iter(nodes.values()))
    rank = int(node.lora_a.shape[-1])
    modules = {
        ".".join(name.split(".")[-4:-2]) for name in tensors
    }  # mlp.c_proj is not attn.c_proj
    alpha = node.scale * rank
    about = COMMON | {
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(modules),
        "fan_in_fan_out": kind == "gpt2",  # its weights are [in, out]
    }
    folder = Path(folder)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            folder / ADAPTER_MODEL, lambda path: save_file(tensors, path, {"format": "pt"})
        )
        write_json(folder / ADAPTER_CONFIG, about)
    exchange("adapters written", True)


def _adapted_layers(params: PyTree) -> dict[str, Adapted]:
    """Returns the factors on the host by the paths of their weights, with layers in the model's order."""
    layers = params[LAYERS]
    unpack: Callable[[PyTree], PyTree] = (
        layers.layout.in_canonical_order if is_packed(layers) else lambda tree: tree
    )
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_adapted):
        if is_adapted(node):
            name, factors = path_string(path), fetch((node.lora_a, node.lora_b))
            a, b = unpack(factors) if name.startswith(LAYERS) else factors
            found[name] = Adapted(None, a, b, node.scale)
    return found


def _tensors(
    config: TransformerConfig, nodes: dict[str, Adapted]
) -> Iterator[tuple[str, np.ndarray]]:
    for tensor, (path, layer, piece) in tensors_of(config):
        if path not in nodes:
            continue
        spec, rank, num_in = (
            piece.spec,
            nodes[path].lora_a.shape[-1],
            LAYER_WEIGHTS[path.split("/")[-1]],
        )
        of_a = ParamSpec((*spec.shape[:num_in], rank), (*spec.dims[:num_in], RANK))
        of_b = ParamSpec((rank, *spec.shape[num_in:]), (RANK, *spec.dims[num_in:]))
        # The dims of the tensor that the product of the weight sums over, and the others.
        ins, outs = sorted(
            split_dims(piece.dims), key=lambda dim: names_of(dim) != [*spec.dims[:num_in]]
        )
        module = f"base_model.model.{tensor.removesuffix('.weight')}"
        at = () if layer is None else layer
        a, b = nodes[path].lora_a[at], nodes[path].lora_b[at]
        yield f"{module}.lora_A.weight", Piece("", f"{RANK} {ins}", of_a).to_tensor(a)
        yield f"{module}.lora_B.weight", Piece("", f"{outs} {RANK}", of_b).to_tensor(b)


def merge_factors(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns stored params, by path, with the factors of LoRA merged into their weights when these are indexed.

    Args:
        stored: Stored params.
        settings: The settings of the run that stored them.
    """
    found = dict(stored)
    for path in [path.removesuffix("/lora_a") for path in stored if path.endswith("/lora_a")]:
        weight, lora_a, lora_b = (found.pop(f"{path}/{name}") for name in FIELDS)
        found[path] = MergedArray(
            weight, lora_a, lora_b, settings["lora_alpha"] / settings["lora_rank"], path
        )
    return found


class MergedArray:
    """A stored weight with its factors, merged when it is read: ``array[layer]`` is one layer of W + scale A B, in NumPy.

    Only weights under ``layers`` have a leading dim of layers.

    Attributes:
        shape: That of the weight.
        dtype: That of the weight.
    """

    def __init__(self, weight: Any, lora_a: Any, lora_b: Any, scale: float, path: str) -> None:
        self.shape, self.dtype, self._is_stacked = (
            weight.shape,
            weight.dtype,
            path.startswith(LAYERS),
        )
        self._parts, self._scale = (weight, lora_a, lora_b), scale

    def __getitem__(self, layer: int) -> np.ndarray:
        return self._merged(*(part[layer] for part in self._parts))

    def _merged(self, *parts: Any) -> np.ndarray:
        weight, lora_a, lora_b = map(np.asarray, parts)
        return Adapted(weight, lora_a, lora_b, self._scale).merged()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        if not self._is_stacked:
            return np.asarray(self._merged(*self._parts), dtype)
        return np.asarray(np.stack([self[layer] for layer in range(self.shape[0])]), dtype)
