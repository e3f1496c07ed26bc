"""Small transformers of three families, their batches and their reference, for tests that share them."""

import dataclasses
import functools

import jax
import numpy as np
import optax
from jax.experimental.custom_partitioning import custom_partitioning

import jaxpar
from jaxpar.models import transformer
from jaxpar.params import abstract_params
from jaxpar.sharding import shardings_from_dims
from jaxpar.tensor_parallel import TRANSFORMER_RULES

VOCAB, SEQ, EMBED, ROWS = 16, 8, 16, 16
SHAPE = {
    "vocab_size": VOCAB,
    "num_layers": 4,
    "embed_dim": EMBED,
    "num_heads": 8,
    "mlp_dim": 24,
    "max_positions": SEQ,
}
LLAMA = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False, "num_kv_heads": 4}
MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_divisor": 2.5,
}
FAMILIES = {
    "gpt2": transformer.TransformerConfig(**SHAPE),
    "gpt2-untied": transformer.TransformerConfig(**SHAPE, tied=False),
    "llama": transformer.TransformerConfig(**SHAPE, **LLAMA, tied=False),
    "llama-tied": transformer.TransformerConfig(**SHAPE, **LLAMA),
    "bloom": transformer.TransformerConfig(**SHAPE, positions="alibi", norm_embedding=True),
    "granite": transformer.TransformerConfig(**SHAPE, **LLAMA, **MULTIPLIED),
}
SWITCHES = {  # of other families of the Llama block
    "llama": {},
    "qwen2": {"biases": "qkv"},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "width", "norm_order": "post", "biases": "attention"},
}
THREE = ("gpt2", "llama", "bloom")


def on_mesh_of(config, mesh):
    """At most two layers where no stages part them: they are written out, and two take half the time to compile."""
    if mesh.shape["stage"] > 1:
        return config
    return dataclasses.replace(
        config, num_layers=min(config.num_layers, config.num_leading_layers + 2)
    )


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


def check_twenty_steps(config, params, rows, losses):
    """Trains on (2, 2, 2) as make.py there does with torch, without losses of routers, and compares the losses."""
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    where = shardings(config, mesh)
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1)
    of_logits = lambda outputs, batch: loss(transformer.logits_of(outputs), batch)
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(config),
        of_logits,
        mesh,
        schedule="zb-h1",
        num_microbatches=2,
        shardings=where,
    )
    state = jaxpar.init_state(lambda _: params, jax.random.key(0), optimizer, mesh, where)
    step, found = jaxpar.make_train_step(value_and_grad, optimizer), []
    for tokens in rows:
        weight = np.ones((len(tokens), tokens.shape[1] - 1), np.float32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight}
        state, metrics = step(state, jaxpar.shard_batch(batch, mesh))
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)
    untrained, weight_sum = of_logits(transformer.make_model(config).apply(params, batch), batch)
    assert abs(found[-1] - untrained / weight_sum) > 1e-3, (
        "a step that changes nothing tests nothing"
    )


def opaque(function):
    """A function that XLA cannot look into and that refuses to be split, as a fused kernel's call on a GPU is."""

    def refuse(*_):
        raise AssertionError("XLA was left to split the kernel")

    hidden = custom_partitioning(function)
    hidden.def_partition(
        partition=refuse,
        infer_sharding_from_operands=refuse,
        sharding_rule="..., ..., ..., ... -> ...",
    )
    return hidden


def fused(q, k, v, bias):
    """Attention whose forward and backward passes are one opaque call each."""
    attend = lambda q, k, v, bias: jax.nn.dot_product_attention(q, k, v, bias, is_causal=True)
    if bias is None:
        attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    kernel = jax.custom_vjp(lambda *args: opaque(attend)(*args))
    backward = lambda args, ct: opaque(lambda ct, *args: jax.vjp(attend, *args)[1](ct))(ct, *args)
    kernel.defvjp(lambda *args: (opaque(attend)(*args), args), backward)
    return kernel(q, k, v) if bias is None else kernel(q, k, v, bias)
