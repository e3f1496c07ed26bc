"""Experts: what a router chooses, what experts compute, and that their numbers do not depend on the mesh."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.huggingface import read_config, read_params, write_model
from jaxpar.huggingface.config import config_json
from jaxpar.inspect import inspect_step
from jaxpar.models import transformer
from jaxpar.models.lora import Lora
from jaxpar.models.transformer.dispatch import Shards, dropless
from jaxpar.models.transformer.experts import capacity_of, experts
from jaxpar.models.transformer.router import LOAD_SCALE, balance_loss, route
from jaxpar.params import count_params, init_params
from jaxpar.schedule import SCHEDULES
from jaxpar.sharding import shardings_from_dims
from jaxpar.tensor_parallel import EXPERT_RULES, TRANSFORMER_RULES, sequence_parallel
from tests.support import tiny
from tests.support.model_folders import all_tensors, change_config
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.tiers import quick
from tests.support.tiny_experts import MOE, check_step, config_of, job, loss_of, reference
from tests.support.tiny_transformer import EMBED, ROWS, SEQ, jit, make_params

BY = {split: TRANSFORMER_RULES | rules for split, rules in EXPERT_RULES.items()}


def one_layer(config, seed=0):
    """The params of the first layer, and an input."""
    params, _ = job(config, seed=seed)
    x = (
        np.random.default_rng(seed + 1)
        .normal(size=(3, SEQ, config.embed_dim))
        .astype(config.compute_dtype)
    )
    return jax.tree.map(lambda leaf: leaf[0], params["layers"]), jnp.asarray(x)


# The configuration.


ACTIVE = {  # billions of params that a token uses, as published, rounded
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "olmoe-1b-7b": 1.3,
}


CONFIGS = {  # of mistralai/Mixtral-8x7B-v0.1 and 8x22B-v0.1, Qwen/Qwen3-30B-A3B and 235B-A22B, allenai/OLMoE-1B-7B-0924
    "mixtral-8x7b": {
        **{
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
        },
        **{
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
        },
        **{
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
        },
        **{"router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False},
    },
    "mixtral-8x22b": {
        **{
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "hidden_size": 6144,
            "intermediate_size": 16_384,
        },
        **{
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
        },
        **{
            "num_experts_per_tok": 2,
            "max_position_embeddings": 65_536,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
        },
        **{"router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False},
    },
    "qwen3-30b-a3b": {
        **{
            "model_type": "qwen3_moe",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
        },
        **{
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        **{
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
        **{
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        **{"router_aux_loss_coef": 0.001, "attention_bias": False, "use_sliding_window": False},
    },
    "qwen3-235b-a22b": {
        **{
            "model_type": "qwen3_moe",
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
        },
        **{
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        **{
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
        },
        **{
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        **{"router_aux_loss_coef": 0.001, "attention_bias": False, "use_sliding_window": False},
    },
    "olmoe-1b-7b": {
        **{
            "model_type": "olmoe",
            "vocab_size": 50_304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
        },
        **{
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
        },
        **{
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
            "attention_bias": False,
        },
        **{
            "max_position_embeddings": 4096,
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_has_the_settings_of_the_published_config(name):
    found = config_json(transformer.preset(name), "bfloat16")
    assert {key: found[key] for key in CONFIGS[name]} == CONFIGS[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_the_published_number_of_parameters(name):
    assert transformer.num_active_params(transformer.preset(name)) == pytest.approx(
        ACTIVE[name] * 1e9, rel=0.02
    )


def test_a_token_of_a_model_without_experts_uses_all_parameters():
    config = transformer.preset("llama-bytes")
    assert transformer.num_active_params(config) == count_params(transformer.param_table(config))


def test_a_published_model_with_another_attention_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match=r"multi-head latent attention \(MLA\).*; got 'deepseek-v3'. Choose from gpt2,",
    ):
        transformer.preset("deepseek-v3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_token": 9},
            "as many experts as there are; got per_token=9 of 8 experts. Choose per_token from 1 to 8",
        ),
        ({"count": 0}, "count must be at least 1; got 0. Choose 1 or more"),
        ({"num_shared": -1}, "num_shared must be at least 0; got -1"),
        ({"num_dense_layers": -1}, "num_dense_layers must be at least 0; got -1"),
        (
            {"num_dense_layers": 4},
            "some layers must have experts; got num_dense_layers=4, num_layers=4. Choose",
        ),
        ({"num_groups": 3}, "num_groups must divide count; got num_groups=3, count=8"),
        (
            {"num_groups": 2, "groups_per_token": 3},
            "as many groups as there are; got groups_per_token=3",
        ),
        ({"num_groups": 8, "groups_per_token": 1}, "got per_token=4 of 1 experts in 1 groups"),
        ({"router_score": "tanh"}, "router_score must be one of 'softmax', 'sigmoid'; got 'tanh'"),
        ({"split": "mlp"}, "split must be one of 'experts', 'expert_mlp'; got 'mlp'"),
        ({"products": "dense"}, "products must be one of 'auto', 'ragged', 'tiles'; got 'dense'"),
        ({"capacity_factor": 0.0}, "capacity_factor must be positive; got 0. Choose such as 1.25"),
        (
            {"capacity_factor": 1.0, "products": "ragged"},
            "so products has no effect; got capacity_factor=1.0",
        ),
        ({"balance_coefficient": -1.0}, "balance_coefficient must be at least 0; got -1"),
    ],
)
def test_experts_that_do_not_fit_are_refused(changes, message):
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=re.escape(message)):
        config_of("qwen3", changes)


def test_experts_have_no_biases():
    with pytest.raises(
        ValueError,
        match=r"experts have no biases; got 8 experts, biases=True\. Choose biases=False",
    ):
        config_of("qwen3", biases=True)


def test_a_model_without_experts_has_none_to_change():
    config = transformer.preset("llama-bytes")
    with pytest.raises(
        ValueError,
        match=r"buffer=2.0 is for a model with experts; got one without. Give experts=Exp",
    ):
        config.with_experts(buffer=2.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("buffer", "1.5", "buffer must be a number; got '1.5'. Convert it."),
        ("capacity_factor", "1", "capacity_factor must be a number; got '1'"),
        ("count", 8.0, "count must be an integer; got 8.0"),
        ("num_layers", None, "num_layers must be an integer; got None"),
        (
            "experts",
            8,
            "experts must be Experts or None; got 8. Write experts=Experts(count=8), say.",
        ),
        ("rope", 1e4, "rope must be a Rope; got 10000.0. Write rope=Rope(theta=10_000), say."),
    ],
)
def test_a_field_of_another_type_is_refused(name, value, message):
    config = dataclasses.replace(config_of("mixtral"))
    changed = config if name in vars(config) else dataclasses.replace(config.experts)
    object.__setattr__(changed, name, value)  # the tests' own check of types would refuse it first
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        changed.__post_init__()


def test_leading_layers_have_one_mlp_and_count_as_parameters_that_each_token_uses():
    config = config_of("deepseek", experts={"num_dense_layers": 2})
    table, without = (
        transformer.param_table(each)
        for each in (config, config_of("deepseek", experts={"num_dense_layers": 0}))
    )
    assert [each["mlp"]["w_up"].shape for each in table["outer"]["dense_layers"]] == [
        (EMBED, 2, 24)
    ] * 2
    assert table["layers"]["experts"]["w_expert_up"].full_shape == (3, 8, EMBED, 16)
    of_mlp, of_expert, router = (EMBED * 3 * 24, EMBED * 3 * 16, EMBED * 8 + 8)
    assert count_params(without) - count_params(table) == 2 * (9 * of_expert + router - of_mlp)
    active = transformer.num_active_params(config_of("deepseek", experts={"num_dense_layers": 0}))
    assert active - transformer.num_active_params(config) == 2 * (3 * of_expert + router - of_mlp)


def test_documents_of_a_row_do_not_share_the_room_of_an_expert():
    config = config_of("capacity")
    _, batch = job(config)
    with pytest.raises(
        ValueError,
        match=r"got segments in the batch and capacity_factor=1.0. Leave capacity_factor out",
    ):
        transformer.make_model(config).embed(
            {}, batch | {"segments": np.zeros((ROWS, SEQ), np.int32)}
        )


def test_experts_that_the_axis_does_not_divide_are_refused():
    table = transformer.param_table(config_of("mixtral", experts={"count": 6}))
    with pytest.raises(
        ValueError, match="layers/experts/w_expert_down must be divisible by the tensor axis; got 6"
    ):
        shardings_from_dims(
            table, jaxpar.make_mesh(tensor=4, devices=jax.devices()[:4]), TRANSFORMER_RULES
        )


# The router.


def numpy_choice(config, router, x):
    """The experts of a token and their weights, an expert at a time, as the papers have them."""
    own, logits = config.experts, x @ router["w_router"]
    scores = np.exp(logits - logits.max())
    scores = scores / scores.sum() if own.router_score == "softmax" else 1 / (1 + np.exp(-logits))
    appeal = scores + router.get("bias", 0)
    groups = np.array_split(np.arange(own.count), own.num_groups)
    best = 2 if own.router_score == "sigmoid" else 1
    worth = [np.sort(appeal[group])[-best:].sum() for group in groups]
    used = np.argsort([-each for each in worth], kind="stable")[: own.groups_per_token]
    open_to = [e for g in used for e in groups[g]]
    chosen = sorted(open_to, key=lambda e: (-appeal[e], e))[: own.per_token]
    weights = scores[chosen]
    weights = weights / weights.sum() if own.normalized_routing else weights
    return chosen, weights * own.routed_scaling_factor, scores


def numpy_mlp(config, gate, up, down, x):
    if config.mlp == "swiglu":
        hidden = x @ gate
        return (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down
    hidden = x @ up
    return (
        0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    ) @ down


def numpy_experts(config, params, x):
    """The output for each token, an expert at a time; with a capacity the first tokens of a row get the room."""
    capacity, own = capacity_of(config.experts, x.shape[1]), params["experts"]
    y = np.zeros_like(x)
    for row in range(len(x)):
        used = np.zeros(config.experts.count, int)
        for at in range(x.shape[1]):
            chosen, weights, _ = numpy_choice(config, params["router"], x[row, at])
            for e, weight in zip(chosen, weights, strict=True):
                used[e] += 1
                if capacity is None or used[e] <= capacity:
                    gate = own["w_expert_gate"][e] if config.mlp == "swiglu" else None
                    y[row, at] += weight * numpy_mlp(
                        config, gate, own["w_expert_up"][e], own["w_expert_down"][e], x[row, at]
                    )
            if "shared" in params:
                w_up = params["shared"]["w_up"]
                y[row, at] += numpy_mlp(
                    config, w_up[:, 0], w_up[:, -1], params["shared"]["w_down"], x[row, at]
                )
    return y


@pytest.mark.parametrize("name", quick(MOE, "capacity"))
def test_experts_compute_what_a_loop_over_them_computes(x64, name):
    config = config_of(name)
    params, x = one_layer(config)
    got, _ = jit(
        lambda params, x: experts(config, params, x, route(config.experts, params["router"], x))
    )(params, x)
    assert_same(np.asarray(got), numpy_experts(config, params, np.asarray(x)))


def test_of_equal_scores_the_lowest_numbers_are_chosen(x64):
    config = config_of("qwen3")
    params = {"w_router": jnp.zeros((EMBED, 8))}
    routing = route(config.experts, params, jnp.ones((1, 2, EMBED)))
    assert routing.experts.tolist() == [[[0, 1, 2, 3]] * 2]
    assert_same(routing.weights, np.full((1, 2, 4), 0.25))


def test_a_router_computes_in_float32():
    config = config_of("qwen3", compute_dtype="bfloat16")
    params, x = one_layer(config)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params["router"])
    got, want = (
        route(config.experts, params, x),
        route(config.experts, params, x.astype(jnp.float32)),
    )
    assert {each.dtype for each in (got.weights, got.logits, got.scores)} == {
        jnp.dtype(jnp.float32)
    }
    np.testing.assert_array_equal(got.experts, want.experts)
    np.testing.assert_array_equal(got.weights, want.weights)


def test_the_bias_of_a_router_chooses_and_does_not_weigh(x64):
    config = config_of("deepseek", experts={"num_groups": 1, "groups_per_token": 1})
    params, x = one_layer(config)
    router = params["router"] | {"bias": np.where(np.arange(8) == 5, 10.0, 0)}
    routing = route(config.experts, router, x)
    assert (routing.experts == 5).any(-1).all()
    scores = np.take_along_axis(np.asarray(routing.scores), np.asarray(routing.experts), -1)
    assert_same(routing.weights, 2.5 * scores / scores.sum(-1, keepdims=True))


# Room.


@pytest.mark.full
def test_a_row_drops_the_same_tokens_whatever_lies_beside_it(x64):
    config = config_of("capacity")
    params, x = one_layer(config)
    run = jit(lambda x: experts(config, params, x, route(config.experts, params["router"], x)))
    together, dropped = run(x)
    assert dropped.sum() > 0, "or nothing is shown"
    for row in range(len(x)):
        alone, own = run(x[row : row + 1])
        assert_same(np.asarray(alone[0]), np.asarray(together[row]))
        assert own[0] == dropped[row]


@pytest.mark.full
def test_what_an_expert_has_no_room_for_depends_on_no_later_token(x64):
    config = config_of("capacity", experts={"z_coefficient": 0.0})
    params, batch = job(config)
    one = {"tokens": batch["tokens"][:1]}
    logits = lambda batch: transformer.make_model(config).apply(params, batch).logits
    changed = {"tokens": np.where(np.arange(SEQ) == SEQ - 1, 1 - one["tokens"], one["tokens"])}
    np.testing.assert_array_equal(logits(one)[:, :-1], logits(changed)[:, :-1])


@pytest.mark.full
def test_with_room_for_all_nothing_is_dropped(x64):
    config = config_of("capacity", experts={"capacity_factor": 8.0})
    params, batch = job(config)
    got = transformer.make_model(config).apply(params, batch)
    dropless = config.with_experts(capacity_factor=None, z_coefficient=0.0)
    assert_same(got.logits, transformer.make_model(dropless).apply(params, batch))
    assert not got.sums.dropped.any()


# The sums of a router. What other libraries get wrong is named.


def test_the_balance_loss_is_that_of_the_paper(x64):
    config = config_of("deepseek")
    params, x = one_layer(config)
    got = jax.jit(lambda router, x: balance_loss(config.experts, route(config.experts, router, x)))(
        params["router"], x
    )
    for row in range(len(x)):
        uses, shares = np.zeros(8), np.zeros(8)
        for token in np.asarray(x[row]):
            chosen, _, scores = numpy_choice(config, params["router"], token)
            uses[chosen] += 8 / (2 * SEQ)
            shares += scores / scores.sum() / SEQ
        assert_same(got[row], np.full(SEQ, uses @ shares))


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("name", ["olmoe", "deepseek"])
def test_a_document_has_the_loss_of_a_row_of_its_own(x64, name):
    """Packed or not (Megatron-LM's issue 6115)."""
    config = config_of(name)
    params, batch = job(config)
    segments = np.repeat([[0, 1]], [3, 5], axis=1).astype(np.int32)
    one_row = {name: column[:1] for name, column in batch.items()}
    loss, model = loss_of(config), transformer.make_model(config)
    loss_and_weight = jit(lambda batch: loss(model.apply(params, batch), batch))
    packed = loss_and_weight(one_row | {"segments": segments})
    cut = lambda start, end: {name: column[:, start:end] for name, column in one_row.items()}
    alone = [loss_and_weight(part) for part in (cut(0, 3), cut(3, 8))]
    assert_same(packed, tuple(sum(each) for each in zip(*alone, strict=True)))


@pytest.mark.full
def test_the_gradient_of_a_bias_is_the_load_of_each_expert(x64):
    """Padding does not count, neither rows nor the ends of rows (Megatron-LM's issue 6114).

    Nor does what is computed again (torchtitan's 1593): the tests on meshes hold steps with ``remat`` against this.
    """
    config = config_of("deepseek")
    params, batch = job(config)
    sums = jit(transformer.make_model(config).apply)(params, batch).sums
    counts = (batch["weight"] != 0).any(-1)
    want = np.asarray(sums.loads)[counts].sum(0) / batch["weight"].sum()
    _, grads = reference(config, params, batch)
    assert_same(transformer.expert_loads(grads["layers"]["router"]["bias"]), want)
    num_real = np.maximum.accumulate(batch["weight"][:, ::-1] != 0, axis=1).sum()
    np.testing.assert_allclose(want.sum(-1) * batch["weight"].sum(), num_real * 2)


@pytest.mark.full
def test_loads_are_in_no_norm(x64):
    config = config_of("deepseek", num_layers=2, experts={"num_dense_layers": 0})
    params, batch = job(config)
    _, grads = reference(config, params, batch)
    without = jax.tree_util.tree_map_with_path(
        lambda path, g: g * ("bias" not in jax.tree_util.keystr(path)), grads
    )
    norm = jit(optax.tree.norm)
    assert norm(grads) == norm(without)
    assert np.abs(grads["layers"]["router"]["bias"]).max() > LOAD_SCALE * 1e-3


@pytest.mark.full
def test_a_bias_rises_where_the_load_is_below_the_mean(x64):
    config = config_of("deepseek")
    params, batch = job(config)
    _, grads = reference(config, params, batch)
    optimizer = transformer.balance_experts(optax.adamw(1e-2, weight_decay=0.5), rate=0.25)
    updates, _ = jit(lambda grads: optimizer.update(grads, optimizer.init(params), params))(grads)
    loads = np.asarray(grads["layers"]["router"]["bias"])
    assert_same(
        updates["layers"]["router"]["bias"], 0.25 * np.sign(loads.mean(-1, keepdims=True) - loads)
    )
    adamw = optax.adamw(1e-2, weight_decay=0.5)
    others = jit(lambda grads: adamw.update(grads, adamw.init(params), params))(grads)[0]
    assert_same(updates["layers"]["experts"], others["layers"]["experts"])
    with pytest.raises(ValueError, match=r"rate of the biases must be 0 or more; got -1"):
        transformer.balance_experts(adamw, rate=-1.0)


@pytest.mark.full
def test_metrics_of_routers_are_means_over_the_weight():
    with jax.enable_x64(True):
        config = config_of("capacity", experts={"balance_coefficient": 0.1})
        params, batch = job(config)
        total, weight, sums = loss_of(config, metrics=True)(
            transformer.make_model(config).apply(params, batch), batch
        )
        assert_same(
            (total, weight),
            loss_of(config)(transformer.make_model(config).apply(params, batch), batch),
        )
        means = {name: float(value / weight) for name, value in sums.items()}
    assert means.keys() == {"balance_loss", "router_z_loss", "expert_imbalance", "dropped_experts"}
    assert 0 < means["dropped_experts"] < 1 <= means["expert_imbalance"] <= 8
    assert means["balance_loss"] > 1 - 1e-6


def test_a_model_without_losses_of_its_routers_has_logits_alone():
    config = config_of("mixtral", compute_dtype="float32")
    loss = lambda outputs, batch: (outputs.sum(), batch["weight"].sum())
    assert transformer.add_routing_losses(config, loss)(np.ones(3), {"weight": np.ones(2)}) == (
        3,
        2,
    )


# Meshes.


def mesh_of(data, stage, tensor):
    return jaxpar.make_mesh(
        data=data, stage=stage, tensor=tensor, devices=jax.devices()[: data * stage * tensor]
    )


GELU = {"mlp": "gelu", "experts": {"num_shared": 2}}


def check_parity(name, split, mesh_sizes, *, schedule="zb-h1", **how):
    changes = dict(how.pop("changes", {}))
    experts = {"split": split} | changes.pop("experts", {})
    config = config_of(name, experts, **changes)
    check_step(
        config, mesh_of(*mesh_sizes), BY[split], seed=tiny.fresh_seed(), schedule=schedule, **how
    )


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "split", "mesh_sizes", "how"),
    [
        (
            "deepseek",
            "expert_mlp",
            (2, 2, 2),
            {"schedule": "1f1b", "zero": 3, "layers": (1, 3), "remat": True},
        ),
        ("capacity", "experts", (1, 2, 2), {"schedule": "1f1b", "changes": GELU}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("deepseek", "experts", (1, 2, 2), {"executor": "mpmd", "schedule": "1f1b"}),
                ("mixtral", "experts", (2, 2, 2), {"schedule": "1f1b"}),
                (
                    "olmoe",
                    "experts",
                    (1, 2, 4),
                    {"schedule": "1f1b", "constrain": sequence_parallel},
                ),
                (
                    "qwen3",
                    "experts",
                    (1, 2, 4),
                    {"schedule": "1f1b", "zero": 1, "constrain": sequence_parallel},
                ),
                ("olmoe", "expert_mlp", (1, 2, 4), {"schedule": "zb-v"}),
                ("capacity", "experts", (2, 2, 2), {"schedule": "1f1b", "masks": True, "zero": 2}),
                ("gelu", "experts", (8, 1, 1), {"remat": True}),
                (
                    *("deepseek", "experts", (2, 2, 2)),
                    {"schedule": "interleaved", "masks": True, "remat": True, "zero": 1},
                ),
            ]
        ),
    ],
)
def test_loss_gradients_and_loads_equal_one_device(x64, name, split, mesh_sizes, how):
    check_parity(name, split, mesh_sizes, **how)


