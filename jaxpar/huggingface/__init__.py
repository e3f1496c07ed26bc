"""Reads and writes models in the folder format of Hugging Face's transformers: config.json and safetensors.

GPT-2, BLOOM, Llama 1 to 3.3, Mistral, Qwen2 and 2.5, Qwen3, SmolLM2, OLMo 2 and Granite 3, and others with the ``model_type``
of one of these.

    config = huggingface.read_config("llama/", compute_dtype="bfloat16")           a TransformerConfig
    shardings = jaxpar.shardings_from_dims(transformer.param_table(config), mesh, TRANSFORMER_RULES)
    params = huggingface.read_params("llama/", config, shardings)                  each device gets its own slices
    huggingface.write_model("tuned/", config, params, source="llama/")             needs the extra hf

A folder is untrusted: its contents are checked before use, and anything unknown is an error rather than silently ignored. To
read a model with settings that jaxpar does not support, such as GPT-2's dropout, pass their keys, as in
``ignore=("attn_pdrop", "embd_pdrop", "resid_pdrop")``; they are written back unchanged.

Read in this order: `folder.py` (untrusted JSON, paths and tensors), `families.py` and `families.json` (the keys and tensors
of each family), `config.py` with `config_keys.py` and `rope.py` (config.json), `finite.py` (NaN and overflow), `params.py`
(reading params), `export.py` with `dtypes.py` (writing a model, that of a run), `peft.py` (writing adapters), `in_codes.py` and
`from_codes.py` (weights in four or eight bits), `tokenizer.py` (text to tokens and back), `chat_template.py` (conversations to
text).
"""

from jaxpar.huggingface.config import read_config
from jaxpar.huggingface.export import check_no_model, stop_tokens, write_description, write_model
from jaxpar.huggingface.params import read_params
from jaxpar.huggingface.peft import write_adapters
from jaxpar.huggingface.tokenizer import read_tokenizer

__all__ = [
    "check_no_model",
    "read_config",
    "read_params",
    "read_tokenizer",
    "stop_tokens",
    "write_adapters",
    "write_description",
    "write_model",
]
