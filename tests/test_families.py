"""Families of the Llama block: the numbers of transformers and torch, texts token for token, and their own switches."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import huggingface
from jaxpar.huggingface import config_keys, families, read_config, read_params, write_model
from jaxpar.huggingface.config import config_json, family_of
from jaxpar.models import transformer
from jaxpar.models.transformer import Rope, RopeScaling
from jaxpar.models.transformer.rope import KINDS, frequencies
from jaxpar.run import language_model
from jaxpar.run.lora_flags import LoraFlags
from tests.support import tiny
from tests.support.model_folders import GOLDEN, all_tensors, copy_with, golden
from tests.support.oracle import assert_same_bits
from tests.support.tiers import quick
from tests.support.tiny_transformer import (
    FAMILIES,
    check_twenty_steps,
    jit,
    make_batch,
    make_params,
)

FIRST = ("gpt2", "llama", "bloom")  # their logits and what is written: test_huggingface.py
NEW = ("llama3.1", "mistral", "qwen2", "qwen3", "olmo2", "smollm2", "granite")
EOS, PAD = 3, 0


# The numbers of transformers.


@pytest.mark.parametrize("name", quick(NEW, "smollm2", "granite"))
def test_logits_equal_those_of_transformers(name):
    config, params, expected = golden(name)
    logits = transformer.make_model(config).apply(params, {"tokens": expected["tokens"]})
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NEW)
def test_what_is_written_is_what_was_read(name, tmp_path):
    config, params, _ = golden(name)
    write_model(tmp_path, config, params)
    assert_same_bits(all_tensors(tmp_path), all_tensors(GOLDEN / name))
    assert read_config(tmp_path) == config
    assert family_of(config) == ("llama" if name in ("llama3.1", "smollm2") else name)
    assert huggingface.stop_tokens(GOLDEN / name) == (EOS,)


@pytest.mark.few(4)
@pytest.mark.full
@pytest.mark.parametrize("name", [*FIRST, *NEW])
def test_texts_of_unequal_prompts_are_those_of_transformers_up_to_the_end(name):
    config, params, expected = golden(name)
    prompts = [[int(token) for token in row if token >= 0] for row in expected["prompts"]]
    num_tokens = expected["continued"].shape[1]
    found = transformer.generate(config, params, prompts, num_tokens, eos=EOS)
    got = [row[len(prompt) :] for prompt, row in zip(prompts, found, strict=True)]
    np.testing.assert_array_equal(
        [np.pad(row, (0, num_tokens - len(row)), constant_values=PAD) for row in got],
        expected["continued"],
    )
    assert all((EOS in row[:-1].tolist()) is False for row in got)


def test_some_of_these_texts_end_early_and_some_do_not():
    ends = [(np.load(GOLDEN / name / "expected.npz")["continued"] == EOS).any(-1) for name in NEW]
    assert 0 < np.mean(ends) < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIRST, *NEW])
def test_twenty_steps_on_a_mesh_have_the_losses_of_torch(name):
    config, params, expected = golden(name)
    check_twenty_steps(config, params, expected["rows"], expected["losses"])


# Positions.

_ROPE = np.load(GOLDEN / "rope.npz")
SCALED = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "dynamic": RopeScaling(kind="dynamic", factor=3.0, original_positions=8),
    "llama3": RopeScaling(kind="llama3", factor=4.0, original_positions=6),
    "yarn": RopeScaling(
        kind="yarn",
        factor=4.0,
        original_positions=64,
        beta_fast=8.0,
        attention_factor=0.1 * np.log(4) + 1,
    ),
    "yarn-scaled": RopeScaling(
        kind="yarn",
        factor=4.0,
        original_positions=8,
        truncate=False,
        attention_factor=(0.07 * np.log(4) + 1) / (0.14 * np.log(4) + 1),
    ),
}


@pytest.mark.parametrize("name", quick(SCALED, "dynamic"))
def test_scaled_positions_have_the_logits_of_transformers(name):
    config = read_config(GOLDEN / "llama")
    config = dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, scaling=SCALED[name])
    )
    params = read_params(GOLDEN / "llama", config)
    logits = transformer.make_model(config).apply(params, {"tokens": _ROPE["tokens"]})
    np.testing.assert_allclose(logits, _ROPE[name], rtol=0, atol=1e-5)


PUBLISHED = {
    "linear": (5e5, RopeScaling(kind="linear", factor=8.0)),
    "dynamic": (5e5, RopeScaling(kind="dynamic", factor=8.0, original_positions=4096)),
    "llama3": (5e5, transformer.PRESETS["llama3.1-8b"].rope.scaling),
    "yarn": (
        1e6,
        RopeScaling(
            kind="yarn", factor=4.0, original_positions=32_768, attention_factor=0.1 * np.log(4) + 1
        ),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_frequencies_of_published_models_are_those_of_transformers(name):
    theta, scaling = PUBLISHED[name]
    *turns, scale = _ROPE[f"turns of {name}"]
    np.testing.assert_allclose(
        frequencies(128, Rope(theta=theta, scaling=scaling), 3 * 4096), turns, rtol=3e-6
    )
    np.testing.assert_allclose(scaling.attention_factor, scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"type": "linear", "factor": 2}, RopeScaling(kind="linear", factor=2.0)),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            RopeScaling(kind="dynamic", factor=2.0, original_positions=8),
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 4},
            RopeScaling(
                kind="yarn", factor=2.0, original_positions=4, attention_factor=0.1 * np.log(2) + 1
            ),
        ),
        ({"rope_type": "default", "partial_rotary_factor": 1.0}, None),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_is_read_as_transformers_4_and_5_write_it_and_comes_back(
    key, rope, scaling, tmp_path
):
    config = read_config(copy_with("qwen2", tmp_path, **{"rope_parameters": None} | {key: rope}))
    assert config.rope.scaling == scaling
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, "float32")))
    assert read_config(tmp_path) == config


def random_scaling(kind, rng):
    fields = {"factor": rng.uniform(1, 40)}
    fields |= {} if kind == "linear" else {"original_positions": int(rng.integers(1, 9000))}
    if kind == "llama3":
        fields |= {"low_freq_factor": rng.uniform(0.1, 2), "high_freq_factor": rng.uniform(2.1, 9)}
    if kind == "yarn":
        fields |= {
            "beta_fast": rng.uniform(8, 40),
            "beta_slow": rng.uniform(0.1, 4),
            "truncate": bool(rng.integers(2)),
        }
        fields |= {"attention_factor": rng.uniform(0.5, 2)}
    return RopeScaling(kind=kind, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_of_every_kind_comes_back_as_it_was_written(kind, tmp_path):
    rng = np.random.default_rng(tiny.fresh_seed())
    for _ in range(20):
        rope = Rope(theta=rng.uniform(2, 1e6), scaling=random_scaling(kind, rng))
        own = {"max_positions": int(rng.integers(1, 9000)), "num_heads": 4, "num_kv_heads": 2}
        config = dataclasses.replace(FAMILIES["llama"], rope=rope, **own)
        (tmp_path / "config.json").write_text(json.dumps(config_json(config, "float32")))
        assert read_config(tmp_path) == config


@pytest.mark.full
def test_original_positions_are_written_where_transformers_reads_them_and_max_positions_beside_them(
    tmp_path,
):
    config, params, expected = golden("llama3.1")
    config = dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, scaling=SCALED["dynamic"]), max_positions=40
    )
    write_model(tmp_path, config, params)
    found = json.loads((tmp_path / "config.json").read_text())
    assert (found["max_position_embeddings"], found["jaxpar_max_positions"]) == (8, 40)
    assert found["rope_scaling"] == {"rope_type": "dynamic", "factor": 3.0}
    back = read_config(tmp_path)
    again = read_params(tmp_path, back)
    tokens = {"tokens": np.tile(expected["tokens"], 2)}
    assert_same_bits(
        transformer.make_model(back).apply(again, tokens),
        transformer.make_model(config).apply(params, tokens),
    )


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "longrope"},
            "rope_parameters must be of a type in default, linear, dynamic, llama3, yarn, with its own",
        ),
        (
            {"rope_type": "linear", "factor": 2, "beta": 1},
            "with its own keys alone; got {'beta': 1, 'factor': 2",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "with its own keys alone; got"),
        ({"full_attention": {}}, "with its own keys alone; got"),
        ({"rope_type": ["yarn"]}, "must be of a type in"),
        ({"rope_type": "linear"}, "factor must be a positive number; got None"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1; got 0.5"),
        (
            {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4},
            "low_freq_factor must be less than high_freq_factor; got 4.0 and 4.0",
        ),
    ],
)
def test_positions_that_are_not_modelled_are_refused(rope, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_config(copy_with("qwen2", tmp_path, rope_parameters=rope))


# Windows.


def test_a_window_reaches_as_many_positions_as_it_says():
    config = dataclasses.replace(FAMILIES["llama"], window=3, num_layers=1)
    params = make_params(config)

    def outputs(h):
        h = transformer.make_model(config).layer(
            jax.tree.map(lambda leaf: leaf[0], params["layers"]), h[None]
        )
        return h[0].sum(-1)

    h = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    reached = jnp.abs(jit(jax.jacrev(outputs))(h)).sum(-1) > 0
    np.testing.assert_array_equal(reached, np.tri(8, dtype=bool) & ~np.tri(8, k=-3, dtype=bool))


@pytest.mark.full
def test_a_window_no_shorter_than_the_sequence_changes_no_bit():
    config, batch = FAMILIES["llama"], make_batch()
    params = make_params(config)
    apply = lambda window: transformer.make_model(dataclasses.replace(config, window=window)).apply(
        params, batch
    )
    assert_same_bits(apply(8), apply(None))
    assert not np.allclose(apply(7), apply(None))


def test_a_kernel_gets_the_window():
    seen = []
    kernel = lambda q, k, v, bias, **options: seen.append(options) or q
    config = dataclasses.replace(
        FAMILIES["llama"], window=3, attention=lambda *a, **o: kernel(*a, **o)
    )
    jax.eval_shape(transformer.make_model(config).apply, make_params(config), make_batch())
    assert seen == [{"window": 3}]
    q = jnp.zeros((1, 4, 2, 2))
    jaxpar.flash_attention(q, q, q, window=3, kernel=kernel)
    assert seen[-1] == {"local_window_size": (2, 0)}


@pytest.mark.parametrize(
    ("name", "changes", "window"),
    [
        ("mistral", {}, 3),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {}, None),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "max_window_layers": 0,
                "layer_types": None,
            },
            5,
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "max_window_layers": 2,
                "layer_types": None,
            },
            None,
        ),
        (
            "qwen3",
            {
                "use_sliding_window": False,
                "sliding_window": 5,
                "max_window_layers": 1,
                "layer_types": None,
            },
            None,
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention"] * 2,
            },
            5,
        ),
    ],
)
def test_windows_are_those_of_all_layers(name, changes, window, tmp_path):
    config = read_config(copy_with(name, tmp_path, **changes))
    assert config.window == window
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, "float32")))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("name", "keys", "kinds"),
    [
        ("qwen3", {}, {"full"}),  # its default is that of the first 28 layers
        ("qwen3_moe", {}, {"sliding"}),
        ("qwen3_moe", {"max_window_layers": 0}, {"sliding"}),
        ("qwen3_moe", {"max_window_layers": 48}, {"full", "sliding"}),
        ("qwen3_moe", {"use_sliding_window": False, "max_window_layers": 48}, {"full"}),
        ("mixtral", {}, {"sliding"}),
        ("mixtral", {"sliding_window": None}, {"full"}),
        ("mixtral", {"layer_types": ["sliding_attention"] * 2}, {"sliding"}),
        ("mixtral", {"layer_types": ["full_attention"] * 2}, {"full", "sliding"}),
    ],
)
def test_a_window_that_versions_of_transformers_give_to_other_layers_is_of_two_kinds(
    name, keys, kinds
):
    given = {"num_hidden_layers": 2, "sliding_window": 5, "use_sliding_window": True} | keys
    found = config_keys.kinds_of_attention(families.FAMILIES[name], given)
    assert found == {f"{kind}_attention" for kind in kinds}


def test_a_window_of_some_layers_is_refused_until_it_is_ignored(tmp_path):
    mixed = {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "layer_types": None,
    }
    folder = copy_with("qwen2", tmp_path, **mixed)
    with pytest.raises(
        ValueError,
        match=r"some of each, by max_window_layers=1, in .*--ignore-config-keys use_sliding_window",
    ):
        read_config(folder)
    config = read_config(folder, ignore=["use_sliding_window"])
    assert config.window is None
    flags = language_model.ModelFlags(init_from=folder), LoraFlags()
    said = language_model.describe(*flags, config, jaxpar.make_mesh(), 0, schedule="1f1b")
    assert "use_sliding_window: where rows are longer than its window, it is another model" in said
    write_model(tmp_path / "new", config, read_params(folder, config))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["use_sliding_window"] is True


# Switches of the configuration.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"explicit_head_dim": 0}, "explicit_head_dim must be at least 1; got 0"),
        ({"window": 0}, "window must be at least 1; got 0"),
        (
            {"kv_copies": 3},
            "kv_copies must divide group_size; got kv_copies=3, group_size=2. Choose kv_copies from 1, 2",
        ),
        (
            {"biases": "heads"},
            "biases must be one of True, False, 'qkv', 'attention', 'mlp'; got 'heads'",
        ),
    ],
)
def test_switches_that_do_not_fit_are_refused(changes, message):
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=message):
        dataclasses.replace(FAMILIES["llama"], **changes)


def test_a_model_of_no_family_is_refused():
    for changes in (
        {"qk_norm": "head", "biases": "qkv"},
        {"norm_order": "post"},
        {"norm_order": "post", "window": 4},
        {"residual_multiplier": 0.5, "qk_norm": "head"},
    ):
        with pytest.raises(ValueError, match="to be read or written; got"):
            family_of(dataclasses.replace(FAMILIES["llama"], **changes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithASwitch(transformer.TransformerConfig):
    switch: float = 1.0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_new_field_is_refused_until_a_family_names_it(name):
    """Else a model would be written as one that lacks the switch."""
    fields = {
        each.name: getattr(FAMILIES[name], each.name) for each in dataclasses.fields(FAMILIES[name])
    }
    assert family_of(WithASwitch(**fields)) == name
    with pytest.raises(ValueError, match=r"got switch=2\.0\. Choose switch=1\.0, or keep it"):
        family_of(WithASwitch(**fields, switch=2.0))