MESHES = [(8, 1, 1), (1, 1, 8), (2, 4, 1), (1, 4, 2), (4, 1, 2), (2, 1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_sizes", "name", "split"),
    [
        *zip(MESHES, MOE, ["experts", "expert_mlp"] * 3, strict=True),
        *zip(MESHES, reversed(MOE), ["expert_mlp", "experts"] * 3, strict=True),
    ],
)
def test_loss_gradients_and_loads_equal_one_device_on_every_mesh(x64, name, mesh_sizes, split):
    check_parity(name, split, mesh_sizes, changes={"num_kv_heads": 8} if mesh_sizes[2] == 8 else {})


LEADING = [  # on one stage alone; beside parts of sequences; two of them; documents in rows
    {"schedule": "1f1b", "masks": True, "layers": (1, 3)},
    {
        "schedule": "zb-h1",
        "masks": True,
        "layers": (1, 3),
        "remat": True,
        "constrain": sequence_parallel,
        "tensor": 4,
    },
    {
        "schedule": "zb-v",
        "masks": True,
        "experts": {"num_dense_layers": 2},
        "num_layers": 6,
        "zero": 3,
    },
    {
        "schedule": "interleaved",
        "layers": (0, 2, 1, 1),
        "experts": {"num_dense_layers": 2},
        "num_layers": 6,
        "zero": 2,
    },
    {"schedule": "gpipe", "masks": True, "layers": (1, 3)},
]


@pytest.mark.slow
@pytest.mark.parametrize("how", LEADING, ids=[how["schedule"] for how in LEADING])
def test_leading_dense_layers_are_those_of_one_device_wherever_the_others_are(x64, how):
    tensor, counts, how = how.get("tensor", 2), how.get("layers"), dict(how)
    changes = {key: how.pop(key) for key in ("experts", "num_layers") if key in how}
    how.pop("tensor", None)
    mesh, config = (
        jaxpar.make_mesh(data=4 // tensor, stage=2, tensor=tensor),
        config_of("deepseek", **changes),
    )
    check_step(
        config,
        mesh,
        BY["experts"],
        seed=tiny.fresh_seed(),
        **how | ({"layers": counts} if counts else {}),
    )


@pytest.mark.slow
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("at", range(len(SCHEDULES)), ids=SCHEDULES)
def test_loss_gradients_and_loads_equal_one_device_in_every_schedule(x64, at, masks):
    """With each level of ZeRO, with recomputation and without it, and both splits."""
    name = ["deepseek", "olmoe", "capacity", "mixtral", "qwen3"][at % 5]
    how = {"zero": (at + 2 * masks) % 4, "remat": (at + masks) % 2 == 1}
    check_parity(name, [*BY][masks], (2, 2, 2), schedule=SCHEDULES[at], masks=masks, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "mesh_sizes", "how"),
    [
        ("capacity", "expert_mlp", (2, 2, 2), {"schedule": "interleaved"}),
        ("deepseek", "experts", (1, 2, 2), {"schedule": "zb-h1"}),
        ("olmoe", "experts", (1, 4, 2), {"schedule": "1f1b", "remat": True}),
        ("gelu", "experts", (4, 2, 1), {"schedule": "gpipe"}),
    ],
)
def test_loss_gradients_and_loads_of_the_mpmd_executor_equal_one_device(
    x64, name, split, mesh_sizes, how
):
    check_parity(name, split, mesh_sizes, executor="mpmd", **how)


@pytest.mark.full
@pytest.mark.parametrize("split", [pytest.param("experts", marks=pytest.mark.slow), "expert_mlp"])
def test_experts_cost_two_all_reduces_of_an_activation_a_layer_as_an_mlp_does(x64, split):
    """And in the backward pass one of the routing weights, which is joined with that of the activation."""
    config, mesh = (
        config_of("deepseek", experts={"split": split}),
        jaxpar.make_mesh(data=2, tensor=4),
    )
    params, batch = job(config)
    shardings = shardings_from_dims(transformer.param_table(config), mesh, BY[split])
    run = jaxpar.value_and_grad(
        transformer.make_model(config),
        loss_of(config),
        mesh,
        num_microbatches=2,
        shardings=shardings,
    )
    report = inspect_step(
        jit(run), jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh)
    )
    per_layer = [
        each
        for each in report.select(None, "tensor")
        if (each.times or 0) >= 2 * config.num_stacked_layers
    ]
    activation = ROWS // 4 * SEQ * EMBED * 8
    weights = ROWS // 4 * SEQ * config.experts.per_token * 8
    of_attention = 2
    assert {each.kind for each in per_layer} == {"all-reduce"}, report.render()
    sizes = sorted(each.payload_bytes for each in per_layer)
    assert sizes == [activation] * (of_attention + 1) + [activation + weights], report.render()
    others = [
        e.payload_bytes
        for e in report.select(None, "tensor")
        if e.times == 2 and len(e.shapes[0].dims) == 3
    ]
    assert others == [activation] * (2 + 2 * of_attention), (
        "the look-up, the head, and two and two of the leading dense layer"
    )


