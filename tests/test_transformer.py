"""GPT-2, Llama and BLOOM: their published sizes, their mathematics, their numbers and their traffic on meshes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models import transformer
from jaxpar.models.transformer import layers
from jaxpar.models.transformer.alibi import alibi_slopes
from jaxpar.models.transformer.attention import attend
from jaxpar.models.transformer.rope import frequencies, rotate
from jaxpar.params import abstract_params, count_params, init_params
from tests.support.oracle import assert_same, cast
from tests.support.tiers import quick
from tests.support.tiny import signatures_unchecked
from tests.support.tiny_transformer import (
    EMBED,
    FAMILIES,
    SEQ,
    THREE,
    VOCAB,
    jit,
    make_batch,
    make_params,
    reference,
)

# The mathematics.


# Of the papers' tables and the model cards, to the last parameter as the files of weights on Hugging Face have them. Those of
# models with experts are also what the classes of transformers count (test_huggingface_live.py).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-6.7b": 6_658_404_352,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "olmo2-7b": 7_298_617_344,
    "granite3-2b": 2_533_531_648,
    "granite3-8b": 8_170_848_256,
    "olmoe-1b-7b": 6_919_161_856,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "tinyllama-1.1b": 1_100_048_384,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
}


@pytest.mark.parametrize("name", transformer.PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    table = transformer.param_table(transformer.preset(name))
    count = count_params(table)
    assert count == count_params(abstract_params(table))
    assert count == PUBLISHED.get(name, count)
    assert name in PUBLISHED or count < 1e6, "a preset of no publication is for a laptop"


def numpy_logits(config, params, tokens):
    """The same model in NumPy, a head and a position at a time."""
    outer = params["outer"]

    def norm(p, x):
        if config.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
        return x * p["scale"] + p.get("shift", 0)

    def turned(x, position):
        first, second = np.split(x, 2)
        angle = position * config.rope.theta ** (-2 * np.arange(len(first)) / len(x))
        turn = (first + 1j * second) * np.exp(1j * angle)
        return np.concatenate([turn.real, turn.imag])

    def head(p, x, n):
        group, member = divmod(n, config.group_size)
        indices = (member, config.group_size, config.group_size + 1)
        q, k, v = (
            x @ p["w_qkv"][:, group, i] + (p["b_qkv"][group, i] if config.biases else 0)
            for i in indices
        )
        out = np.zeros_like(v)
        for t in range(len(x)):
            if config.positions == "rope":
                scores = np.array([turned(q[t], t) @ turned(k[s], s) for s in range(t + 1)])
            else:
                scores = k[: t + 1] @ q[t]
            scores = scores * (config.attention_multiplier or config.head_dim**-0.5)
            if config.positions == "alibi":
                scores = scores - 2.0 ** -(8 * (n + 1) / config.num_heads) * (t - np.arange(t + 1))
            weights = np.exp(scores - scores.max())
            out[t] = weights / weights.sum() @ v[: t + 1]
        return out

    def attention(p, x):
        return sum(head(p, x, n) @ p["w_out"][n] for n in range(config.num_heads)) + p.get(
            "b_out", 0
        )

    def mlp(p, x):
        up = np.einsum("td,dgf->gtf", x, p["w_up"]) + (p["b_up"][:, None] if config.biases else 0)
        gelu = lambda a: 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
        hidden = up[0] / (1 + np.exp(-up[0])) * up[1] if config.mlp == "swiglu" else gelu(up[0])
        return hidden @ p["w_down"] + p.get("b_down", 0)

    h = outer["tokens"][tokens] * config.embedding_multiplier
    if config.positions == "learned":
        h = h + outer["positions"][: len(tokens)]
    if config.norm_embedding:
        h = norm(outer["norm_in"], h)
    for i in range(config.num_layers):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        times = config.residual_multiplier
        h = h + times * attention(p["attention"], norm(p["norm_1"], h))
        h = h + times * mlp(p["mlp"], norm(p["norm_2"], h))
    h = norm(outer["norm_out"], h) / config.logits_divisor
    return h @ (outer["tokens"].T if config.tied else outer["head"])


@pytest.mark.parametrize("family", quick(FAMILIES, "gpt2"))
def test_logits_are_those_of_the_model_written_a_head_at_a_time(x64, family):
    config = dataclasses.replace(FAMILIES[family], compute_dtype="float64")
    params, batch = make_params(config), make_batch()
    got = jit(transformer.make_model(config).apply)(params, batch)
    for row in range(2):
        want = numpy_logits(config, params, batch["tokens"][row])
        np.testing.assert_allclose(got[row], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", quick(THREE, "llama"))
def test_attention_in_float32_gives_the_numbers_of_float64(x64, family):
    config, rng = FAMILIES[family], np.random.default_rng(0)
    q = rng.normal(size=(2, SEQ, config.num_heads, config.head_dim))
    k, v = rng.normal(size=(2, 2, SEQ, config.kv_heads, config.head_dim))
    run = jit(lambda *qkv: attend(config, *qkv, jnp.arange(SEQ)[None]))
    wide, narrow = (run(*(a.astype(dtype) for a in (q, k, v))) for dtype in ("float64", "float32"))
    assert_same(narrow, cast(wide, np.float32), within=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("family", THREE)
def test_no_position_sees_those_ahead(family):
    """By gradients: each output depends on each input up to its position, and on none after it."""
    config = FAMILIES[family]
    params = make_params(config)
    model = transformer.make_model(config)

    def outputs(h):
        h, _ = jax.lax.scan(lambda h, p: (model.layer(p, h), None), h[None], params["layers"])
        return model.head(params["outer"], h)[0].sum(-1)

    h = jnp.asarray(np.random.default_rng(0).normal(size=(SEQ, EMBED)), jnp.float32)
    reached = jnp.abs(jit(jax.jacrev(outputs))(h)).sum(-1) > 0
    np.testing.assert_array_equal(reached, np.tri(SEQ, dtype=bool))


def test_rotation_makes_scores_depend_on_distance_alone():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    turns = frequencies(8, transformer.Rope(), 1)
    score = lambda i, j: (
        rotate(jnp.asarray(q), jnp.array([[i]]), turns)
        * rotate(jnp.asarray(k), jnp.array([[j]]), turns)
    ).sum()
    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_slopes_are_the_published_ones():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(
        alibi_slopes(12), [2.0**-i for i in range(1, 9)] + [2.0 ** -(i - 0.5) for i in range(1, 5)]
    )
    assert len(alibi_slopes(112)) == 112


@pytest.mark.full
def test_statistics_are_taken_in_float32_and_gradients_come_in_the_dtype_of_the_params():
    config = FAMILIES["llama"]
    params, batch = make_params(config), make_batch()
    want, want_grads = reference(config, params, batch)
    narrow = dataclasses.replace(config, compute_dtype="bfloat16")
    assert jax.eval_shape(transformer.make_model(narrow).apply, params, batch).dtype == jnp.bfloat16
    got, grads = reference(narrow, params, batch)
    assert_same(got, want, within=2e-2)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    assert_same(grads, want_grads, within=0.1)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_float16_computes_what_float32_does_to_its_precision(family):
    config = FAMILIES[family]
    params, batch = make_params(config), make_batch()
    narrow = dataclasses.replace(config, compute_dtype="float16")
    assert jax.eval_shape(transformer.make_model(narrow).apply, params, batch).dtype == jnp.float16
    got, grads = reference(narrow, params, batch)
    want, want_grads = reference(config, params, batch)
    assert_same(got, want, within=2e-3)
    assert_same(grads, want_grads, within=2e-2)


@pytest.mark.full
def test_float16_has_the_scores_of_a_whole_pass_when_it_generates():
    config = dataclasses.replace(FAMILIES["bloom"], compute_dtype="float16", num_layers=1)
    params, tokens = make_params(config, dtype=np.float32), make_batch()["tokens"][:2, :4]
    drawn = transformer.generate(config, params, tokens, 1)
    scores = jit(transformer.make_model(config).apply)(params, {"tokens": tokens})
    np.testing.assert_array_equal(drawn[:, 4], scores[:, 3].argmax(-1))


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 1, 24])
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_a_token_outside_the_vocabulary_gives_nan_and_no_other_rows_numbers(token, dtype):
    config = dataclasses.replace(FAMILIES["gpt2"], vocab_multiple=24)
    tokens = np.zeros((2, 3), np.int32)
    tokens[1, 2] = token
    outer = make_params(config)["outer"]
    h = jit(transformer.make_model(config).embed)(outer, {"tokens": tokens.astype(dtype)})
    is_nan = np.isnan(h).all(-1)
    np.testing.assert_array_equal(is_nan, [[False, False, False], [False, False, True]])
    assert np.isnan(h).sum() == EMBED


@pytest.mark.full
def test_rows_that_fill_up_the_vocabulary_change_no_number():
    config = dataclasses.replace(FAMILIES["gpt2"], vocab_multiple=24)
    assert transformer.param_table(config)["outer"]["tokens"].shape == (24, EMBED)
    params, batch = make_params(config), make_batch()
    got, grads = reference(config, params, batch)
    fewer = lambda tree: (
        tree | {"outer": tree["outer"] | {"tokens": tree["outer"]["tokens"][:VOCAB]}}
    )
    want, want_grads = reference(FAMILIES["gpt2"], fewer(params), batch)
    np.testing.assert_array_equal(grads["outer"]["tokens"][VOCAB:], 0)
    assert_same(got, want, within=1e-6)
    assert_same(fewer(grads), want_grads, within=1e-4)


@pytest.mark.full
def test_a_new_model_is_as_unsure_as_can_be():
    config = dataclasses.replace(FAMILIES["gpt2"], embed_dim=64)
    params = jit(lambda key: init_params(transformer.param_table(config), key))(jax.random.key(0))
    value, _ = reference(config, params, make_batch())
    np.testing.assert_allclose(value, np.log(VOCAB), rtol=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1; got 0. Choose 1 or more"),
        ({"mlp_dim": -1}, "mlp_dim must be at least 1; got -1"),
        (
            {"num_heads": 5},
            "num_heads must divide embed_dim; got num_heads=5, embed_dim=16. Choose num_heads from 1, 2, 4, 8, 16",
        ),
        (
            {"num_kv_heads": 3},
            "num_kv_heads must divide num_heads; got num_kv_heads=3, num_heads=8. Choose",
        ),
        (
            {"num_heads": 16, "positions": "rope"},
            "rotates pairs, so head_dim must be even; got embed_dim=16, num_heads=16, head_dim=1. Choose .* such as 32",
        ),
        ({"compute_dtype": "int8"}, "compute_dtype must be one of float16, .*; got 'int8'"),
        ({"compute_dtype": "fp16"}, "compute_dtype must be one of float16, .*; got 'fp16'"),
        ({"norm": "batch"}, "norm must be one of 'layer', 'rms'; got 'batch'. Choose one of them"),
        (
            {"attention": "cudnn"},
            'needs a 16-bit compute_dtype; got float32. Use compute_dtype="bfloat16"',
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with signatures_unchecked(), pytest.raises(ValueError, match=message):
        dataclasses.replace(FAMILIES["gpt2"], **changes)


def test_sizes_that_a_refusal_names_fit():
    wrong = {"num_heads": 16, "embed_dim": 48, "positions": "rope"}
    with pytest.raises(ValueError, match=r"such as (\d+)\.") as refused:
        dataclasses.replace(FAMILIES["gpt2"], **wrong)
    named = int(re.search(r"such as (\d+)\.", str(refused.value))[1])
    assert dataclasses.replace(FAMILIES["gpt2"], **wrong | {"embed_dim": named}).head_dim % 2 == 0


def test_an_unknown_preset_is_refused():
    with pytest.raises(
        ValueError, match=r"no transformer of this name; got 'gpt5'. Choose from gpt2, gpt2-medium"
    ):
        transformer.preset("gpt5")
    with pytest.raises(
        ValueError,
        match=r"got 'meta-llama/Llama-3.1-8B'\. Did you mean 'llama3.1-8b'\? Choose from",
    ):
        transformer.preset("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama3-8b-instruct", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("allenai/OLMoE-1B-7B-0924-Instruct", "olmoe-1b-7b"),
        ("gpt2-small", "gpt2"),
        ("gpt3", "gpt3-6.7b"),
    ],
)
def test_a_variant_of_a_preset_on_a_hub_names_the_preset(name, meant):
    with pytest.raises(ValueError, match=rf"got '{name}'\. Did you mean '{meant}'\?"):
        transformer.preset(name)


def test_a_sequence_longer_than_the_table_of_positions_is_refused():
    batch = {"tokens": np.zeros((1, SEQ + 1), np.int32)}
    with pytest.raises(
        ValueError,
        match="longer than a learned table of positions; got a sequence of 9, max_positions=8",
    ):
        transformer.make_model(FAMILIES["gpt2"]).apply(make_params(FAMILIES["gpt2"]), batch)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.full), "float32"])
def test_rows_are_cast_when_they_are_looked_up_and_their_gradients_are_added_in_the_dtype_of_the_table(
    dtype,
):
    table = jax.random.normal(jax.random.key(0), (16, 8))
    rows = jnp.array([[3, 3, 3, 1, 15]])
    plain = lambda table: jnp.take(table, rows, axis=0, mode="fill").astype(dtype)
    own = lambda table: layers._look_up(table, rows, jnp.dtype(dtype))
    assert_same(own(table), plain(table), within=0)
    ct = jax.random.normal(jax.random.key(1), (1, 5, 8), dtype)
    assert_same(jax.vjp(own, table)[1](ct), jax.vjp(plain, table)[1](ct), within=0)
    assert_same(jax.jvp(own, (table,), (table,)), jax.jvp(plain, (table,), (table,)), within=0)
