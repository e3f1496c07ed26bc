"""Small transformers with experts, shaped like the published ones, and the loss of their outputs."""

import functools
from dataclasses import replace

import jax
import numpy as np

import jaxpar
from jaxpar.models import transformer
from jaxpar.models.lora import with_weights
from jaxpar.params import stack_layers
from jaxpar.pipeline import check_permutes
from jaxpar.sharding import shardings_from_dims
from tests.support.oracle import assert_same
from tests.support.tiny_transformer import LLAMA, SHAPE, jit, make_batch, make_params, on_mesh_of

SIGMOID = transformer.Experts(
    count=8,
    mlp_dim=16,
    num_shared=1,
    num_dense_layers=1,
    num_groups=4,
    groups_per_token=2,
    router_score="sigmoid",
    router_bias=True,
    routed_scaling_factor=2.5,
    balance_coefficient=0.1,
)
NOT_NORMALIZED = {"normalized_routing": False, "balance_coefficient": 0.1, "z_coefficient": 0.01}
EXPERTS = transformer.Experts(count=8, mlp_dim=16)
MOE = {
    "mixtral": {"experts": EXPERTS},
    "qwen3": {"experts": replace(EXPERTS, per_token=4, balance_coefficient=0.1), "qk_norm": "head"},
    "olmoe": {"experts": replace(EXPERTS, **NOT_NORMALIZED), "qk_norm": "width"},
    "deepseek": {"experts": SIGMOID, "num_layers": 5},
    "capacity": {"experts": replace(EXPERTS, capacity_factor=1.0, z_coefficient=0.01)},
    "gelu": {
        "experts": replace(EXPERTS, num_shared=2),
        "mlp": "gelu",
        "norm": "layer",
        "positions": "learned",
    },
}


def config_of(name, experts=None, **changes):
    """The model of a name, in float64, with some fields of its experts and some others changed."""
    sizes = SHAPE | LLAMA | {"tied": False, "compute_dtype": "float64"} | MOE[name]
    sizes["experts"] = replace(sizes["experts"], **experts or {})
    return transformer.TransformerConfig(**sizes | changes)


def loss_of(config, *, metrics=False):
    """The cross-entropy, and the losses of the routers."""
    cross_entropy = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(
        logits, batch["targets"], batch["weight"]
    )
    return transformer.add_routing_losses(config, cross_entropy, metrics=metrics)


def job(config, *, seed=0):
    """Params, with weights of uneven size, and a batch of which some rows count for nothing."""
    params, batch = make_params(config, seed=seed), make_batch(seed=seed, dtype=np.float64)
    batch["weight"][[3, 12]] = 0
    return params, batch


def with_random_factors(lora, params, *, seed=5):
    """Params with factors of LoRA that are not zero."""
    rng = np.random.default_rng(seed)
    adapted = jax.eval_shape(lambda: lora.init(jax.random.key(0), params))
    factors = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), adapted)
    return with_weights(factors, params)


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


def placed(config, mesh, rules, params, batch):
    """Params and batch on a mesh, and the shardings of the params."""
    shardings = shardings_from_dims(transformer.param_table(config), mesh, rules)
    return jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh), shardings


def check_step(
    config, mesh, rules, *, seed, masks=None, constrain=None, num_microbatches=2, layers=None, **how
):
    """Holds the loss and gradients of a step on a mesh, with so many layers a virtual stage, against those of one device."""
    config = on_mesh_of(config, mesh)
    params, batch = job(config, seed=seed)
    if layers is None:
        *args, shardings = placed(config, mesh, rules, params, batch)
    else:
        chunks = len(layers) // mesh.shape["stage"]
        layout = jaxpar.LayerLayout(
            config.num_stacked_layers, mesh.shape["stage"], chunks, "loop", layers
        )
        table = transformer.param_table(config)
        table |= {"layers": layout.as_packed(stack_layers(table["layers"], layout.num_positions))}
        shardings = shardings_from_dims(table, mesh, rules)
        args = jaxpar.shard(layout.pack_params(params), shardings), jaxpar.shard_batch(batch, mesh)
        how["layout"] = layout
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(config, **({} if constrain is None else {"constrain": constrain})),
        loss_of(config),
        mesh,
        num_microbatches=num_microbatches,
        shardings=shardings,
        **({} if masks is None else {"mask_idle_ops": masks}),
        **how,
    )
    if how.get("executor") == "mpmd":
        got = value_and_grad(*args)
    else:
        compiled = jit(value_and_grad).lower(*args).compile()
        check_permutes(compiled)
        got = compiled(*args)
    if layers is not None:
        got = got[0], layout.unpack_params(got[1])
    of_one = config.with_experts(split="experts", products="auto", exchange="auto", buffer=None)
    assert_same(got, reference(of_one, params, batch), message=f"seed {seed}")