# Products.


@pytest.mark.full
@pytest.mark.parametrize(
    ("split", "mesh_sizes"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("experts", (1, 2, 2)),
                ("experts", (1, 1, 1)),
                ("experts", (1, 1, 2)),
                ("expert_mlp", (1, 2, 2)),
            ]
        ),
    ],
)
def test_the_kernel_has_the_numbers_of_ragged_products_on_a_mesh(x64, split, mesh_sizes):
    """In the fast tier experts whose hidden width is cut have it in test_experts_over_data.py."""
    config = config_of("mixtral", experts={"split": split, "products": "tiles"})
    check_step(
        config,
        mesh_of(*mesh_sizes),
        BY[split],
        seed=tiny.fresh_seed(),
        num_microbatches=1,
        schedule="1f1b",
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh_sizes", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 1, 2)])
def test_a_function_can_take_the_place_of_the_products(x64, mesh_sizes):
    calls = []

    def products(rows, weights, sizes):
        calls.append((rows.shape, weights.shape))
        return jax.lax.ragged_dot(rows, weights, sizes)

    config = config_of("mixtral", experts={"products": products})
    params, batch = job(config)
    mesh = mesh_of(*mesh_sizes)
    shardings = shardings_from_dims(transformer.param_table(config), mesh, BY["experts"])
    run = jaxpar.value_and_grad(
        transformer.make_model(config), loss_of(config), mesh, shardings=shardings
    )
    got = jit(run)(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))
    assert_same(got, reference(config_of("mixtral"), params, batch))
    assert {weights[0] for _, weights in calls} >= {8 // mesh_sizes[2]}, (
        "each device has its own experts"
    )


