"""GPT-2, Llama and BLOOM in the folders that Hugging Face's transformers reads and writes: config.json and safetensors.

    config = huggingface.read_config("llama/", compute_dtype="bfloat16")           a TransformerConfig
    shardings = jaxpar.shardings_from_dims(transformer.param_table(config), mesh, TRANSFORMER_RULES)
    params = huggingface.read_params("llama/", config, shardings)                  each device gets its own slices
    huggingface.write_model("tuned/", config, params)                              needs the extra hf

A folder may come from anyone. What is read from it is checked before it is used, and what is not understood is an error:
nothing is left out in silence. What a model's training had and jaxpar's has not, such as a GPT-2's dropout, is read with
``ignore=("attn_pdrop", "embd_pdrop", "resid_pdrop")`` and written back as it was.

Read in this order: `untrusted.py` (JSON and paths of strangers), `tensor_file.py` (one safetensors file), `folder.py` (the
files of a model), `names.py` (which tensors are which params), `keys.py` and `config.py`,
`params.py`, `export.py`.
"""

from jaxpar.huggingface.config import read_config
from jaxpar.huggingface.export import write_model
from jaxpar.huggingface.params import read_params

__all__ = ["read_config", "read_params", "write_model"]
