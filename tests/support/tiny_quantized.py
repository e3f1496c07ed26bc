"""A small Llama whose weights have whole blocks of 64 on each device of two, and its params in codes."""

import dataclasses

import jax
import numpy as np

import jaxpar
from jaxpar.models import lora, transformer
from jaxpar.models.quantized import dense, is_quantized
from jaxpar.tensor_parallel import split_copied_heads
from jaxpar.trainable import trained_part, update_trained
from tests.support import tiny_transformer as tiny
from tests.support.tiny_lora import LORA, make_params

SHAPE = {"embed_dim": 64, "explicit_head_dim": 16, "mlp_dim": 128}
CONFIG = dataclasses.replace(tiny.FAMILIES["llama"], **SHAPE)
CONFIG64 = dataclasses.replace(CONFIG, compute_dtype="float64")


def quantized_params(config, kind, how=LORA):
    """Params on the host, with factors that are not zero and weights in codes."""
    return jax.tree.map(np.asarray, lora.quantize(make_params(config, how), kind))


def dense_params(params, dtype):
    """The same params, with the values of codes in their places."""
    change = lambda node: np.asarray(dense(node), dtype) if is_quantized(node) else node
    return jax.tree.map(change, params, is_leaf=is_quantized)


def on_mesh(config, params, mesh, how=LORA):
    """The params on a mesh, and their shardings."""
    shardings = lora.quantized_shardings(params, how.shardings(tiny.shardings(config, mesh)))
    return jaxpar.shard(params, shardings), shardings


def make_value_and_grad(config, mesh, shardings, **settings):
    constrain = split_copied_heads
    model = transformer.make_model(config, constrain=constrain)
    settings = {
        "num_microbatches": 2,
        "trainable": lora.ADAPTERS,
        "shardings": shardings,
    } | settings
    return jaxpar.value_and_grad(model, tiny.loss, mesh, **settings)


def reference(config, params, batch):
    """The loss of one device, and the gradients of the factors beside weights that are not in codes."""
    factors = trained_part(params, lora.ADAPTERS)

    def mean(factors):
        model = transformer.make_model(config)
        total, weight = tiny.loss(model.apply(update_trained(params, factors), batch), batch)
        return total / weight

    return tiny.jit(jax.value_and_grad(mean))(factors)