@pytest.mark.parametrize("chosen", [[3, 0, 3, 60, 5, 5, 5, 9], [7, 6, 5, 4, 3, 2, 1, 0], [2] * 8])
def test_a_few_pairs_have_no_more_slots_than_the_tiles_of_their_experts(chosen):
    shards = Shards(axes=(), size=1, count=1, by_expert=True, owners=1)
    slots = jax.jit(lambda a: dropless(a, 64, shards, tile=4, room=8))(jnp.array(chosen))
    pair, slot, sizes = (np.asarray(each[0]) for each in slots)
    assert len(pair) == 8 * 4, "not 4 for each of 64 experts"
    np.testing.assert_array_equal(pair[slot], np.arange(8))
    owner = np.repeat(np.arange(64), sizes)
    np.testing.assert_array_equal(owner[slot], chosen)
    assert (pair == 8).sum() == len(pair) - 8


# Beside others.


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek", "capacity"])
def test_generated_tokens_are_those_of_full_passes_that_drop_nothing(name):
    config = config_of(name, compute_dtype="float32", max_positions=16)
    params, batch = job(config)
    prompt = batch["tokens"][:2, :4]
    got = np.asarray(transformer.generate(config, params, prompt, 6))
    model = transformer.make_model(config.with_experts(capacity_factor=None))
    logits = jit(lambda tokens: transformer.logits_of(model.apply(params, {"tokens": tokens})))(got)
    np.testing.assert_array_equal(got[:, :4], prompt)
    np.testing.assert_array_equal(got[:, 4:], np.argmax(logits, -1)[:, 3:-1])


