"""Transformers that predict the next token: GPT-2, BLOOM, and Llama with its relatives, from one description.

    config = transformer.preset("llama-7b", compute_dtype="bfloat16")
    table = transformer.param_table(config)           # shapes, dims, initializers: jaxpar.params
    model = transformer.make_model(config)            # a LayeredModel
    tokens = transformer.generate(config, params, prompt, 100, temperature=0.8, key=key)

Read in this order: `config.py` (the options), `presets.py` (the published models), `params.py` (the params), `layers.py` (the
model), `norms.py`, `attention.py`, `rope.py` (rotary positions), `generate.py` with `prompts.py`
and `sampling.py`.
"""

from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.generate import generate, stream
from jaxpar.models.transformer.layers import make_model
from jaxpar.models.transformer.params import LAYER_WEIGHTS, param_table
from jaxpar.models.transformer.presets import PRESETS, preset
from jaxpar.models.transformer.rope import RopeScaling

__all__ = [
    "LAYER_WEIGHTS",
    "PRESETS",
    "RopeScaling",
    "TransformerConfig",
    "generate",
    "make_model",
    "param_table",
    "preset",
    "stream",
]
