"""Transformers that predict the next token: GPT-2, Llama and BLOOM, from one description.

    config = transformer.preset("llama-7b", compute_dtype="bfloat16")
    table = transformer.param_table(config)           # shapes, dims, initializers: jaxpar.params
    model = transformer.make_model(config)            # a LayeredModel
    tokens = transformer.generate(config, params, prompt, 100, temperature=0.8, key=key)

Read in this order: `config.py` (the options, and the published models), `params.py` (the params), `layers.py` (the model),
`attention.py`, `generate.py`.
"""

from jaxpar.models.transformer.config import PRESETS, TransformerConfig, preset
from jaxpar.models.transformer.generate import generate
from jaxpar.models.transformer.layers import make_model
from jaxpar.models.transformer.params import param_table

__all__ = ["PRESETS", "TransformerConfig", "generate", "make_model", "param_table", "preset"]
