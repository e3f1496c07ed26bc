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

from jaxpar.models.transformer.config import Experts as Experts
from jaxpar.models.transformer.config import TransformerConfig as TransformerConfig
from jaxpar.models.transformer.generate import generate as generate
from jaxpar.models.transformer.generate import stream as stream
from jaxpar.models.transformer.layers import make_model as make_model
from jaxpar.models.transformer.padding import token_weights as token_weights
from jaxpar.models.transformer.params import LAYER_WEIGHTS as LAYER_WEIGHTS
from jaxpar.models.transformer.params import num_active_params as num_active_params
from jaxpar.models.transformer.params import param_table as param_table
from jaxpar.models.transformer.presets import PRESETS as PRESETS
from jaxpar.models.transformer.presets import preset as preset
from jaxpar.models.transformer.products import check_products as check_products
from jaxpar.models.transformer.products import describe_products as describe_products
from jaxpar.models.transformer.products import fp8_weights as fp8_weights
from jaxpar.models.transformer.rope import Rope as Rope
from jaxpar.models.transformer.rope import RopeScaling as RopeScaling
from jaxpar.models.transformer.router import balance_experts as balance_experts
from jaxpar.models.transformer.router import expert_loads as expert_loads
from jaxpar.models.transformer.router_losses import RoutedLogits as RoutedLogits
from jaxpar.models.transformer.router_losses import add_routing_losses as add_routing_losses
from jaxpar.models.transformer.router_losses import loads_of as loads_of
from jaxpar.models.transformer.router_losses import logits_of as logits_of
from jaxpar.models.transformer.scoring import TokenScores as TokenScores
from jaxpar.models.transformer.scoring import score_tokens as score_tokens
