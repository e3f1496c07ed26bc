"""The folders that a run of a language model leaves: its model as transformers reads it, its factors of LoRA as peft does."""

from pathlib import Path

import jax
from jaxtyping import PyTree

import jaxpar
from jaxpar.huggingface.finite import OutOfRangeError
from jaxpar.models import lora
from jaxpar.models.transformer import TransformerConfig
from jaxpar.run.language_model import ModelFlags
from jaxpar.run.messages import say


def save_adapters(folder: Path, flags: ModelFlags, config: TransformerConfig, params: PyTree) -> None:
    """Writes the factors of LoRA as peft reads them."""
    base = None if flags.init_from is None else str(flags.init_from)
    jaxpar.huggingface.write_adapters(folder, config, params, base=base)
    say(f"written: {folder}/, adapters for peft")


def save_model(folder: Path, config: TransformerConfig, params: PyTree, *, described_by: Path) -> None:
    """Writes the model as transformers reads it, with the description in another folder.

    Its dtype is that of the description, or float32 if a weight is too large for that one: params may be nowhere else.
    """
    params, remark = merged(params), ""
    try:
        jaxpar.huggingface.write_model(folder, config, params, source=described_by)
    except OutOfRangeError as error:
        remark = f", as float32: {error}"
        jaxpar.huggingface.write_model(folder, config, params, source=described_by, dtype="float32")
    say(f"written: {folder}/, a model for transformers{remark}")


def merged(params: PyTree) -> PyTree:
    """Returns params on the mesh with the factors merged into the weights, which keep their shardings."""
    if not any(map(lora.is_adapted, jax.tree.leaves(params, is_leaf=lora.is_adapted))):
        return params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, lora.without_factors(params))
    return jax.jit(lora.merge, out_shardings=shardings)(params)
