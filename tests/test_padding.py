"""Padding has no expert and is in no sum: what a router computes is that of the real tokens alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.huggingface import read_config
from jaxpar.huggingface.config import config_json
from jaxpar.huggingface.families import FAMILIES as OF_TRANSFORMERS
from jaxpar.models import transformer
from jaxpar.models.transformer.experts import experts
from jaxpar.models.transformer.padding import real_tokens
from jaxpar.models.transformer.router import RouterSums, balance_loss, route
from jaxpar.models.transformer.span import Span, runs_in
from jaxpar.shard_map import manual_over_data_and_stage
from jaxpar.sharding import shardings_from_dims
from jaxpar.tensor_parallel import EXPERT_RULES, EXPERTS_OVER_DATA, TRANSFORMER_RULES
from tests.support.oracle import assert_same
from tests.support.tiers import quick
from tests.support.tiny_experts import config_of, job, loss_of
from tests.support.tiny_transformer import EMBED, ROWS, SEQ, VOCAB, jit

RULES = TRANSFORMER_RULES | EXPERT_RULES["experts"]
OVER_DATA = TRANSFORMER_RULES | EXPERTS_OVER_DATA
LEARNED = (8, 4, 2, 1)


# Which tokens are padding.


@pytest.mark.parametrize("learned", ["00110100", "00000000", "00000001"])
def test_a_token_is_real_if_it_or_a_later_one_of_its_document_is_learned(learned):
    segments = jnp.asarray([[0, 0, 0, 0, 1, 1, 1, 2]], jnp.int32)
    weights = np.array([[float(each) for each in learned]], np.float32)
    in_order = jax.jit(lambda segments: real_tokens(weights, Span.packed(segments), (1, SEQ)))
    ends = {"00110100": "11111100", "00000000": "00000000", "00000001": "00000001"}[learned]
    assert "".join(str(int(each)) for each in in_order(segments)[0]) == ends
    order = np.random.default_rng(0).permutation(SEQ)
    positions = np.asarray(Span.packed(segments).positions)[:, order]
    of_span = lambda segments: real_tokens(
        weights[:, order], Span.given(jnp.asarray(positions), segments), (1, SEQ)
    )
    np.testing.assert_array_equal(
        jax.jit(of_span)(segments[:, order]), in_order(segments)[:, order]
    )


def test_a_row_of_weight_0_is_padding_and_a_prompt_is_not():
    batch = {
        "tokens": np.zeros((3, 4), np.int32),
        "targets": np.array([[-100, 5, 5, -100], [5, 5, 5, 5], [-100] * 4], np.int32),
        "weight": np.array([1, 0, 2], np.float32),
    }
    weights = transformer.token_weights(batch)
    np.testing.assert_array_equal(weights, [[0, 1, 1, 0], [0] * 4, [0] * 4])
    real = real_tokens(weights, Span(jnp.arange(4)[None], 4), (3, 4))
    np.testing.assert_array_equal(real, [[1, 1, 1, 0], [0] * 4, [0] * 4])
    assert transformer.token_weights({"tokens": batch["tokens"]}) is None
    assert transformer.token_weights({"targets": np.zeros(3, np.uint8)}) is None


# What routers add up.


def with_padding(batch, lengths):
    """Rows of which the first so many tokens are learned, the rest is padding."""
    is_learned = np.arange(SEQ)[None] < np.asarray(lengths)[:, None]
    return batch | {"targets": np.where(is_learned, batch["targets"], -100).astype(np.int32)}


@pytest.mark.full
@pytest.mark.parametrize("name", ["targets", "labels"])
def test_a_balance_loss_is_that_of_documents_however_few_tokens_are_learned(x64, name):
    """Targets that the loss finds by another name are not known to the model, and weigh no less."""
    config = config_of("olmoe", num_layers=1)
    params, batch = job(config)
    cross_entropy = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch[name])
    run = transformer.add_routing_losses(config, cross_entropy, metrics=True)
    model = transformer.make_model(config)

    @jit
    def means(targets):
        given = {"tokens": batch["tokens"], name: targets}
        _, weight, sums = run(model.apply(params, given), given)
        return {name: value / weight for name, value in sums.items()}

    found = [
        means(np.where(np.arange(SEQ)[None] < SEQ - n, -100, batch["targets"])) for n in LEARNED
    ]
    for each in found:  # the answers are at the end, so all tokens are real
        assert 1 - 1e-9 <= each["balance_loss"] < 8 / 2
        assert_same(each["balance_loss"], found[0]["balance_loss"])
        assert_same(each["expert_imbalance"], found[0]["expert_imbalance"])


def test_a_loss_weighs_the_balance_loss_of_a_row_as_it_weighs_the_row(x64):
    """By rows, or by targets that neither the model nor the weights know."""
    config, (_, batch) = config_of("olmoe", num_layers=1), job(config_of("olmoe"))
    balance = np.random.default_rng(0).uniform(1, 2, (ROWS, 1)) * np.ones(SEQ)
    sums = RouterSums.zeros(config, jnp.zeros((ROWS, SEQ, EMBED)))._replace(
        balance=jnp.asarray(balance)
    )
    outputs = transformer.RoutedLogits(jnp.zeros((ROWS, SEQ, VOCAB)), sums)
    labels = np.where(np.arange(SEQ)[None] < np.arange(ROWS)[:, None] % SEQ, -100, batch["targets"])
    of_rows = lambda logits, batch: (jnp.sum(logits[:, -1, 0]), jnp.float64(len(logits)))
    of_labels = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["labels"])
    of_targets = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])
    learned = (labels != -100).sum(1)
    for loss, name, weights in (
        (of_rows, "targets", np.ones(ROWS)),
        (of_labels, "labels", learned),
        (of_targets, "targets", learned),
    ):
        run = jax.jit(transformer.add_routing_losses(config, loss, metrics=True))
        _, weight, found = run(outputs, {"tokens": batch["tokens"], name: labels})
        assert_same(found["balance_loss"] / weight, np.average(balance[:, 0], weights=weights))


FULL, SLOW = pytest.mark.full, pytest.mark.slow


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("packed", "gradients"),
    [(True, False), *(pytest.param(packed, True, marks=FULL) for packed in (False, True))],
)
def test_padding_changes_no_sum_of_the_router_and_no_gradient(x64, packed, gradients):
    """Documents of 3 and 2 tokens in a row of 8, against the same ones without padding."""
    config = config_of("deepseek", num_layers=1, experts={"num_dense_layers": 0})
    params, batch = job(config)
    loss, model = loss_of(config), transformer.make_model(config)
    lengths = [3, 2] if packed else [5]
    row = {"tokens": batch["tokens"][:1], "targets": batch["targets"][:1], "weight": np.ones(1)}
    segments = np.repeat(np.arange(len(lengths) + 1), [*lengths, SEQ - sum(lengths)])[None].astype(
        np.int32
    )
    row |= {"segments": segments} if packed else {}
    row["tokens"] = np.where(
        np.arange(SEQ)[None] < 5, row["tokens"], 0
    )  # of one token, and so of the same experts
    padded = with_padding(row, [5])
    short = {name: column if name == "weight" else column[:, :5] for name, column in row.items()}

    def sums_and_gradients(batch):
        def mean(params):
            outputs = model.apply(params, batch)
            total, weight = loss(outputs, batch)
            return total / weight, outputs.sums

        return jit(
            jax.value_and_grad(mean, has_aux=True)
            if gradients
            else lambda params: (mean(params), ())
        )(params)

    (value, sums), grads = sums_and_gradients(padded)
    (wanted, wanted_sums), wanted_grads = sums_and_gradients(short)
    np.testing.assert_array_equal(sums.loads, wanted_sums.loads)
    assert sums.loads.sum() == 5 * 2
    assert_same((value, grads), (wanted, wanted_grads))
    assert_same((sums.balance[:, :5], sums.z[:, :5]), (wanted_sums.balance, wanted_sums.z))
    assert not np.any(sums.balance[:, 5:])
    assert not np.any(sums.z[:, 5:])
    np.testing.assert_array_equal(
        transformer.loads_of(transformer.RoutedLogits(None, sums), np.ones(1)), sums.loads[0]
    )


# Room, and meshes.


@pytest.mark.parametrize("exchange", ["all_to_all", pytest.param("gather", marks=pytest.mark.full)])
def test_padding_takes_no_room_of_an_expert_over_data(x64, exchange):
    """Half of each row is padding, all of one token: with its experts a replica would get too many rows."""
    config = config_of("mixtral", num_layers=1, experts={"buffer": 1.0, "exchange": exchange})
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), job(config)[0]["layers"])
    x = np.random.default_rng(0).normal(size=(4, SEQ, EMBED))
    x[:, SEQ // 2 :] = x[0, 0]
    real = np.broadcast_to(np.arange(SEQ) < SEQ // 2, (4, SEQ))
    mesh = jaxpar.make_mesh(data=4, devices=jax.devices()[:4])
    specs = jax.tree.map(lambda leaf: P(), params) | {
        "experts": jax.tree.map(lambda leaf: P("data"), params["experts"])
    }
    layer = lambda params, x, real: experts(
        config, params, x, route(config.experts, params["router"], x, real)
    )[0]
    in_specs = (specs, P("data"), P("data"))
    on_mesh = jit(manual_over_data_and_stage(layer, mesh, in_specs=in_specs, out_specs=P("data")))
    got, full = on_mesh(params, x, real), on_mesh(params, x, np.ones_like(real))
    assert np.isnan(full).any(), "or nothing is shown"
    assert_same(np.asarray(got), np.asarray(jit(layer)(params, x, real)))


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "rules", "axes", "how"),
    [
        ("deepseek", RULES, {"data": 2, "stage": 2, "tensor": 2}, {"schedule": "1f1b"}),
        pytest.param(
            "deepseek",
            OVER_DATA,
            {"data": 2, "stage": 2, "tensor": 2},
            {"schedule": "zb-h1"},
            marks=SLOW,
        ),
        pytest.param("olmoe", OVER_DATA, {"data": 4, "tensor": 2}, {"zero": 2}, marks=SLOW),
        ("qwen3", RULES, {"context": 2, "stage": 2, "tensor": 2}, {"schedule": "1f1b"}),
        pytest.param(
            "qwen3", RULES, {"stage": 2, "tensor": 4}, {"schedule": "interleaved"}, marks=SLOW
        ),
    ],
)
def test_packed_rows_with_padding_have_the_numbers_of_one_device(x64, name, rules, axes, how):
    config = config_of(name)
    params, batch = job(config)
    rng = np.random.default_rng(1)
    ends = rng.integers(0, SEQ + 1, ROWS)
    cuts = np.minimum(ends, 3)[:, None]
    places = np.arange(SEQ)[None]
    segments = (places >= cuts).astype(np.int32) + (places >= ends[:, None])
    batch = with_padding(batch, ends) | {
        "segments": np.asarray(runs_in(jnp.asarray(segments)), np.int32)
    }
    batch["targets"][:, 0] = -100
    loss, model = loss_of(config), transformer.make_model(config)

    def mean(params, batch):
        total, weight = loss(model.apply(params, batch), batch)
        return total / weight

    wanted = jit(jax.value_and_grad(mean))(params, batch)
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: int(np.prod([*axes.values()]))])
    where = shardings_from_dims(transformer.param_table(config), mesh, rules)
    run = jaxpar.value_and_grad(model, loss, mesh, shardings=where, num_microbatches=2, **how)
    got = jit(run)(jaxpar.shard(params, where), jaxpar.shard_batch(batch, mesh))
    assert_same(got, wanted)


# The loss of transformers.


def balance_of_transformers(scores, top_k, mask=None):
    """What ``load_balancing_loss_func`` there computes of the routers' outputs of all layers, ``[layers, tokens, experts]``.

    Written out from its definition: over layers and tokens together, the share of tokens whose n-th expert is e, times the
    mean probability of e, summed over n and e, times the number of experts.
    """
    count = scores.shape[-1]
    flat = scores.reshape(-1, count)
    weights = np.ones(len(flat)) if mask is None else np.tile(mask, len(scores))
    shares = np.exp(flat - flat.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    chosen = np.argsort(-shares, axis=-1, kind="stable")[:, :top_k]
    mean = lambda values: np.einsum("t,t...->...", weights, values) / weights.sum()
    return count * np.sum(mean(np.eye(count)[chosen]) * mean(shares)[None])


FOLDERS = {  # num_hidden_layers, experts, experts of a token, layers with experts
    "mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2}, 4),
    "qwen3_moe": (
        {
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
        },
        3,
    ),
    "olmoe": ({"num_experts": 8, "num_experts_per_tok": 2}, 4),
}


def read_with(folder, kind, **keys):
    sizes = {
        "hidden_size": EMBED,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    sizes |= {"model_type": kind, "vocab_size": VOCAB, "num_hidden_layers": 4, "rms_norm_eps": 1e-5}
    sizes |= {"max_position_embeddings": SEQ, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(sizes | FOLDERS[kind][0] | keys))
    return read_config(folder)


@pytest.mark.parametrize("kind", quick(FOLDERS, "qwen3_moe"))
def test_a_folder_has_the_balance_loss_of_transformers(x64, kind, tmp_path):
    """Theirs is of all layers and documents together, ours the mean over those of each."""
    config = read_with(tmp_path, kind, router_aux_loss_coef=0.02, output_router_logits=True)
    num_layers, top_k = FOLDERS[kind][1], config.experts.per_token
    assert config.num_stacked_layers == num_layers
    scores = np.random.default_rng(0).normal(size=(num_layers, 2, SEQ, 8))
    real = np.arange(SEQ)[None] < np.array([[SEQ], [5]])

    def balance(layer, real):
        """The balance loss of the tokens, of a router that gives each its own scores."""
        x = jnp.asarray(scores[layer])
        routing = route(
            config.experts, {"w_router": jnp.eye(8)}, x, None if real is None else jnp.asarray(real)
        )
        return balance_loss(config.experts, routing)

    ours = jax.jit(
        lambda real: (
            config.experts.balance_coefficient
            * sum(balance(layer, real) for layer in range(num_layers))
        )
    )
    of_all, of_real = ours(None), ours(real)
    for row in range(2):
        of_each = [
            balance_of_transformers(scores[i : i + 1, row], top_k) for i in range(num_layers)
        ]
        assert_same(float(of_all[row, 0]), 0.02 * float(np.mean(of_each)))
        of_each = [
            balance_of_transformers(scores[i : i + 1, row], top_k, real[row])
            for i in range(num_layers)
        ]
        assert_same(float(of_real[row, 0]), 0.02 * float(np.mean(of_each)))


def test_equal_loads_have_the_loss_of_transformers_for_any_number_of_layers():
    scores = np.tile(np.eye(8), (4, 1, 1)) * 1e-9
    assert balance_of_transformers(
        np.zeros((4, 8, 8)) + np.stack([np.roll(scores[0], i, 1) for i in range(4)]), 2
    ) == pytest.approx(2)
    config = config_of("olmoe", experts={"balance_coefficient": 0.1})
    assert config.router_aux_loss_coef * 2 == pytest.approx(0.1 * config.num_layers)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_whose_model_gives_no_router_logits_has_no_balance_loss(kind, tmp_path):
    off = read_with(tmp_path, kind, router_aux_loss_coef=0.02, output_router_logits=False)
    assert off.experts.balance_coefficient == 0
    assert not off.has_routing_losses
    assert off.ignored == {"router_aux_loss_coef": 0.02}
    default = read_with(tmp_path, kind)
    assert default.experts.balance_coefficient == 0, "as by default there"
    assert not default.ignored, "the file has no such key"
    written = config_json(default, "float32")
    assert written["router_aux_loss_coef"] == OF_TRANSFORMERS[kind].defaults["router_aux_loss_coef"]
    written = config_json(off, "float32")
    assert (written["router_aux_loss_coef"], written["output_router_logits"]) == (0.02, False)
    on = read_with(tmp_path, kind, router_aux_loss_coef=0.02, output_router_logits=True)
    written = config_json(
        off.with_experts(balance_coefficient=on.experts.balance_coefficient), "float32"
    )
    assert (written["router_aux_loss_coef"], written["output_router_logits"]) == (0.02, True)


def test_published_coefficients_mean_what_they_mean_in_transformers():
    wanted = {
        "mixtral-8x7b": 0.02 * 2 / 32,
        "qwen3-30b-a3b": 0.001 * 8 / 48,
        "olmoe-1b-7b": 0.01 * 8 / 16,
    }
    assert {
        name: transformer.preset(name).experts.balance_coefficient for name in wanted
    } == pytest.approx(wanted)
