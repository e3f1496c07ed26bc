"""Transformers that predict the next token: GPT-2, BLOOM, Llama and Mixtral with their relatives, from one description.

    config = transformer.preset("llama-7b", compute_dtype="bfloat16")
    table = transformer.param_table(config)           # shapes, dims, initializers: jaxpar.params
    model = transformer.make_model(config)            # a LayeredModel
    tokens = transformer.generate(config, params, prompt, 100, temperature=0.8, key=key)

Read in this order: `config.py` (the options; `old_names.py`: what some were called), `presets.py` with `presets.toml` (the
published models), `params.py` (the params), `layers.py` (the model), `norms.py`, `products.py` (with weights, some of them in
FP8), `span.py` (positions and segments of tokens), `attention.py`, `flash_chunks.py` (attention to a gathered sequence),
`rope.py` and `alibi.py` (positions of queries and keys), `mlp.py`, `padding.py`, `router.py` (with the optimizer of its bias)
and `router_losses.py`, `experts.py` with `dispatch.py` (the slots of rows), `generate.py` with `advance.py` (all layers, beside
a cache), `cache.py` and `sampling.py`, `scoring.py` (how likely given tokens are).
"""

from jaxpar.models.transformer.config import Experts, TransformerConfig
from jaxpar.models.transformer.generate import generate, stream
from jaxpar.models.transformer.layers import make_model
from jaxpar.models.transformer.padding import token_weights
from jaxpar.models.transformer.params import LAYER_WEIGHTS, num_active_params, param_table
from jaxpar.models.transformer.presets import PRESETS, preset
from jaxpar.models.transformer.products import check_products, describe_products, fp8_weights
from jaxpar.models.transformer.rope import Rope, RopeScaling
from jaxpar.models.transformer.router import balance_experts, expert_loads
from jaxpar.models.transformer.router_losses import (
    RoutedLogits,
    add_routing_losses,
    loads_of,
    logits_of,
)
from jaxpar.models.transformer.scoring import TokenScores, score_tokens

__all__ = [
    "LAYER_WEIGHTS",
    "PRESETS",
    "Experts",
    "Rope",
    "RopeScaling",
    "RoutedLogits",
    "TokenScores",
    "TransformerConfig",
    "add_routing_losses",
    "balance_experts",
    "check_products",
    "describe_products",
    "expert_loads",
    "fp8_weights",
    "generate",
    "loads_of",
    "logits_of",
    "make_model",
    "num_active_params",
    "param_table",
    "preset",
    "score_tokens",
    "stream",
    "token_weights",
]
