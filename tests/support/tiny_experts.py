"""Small transformers with experts, shaped like the published ones, and the loss of their outputs."""

import functools

import jax
import numpy as np

import jaxpar
from jaxpar.models import transformer
from tests.support.tiny_transformer import LLAMA, SHAPE, jit, make_batch, make_params

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_dim": 16}
MOE = {
    "mixtral": {},
    "qwen3": {"qk_norm": "head", "experts_per_token": 4, "balance_coefficient": 0.1},
    "olmoe": {"normalized_routing": False, "qk_norm": "width", "balance_coefficient": 0.1, "z_coefficient": 0.01},
    "deepseek": {
        "router_score": "sigmoid",
        "router_bias": True,
        "num_expert_groups": 4,
        "groups_per_token": 2,
        "routed_scaling_factor": 2.5,
        "num_shared_experts": 1,
        "balance_coefficient": 0.1,
    },
    "capacity": {"capacity_factor": 1.0, "z_coefficient": 0.01},
    "gelu": {"mlp": "gelu", "norm": "layer", "positions": "learned", "num_shared_experts": 2},
}


def config_of(name, **changes):
    """The model of a name, in float64."""
    sizes = SHAPE | LLAMA | EXPERTS | {"tied": False, "compute_dtype": "float64"} | MOE[name]
    return transformer.TransformerConfig(**(sizes | changes))


def loss_of(config, *, metrics=False):
    """The cross-entropy, and the losses of the routers."""
    cross_entropy = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["targets"], batch["weight"])
    return transformer.add_routing_losses(config, cross_entropy, metrics=metrics)


def job(config, *, seed=0):
    """Params, with weights of uneven size, and a batch of which some rows count for nothing."""
    params, batch = make_params(config, seed=seed), make_batch(seed=seed, dtype=np.float64)
    batch["weight"][[3, 12]] = 0
    return params, batch


@functools.cache
def _reference_of(config):
    loss, model = loss_of(config), transformer.make_model(config)

    def mean(params, batch):
        total, weight = loss(model.apply(params, batch), batch)
        return total / weight

    return jit(jax.value_and_grad(mean))


def reference(config, params, batch):
    """The loss and gradients of one device."""
    return _reference_of(config)(params, batch)
