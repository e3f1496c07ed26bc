"""Transformers that predict the next token: GPT-2, BLOOM, Llama and Mixtral with their relatives, from one description.

    config = transformer.preset("llama-7b", compute_dtype="bfloat16")
    table = transformer.param_table(config)           # shapes, dims, initializers: jaxpar.params
    model = transformer.make_model(config)            # a LayeredModel
    tokens = transformer.generate(config, params, prompt, 100, temperature=0.8, key=key)

Read in this order: `config.py` (the options), `presets.py` with `presets.toml` (the published models), `params.py` (the
params), `layers.py` (the model), `norms.py`, `attention.py`, `flash_chunks.py` (attention to a gathered sequence), `rope.py`
(rotary positions), `mlp.py`, `router.py` (with the optimizer of its bias), `experts.py` with `dispatch.py` (the slots of rows),
`generate.py` with `sampling.py`.
"""

from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.generate import generate, stream
from jaxpar.models.transformer.layers import make_model
from jaxpar.models.transformer.params import LAYER_WEIGHTS, num_active_params, param_table
from jaxpar.models.transformer.presets import PRESETS, preset
from jaxpar.models.transformer.rope import RopeScaling
from jaxpar.models.transformer.router import (
    RoutedLogits,
    add_routing_losses,
    balance_experts,
    expert_loads,
    loads_of,
    logits_of,
)

__all__ = [
    "LAYER_WEIGHTS",
    "PRESETS",
    "RopeScaling",
    "RoutedLogits",
    "TransformerConfig",
    "add_routing_losses",
    "balance_experts",
    "expert_loads",
    "generate",
    "loads_of",
    "logits_of",
    "make_model",
    "num_active_params",
    "param_table",
    "preset",
    "stream",
]
