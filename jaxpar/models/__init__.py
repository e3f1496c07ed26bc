"""Models as pure functions over tables of parameters. They do not depend on a mesh or its axes.

`linear.py` and `mlp.py` are small examples, `transformer/` covers GPT-2, BLOOM, Llama, Mixtral and their relatives, with
`grouped_product.py`, the products of its experts, of which `grouped_mosaic.py` has the kernels for Hopper and
`grouped_triton.py` those for other GPUs; `lora.py` adds low-rank factors to any of them, beside weights in four or eight bits
(`quantized.py`). `trained_linear.py` is a linear regression as a run has written it.
"""
