"""Small transformers of three families, their batches and their reference, for tests that share them."""

import functools

import jax
import numpy as np

import jaxpar
from jaxpar.models import transformer
from jaxpar.params import abstract_params
from jaxpar.sharding import shardings_from_dims
from jaxpar.tensor_parallel import TRANSFORMER_RULES

VOCAB, SEQ, EMBED, ROWS = 16, 8, 16, 16
SHAPE = {"vocab_size": VOCAB, "num_layers": 4, "embed_dim": EMBED, "num_heads": 8, "mlp_dim": 24, "max_positions": SEQ}
LLAMA = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False, "num_kv_heads": 4}
FAMILIES = {
    "gpt2": transformer.TransformerConfig(**SHAPE),
    "gpt2-untied": transformer.TransformerConfig(**SHAPE, tied=False),
    "llama": transformer.TransformerConfig(**SHAPE, **LLAMA, tied=False),
    "llama-tied": transformer.TransformerConfig(**SHAPE, **LLAMA),
    "bloom": transformer.TransformerConfig(**SHAPE, positions="alibi", norm_embedding=True),
}
SWITCHES = {  # of other families of the Llama block
    "llama": {},
    "qwen2": {"biases": "qkv"},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "width", "norm_order": "post", "biases": "attention"},
}
THREE = ("gpt2", "llama", "bloom")


def make_params(config, *, seed=0, dtype=None):
    """Params on the host, none of them zero or one, so that each gradient is there to be wrong."""
    rng = np.random.default_rng(seed)
    dtype = dtype or config.compute_dtype
    shapes = abstract_params(transformer.param_table(config))
    around = lambda path: 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
    draw = lambda path, s: (around(path) + 0.3 * rng.normal(size=s.shape)).astype(dtype)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_batch(*, seed=0, dtype=np.float32):
    """Rows of uneven weight, so that no two parts of the batch weigh the same."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
    weight = rng.uniform(0, 2, (ROWS, SEQ)) * (rng.uniform(size=(ROWS, SEQ)) < 0.7)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight.astype(dtype)}


def loss(outputs, batch):
    return jaxpar.losses.softmax_cross_entropy(outputs, batch["targets"], batch["weight"])


def jit(function):
    """Compiled fast, to code that runs once: the same XLA program, without the optimisations of LLVM."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def reference_of(config):
    def mean(params, batch):
        total, weight = loss(transformer.make_model(config).apply(params, batch), batch)
        return total / weight

    return jit(jax.value_and_grad(mean))


def reference(config, params, batch):
    """The loss and gradients of one device."""
    return reference_of(config)(params, batch)


def shardings(config, mesh):
    return shardings_from_dims(transformer.param_table(config), mesh, TRANSFORMER_RULES)
