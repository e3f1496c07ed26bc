"""The model of gpt.py: its size, its layers' layout over stages, the weights in --init-from, and its operations a token."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from language_data import Data

import jaxpar
from jaxpar.compile_only import check_cudnn
from jaxpar.data.text import BYTES
from jaxpar.models import transformer
from jaxpar.models.lora import without_factors
from jaxpar.pipeline import LayerLayout
from jaxpar.schedule import Schedule
from jaxpar.tensor_parallel import split_copied_heads

VOCAB_MULTIPLE = 128  # the same on every mesh, so that a checkpoint fits any


def shape_of_flags(flags: Any) -> tuple[transformer.TransformerConfig, str]:
    """Returns the model that the flags ask for, before its data are known, and the flag that names it."""
    changes = {"vocab_multiple": VOCAB_MULTIPLE, "compute_dtype": flags.dtype}
    if flags.init_from is None:
        shape, named = transformer.preset(flags.model, **changes), f"--model {flags.model}"
        if shape.positions == "learned":
            shape = dataclasses.replace(shape, max_positions=flags.seq)
    else:
        shape = jaxpar.huggingface.read_config(flags.init_from, ignore=flags.ignore_config_keys, **changes)
        named = f"--init-from {flags.init_from}"
    if shape.positions == "learned" and flags.seq > shape.max_positions:
        raise ValueError(
            f"--seq must not be longer than a learned table of positions; got {flags.seq}, and {shape.max_positions} "
            f"positions in {named}. Choose --seq {shape.max_positions} or less."
        )
    return shape, named


def model_shape(flags: Any, text: Data, mesh: jax.sharding.Mesh) -> transformer.TransformerConfig:
    """Returns the model that the flags ask for, for these data and this mesh."""
    shape, named = shape_of_flags(flags)
    if text.is_bytes and (shape.tokens != "bytes" or shape.vocab_size < BYTES):
        other = (
            "choose --model gpt2-bytes, llama-bytes, bloom-bytes or moe-bytes"
            if flags.init_from is None
            else 'if its tokens are bytes, add "jaxpar_tokens": "bytes" to its config.json'
        )
        raise ValueError(
            f"{named} reads tokens of a vocabulary of {shape.vocab_size}; got {text.source}, whose tokens are bytes. Give a "
            f".bin of its tokens by --data, its tokenizer.json by --tokenizer, or {other}."
        )
    shape = shape.for_tensor(mesh.shape["tensor"])
    if shape.num_experts is not None:
        shape = dataclasses.replace(shape, expert_split=flags.expert_split)
    if mesh.devices.flat[0].platform == "gpu" and flags.dtype == "bfloat16":
        if flags.compile_for:
            check_cudnn()
        shape = dataclasses.replace(shape, attention=jaxpar.flash_attention)
    return shape


def make_layout(flags: Any, shape: transformer.TransformerConfig, schedule: Schedule) -> LayerLayout:
    """Returns the layout that stores each layer on its stage, so that no step moves weights."""
    if schedule.num_stages == 1:
        return LayerLayout(shape.num_layers, 1)
    stages = schedule.num_stages, schedule.num_chunks, schedule.placement
    return LayerLayout(shape.num_layers, *stages, flags.layers_per_virtual_stage)


def read_weights(
    flags: Any, shape: transformer.TransformerConfig, layout: LayerLayout, state: jaxpar.TrainState
) -> dict | None:
    """Returns the weights in --init-from, laid out as those of ``state``; None if there is no --init-from."""
    if flags.init_from is None:
        return None
    packed = jax.tree.map(lambda leaf: leaf.sharding, without_factors(state.params))
    if layout.is_canonical:
        return jaxpar.huggingface.read_params(flags.init_from, shape, packed)
    # The number of layers need not be divisible by the stages, so each stage has all layers until they are packed.
    on_all = lambda sharding: NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    canonical = packed | {"layers": jax.tree.map(on_all, packed["layers"].tree)}
    params = jaxpar.huggingface.read_params(flags.init_from, shape, canonical)
    return jax.jit(layout.pack_params, out_shardings=packed)(params)


def flops_per_token(flags: Any, shape: transformer.TransformerConfig, num_factors: int) -> int:
    """Returns the useful operations of training on a token (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    A frozen weight takes 4 operations a token instead of 6, since it has no gradient; experts that a token does not use take
    none.
    """
    active = transformer.num_active_params(shape)
    of_weights = 4 * active + 6 * num_factors if num_factors else 6 * active
    return of_weights + 12 * shape.num_layers * shape.embed_dim * flags.seq


def activation_constraint(flags: Any) -> dict[str, Any]:
    return {"constrain": jaxpar.sequence_parallel if flags.sequence_parallel else split_copied_heads}