def test_factors_for_experts_are_refused(x64):
    config = config_of("mixtral")
    params, batch = job(config)
    adapted = Lora(2, {"w_expert_up": 1}).init(jax.random.key(0), params)
    with pytest.raises(
        ValueError,
        match=r"take no factors of LoRA; got some for w_expert_up. Take the weights of attention",
    ):
        jax.eval_shape(transformer.make_model(config).apply, adapted, batch)


@pytest.mark.full
def test_a_new_model_balances_its_experts():
    config = transformer.preset("moe-bytes", num_layers=1)
    params = jit(lambda key: init_params(transformer.param_table(config), key))(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, (4, 64)).astype(np.int32)
    sums = jit(transformer.make_model(config).apply)(params, {"tokens": tokens}).sums
    assert sums.balance.max() < 1.2
    assert sums.loads.shape == (4, 1, 8)
    assert sums.loads.sum() == 4 * 64 * 2


# Folders of Hugging Face.


FOLDERS = {  # models as their families have them, and the names of a router and of an expert's weights
    "mixtral": (
        {"experts": {"mlp_dim": None}, "mlp_dim": 16},
        "block_sparse_moe",
        ("w1", "w3", "w2"),
    ),
    "qwen3": (
        {
            "experts": {"normalized_routing": True, "num_dense_layers": 1},
            "explicit_head_dim": 4,
            "num_layers": 5,
        },
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "olmoe": (
        {"experts": {"mlp_dim": None, "z_coefficient": 0.0}, "mlp_dim": 16},
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


def folder_of(name, tmp_path):
    """A model, its params, and a folder with them."""
    config = config_of(
        name, **{"compute_dtype": jnp.float32, "norm_epsilon": 1e-6} | FOLDERS[name][0]
    )
    params = make_params(config, dtype=np.float32)
    write_model(tmp_path / name, config, params)
    return config, params, tmp_path / name


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_a_tensor_for_each_weight_of_each_expert(name, tmp_path):
    config, params, folder = folder_of(name, tmp_path)
    tensors, (_, block, names) = all_tensors(folder), FOLDERS[name]
    of_layer = lambda i, *path: functools.reduce(
        lambda tree, key: tree[key], path, params["layers"]
    )[i]
    for i, layer in enumerate(params["outer"].get("dense_layers", ())):
        for key, weight in zip(
            names, (*np.moveaxis(layer["mlp"]["w_up"], 1, 0), layer["mlp"]["w_down"]), strict=True
        ):
            np.testing.assert_array_equal(
                tensors.pop(f"model.layers.{i}.mlp.{key}.weight"), weight.T
            )
        assert_same_bits(
            tensors[f"model.layers.{i}.input_layernorm.weight"], layer["norm_1"]["scale"]
        )
    for i in range(config.num_stacked_layers):
        name = f"model.layers.{config.num_leading_layers + i}.{block}"
        gate = tensors.pop(f"{name}.gate.weight")
        np.testing.assert_array_equal(gate, of_layer(i, "router", "w_router").T)
        for e in range(8):
            for key, weight in zip(
                names, ("w_expert_gate", "w_expert_up", "w_expert_down"), strict=True
            ):
                tensor = tensors.pop(f"{name}.experts.{e}.{key}.weight")
                np.testing.assert_array_equal(tensor, of_layer(i, "experts", weight)[e].T)
    assert not [left for left in tensors if "expert" in left or "mlp" in left or "moe" in left]


@pytest.mark.parametrize("name", quick(FOLDERS, "olmoe"))
def test_a_folder_is_read_as_it_was_written(name, tmp_path):
    config, params, folder = folder_of(name, tmp_path)
    got = read_config(folder)
    assert got == config
    assert_same_bits(read_params(folder, got), params)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    where = shardings_from_dims(transformer.param_table(got), mesh, BY["experts"])
    on_mesh = read_params(folder, got, where)
    assert jax.tree.map(lambda leaf: leaf.sharding, on_mesh) == where
    write_model(folder.parent / "again", got, on_mesh)
    assert_same_bits(all_tensors(folder.parent / "again"), all_tensors(folder))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen3",
            {"decoder_sparse_step": 2},
            "decoder_sparse_step of qwen3_moe must be 1; got 2",
        ),
        (
            "qwen3",
            {"mlp_only_layers": [0, 2]},
            r"must be the first ones, .*; got mlp_only_layers=\[0, 2\] for 5 layers",
        ),
        (
            "qwen3",
            {"mlp_only_layers": [*range(5)]},
            r"some must have experts; got mlp_only_layers=\[0, 1, 2, 3, 4\]",
        ),
        ("qwen3", {"mlp_only_layers": "0"}, r"got mlp_only_layers='0' for 5 layers"),
        ("mixtral", {"mlp_only_layers": [0]}, r"got mlp_only_layers=\[0\]"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise of mixtral must be"),
        ("olmoe", {"clip_qkv": 8.0}, "got clip_qkv=8.0"),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "as many experts as there are; got per_token=9 of 8",
        ),
        (
            "mixtral",
            {"router_aux_loss_coef": -1},
            "router_aux_loss_coef must be a number of 0 or more; got -1",
        ),
        (
            "mixtral",
            {"model_type": "deepseek_v3"},
            r"got 'deepseek_v3' in .*not supported: .* \(MLA\)",
        ),
    ],
)
def test_folders_of_other_experts_are_refused(name, changes, message, tmp_path):
    _, _, folder = folder_of(name, tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        read_config(folder)


def test_a_folder_that_claims_more_experts_than_it_has_tensors_is_refused(tmp_path):
    _, _, folder = folder_of("mixtral", tmp_path)
    change_config(folder, num_local_experts=2**20)
    with pytest.raises(
        ValueError, match=r"each expert of a model must have tensors; got num_experts=1048576"
    ):
        read_params(folder, read_config(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"router_score": "sigmoid"},
        {"num_shared": 1},
        {"router_bias": True},
        {"num_dense_layers": 1},
    ],
)
def test_experts_that_no_family_has_are_not_written(changes, tmp_path):
    config = config_of("mixtral", **FOLDERS["mixtral"][0]).with_experts(**changes)
    (name,) = changes
    with pytest.raises(
        ValueError, match=f"must be like mixtral to be read or written; got experts.{name}="
    ):
        write_model(tmp_path / "model", config, make_params(config, dtype=np.float32))
