"""Families of the Llama block: the numbers of transformers and torch, texts token for token, and their own switches."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from oracle import assert_same, assert_same_bits
from safetensors.numpy import load_file
from tiny_transformer import EMBED, FAMILIES, jit, loss, make_batch, make_params, reference, shardings

import jaxpar
from jaxpar import huggingface
from jaxpar.huggingface import read_config, read_params, write_model
from jaxpar.huggingface.config import config_json, family_of
from jaxpar.inspect import inspect_step
from jaxpar.models import transformer
from jaxpar.models.transformer import RopeScaling
from jaxpar.models.transformer.rope import frequencies
from jaxpar.pipeline import LayerLayout
from jaxpar.tensor_parallel import sequence_parallel, split_copied_heads

GOLDEN = Path(__file__).parent / "data" / "huggingface"  # made by make.py there, with transformers and torch
FIRST = ("gpt2", "llama", "bloom")  # their logits and what is written: test_huggingface.py
NEW = ("llama3.1", "mistral", "qwen2", "qwen3", "olmo2", "smollm2")
EOS, PAD = 3, 0
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # of a GPT-2 by default


def golden(name):
    config = read_config(GOLDEN / name, ignore=DROPOUTS)
    return config, read_params(GOLDEN / name, config), np.load(GOLDEN / name / "expected.npz")


def all_tensors(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def copy_with(name, tmp_path, **changes):
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# The numbers of transformers.


@pytest.mark.parametrize("name", NEW)
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


@pytest.mark.parametrize("name", [*FIRST, *NEW])
def test_texts_of_unequal_prompts_are_those_of_transformers_up_to_the_end(name):
    config, params, expected = golden(name)
    prompts = [[int(token) for token in row if token >= 0] for row in expected["prompts"]]
    num_tokens = expected["continued"].shape[1]
    found = transformer.generate(config, params, prompts, num_tokens, eos=EOS)
    got = [row[len(prompt) :] for prompt, row in zip(prompts, found, strict=True)]
    np.testing.assert_array_equal(
        [np.pad(row, (0, num_tokens - len(row)), constant_values=PAD) for row in got], expected["continued"]
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


def check_twenty_steps(config, params, rows, losses):
    """Trains on (2, 2, 2) as make.py there does with torch, and compares the losses."""
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    where = shardings(config, mesh)
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1)
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(config), loss, mesh, schedule="zb-h1", num_microbatches=2, shardings=where
    )
    state = jaxpar.init_state(lambda _: params, jax.random.key(0), optimizer, mesh, where)
    step, found = jaxpar.make_train_step(value_and_grad, optimizer), []
    for tokens in rows:
        weight = np.ones((len(tokens), tokens.shape[1] - 1), np.float32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight}
        state, metrics = step(state, jaxpar.shard_batch(batch, mesh))
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)
    untrained, weight_sum = loss(transformer.make_model(config).apply(params, batch), batch)
    assert abs(found[-1] - untrained / weight_sum) > 1e-3, "a step that changes nothing tests nothing"


# Positions.

_ROPE = np.load(GOLDEN / "rope.npz")
SCALED = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "dynamic": RopeScaling(kind="dynamic", factor=3.0, original_positions=8),
    "llama3": RopeScaling(kind="llama3", factor=4.0, original_positions=6),
    "yarn": RopeScaling(
        kind="yarn", factor=4.0, original_positions=64, beta_fast=8.0, attention_factor=0.1 * np.log(4) + 1
    ),
    "yarn-scaled": RopeScaling(
        kind="yarn",
        factor=4.0,
        original_positions=8,
        truncate=False,
        attention_factor=(0.07 * np.log(4) + 1) / (0.14 * np.log(4) + 1),
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_positions_have_the_logits_of_transformers(name):
    config = dataclasses.replace(read_config(GOLDEN / "llama"), rope_scaling=SCALED[name])
    params = read_params(GOLDEN / "llama", config)
    logits = transformer.make_model(config).apply(params, {"tokens": _ROPE["tokens"]})
    np.testing.assert_allclose(logits, _ROPE[name], rtol=0, atol=1e-5)


PUBLISHED = {
    "linear": (5e5, RopeScaling(kind="linear", factor=8.0)),
    "dynamic": (5e5, RopeScaling(kind="dynamic", factor=8.0, original_positions=4096)),
    "llama3": (5e5, transformer.PRESETS["llama3.1-8b"].rope_scaling),
    "yarn": (
        1e6,
        RopeScaling(kind="yarn", factor=4.0, original_positions=32_768, attention_factor=0.1 * np.log(4) + 1),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_frequencies_of_published_models_are_those_of_transformers(name):
    theta, scaling = PUBLISHED[name]
    *turns, scale = _ROPE[f"turns of {name}"]
    np.testing.assert_allclose(frequencies(128, theta, scaling, 3 * 4096), turns, rtol=3e-6)
    np.testing.assert_allclose(scaling.attention_factor, scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"type": "linear", "factor": 2}, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, RopeScaling(kind="dynamic", factor=2.0, original_positions=8)),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 4},
            RopeScaling(kind="yarn", factor=2.0, original_positions=4, attention_factor=0.1 * np.log(2) + 1),
        ),
        ({"rope_type": "default", "partial_rotary_factor": 1.0}, None),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_is_read_as_transformers_4_and_5_write_it_and_comes_back(key, rope, scaling, tmp_path):
    config = read_config(copy_with("qwen2", tmp_path, **{"rope_parameters": None} | {key: rope}))
    assert config.rope_scaling == scaling
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, "float32")))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "longrope"},
            "rope_parameters must be of a type in default, linear, dynamic, llama3, yarn, with its own",
        ),
        ({"rope_type": "linear", "factor": 2, "beta": 1}, "with its own keys alone; got {'beta': 1, 'factor': 2"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "with its own keys alone; got"),
        ({"full_attention": {}}, "with its own keys alone; got"),
        ({"rope_type": ["yarn"]}, "must be of a type in"),
        ({"rope_type": "linear"}, "factor must be a positive number; got None"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be 1 or more; got 0.5"),
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
        h = transformer.make_model(config).layer(jax.tree.map(lambda leaf: leaf[0], params["layers"]), h[None])
        return h[0].sum(-1)

    h = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    reached = jnp.abs(jit(jax.jacrev(outputs))(h)).sum(-1) > 0
    np.testing.assert_array_equal(reached, np.tri(8, dtype=bool) & ~np.tri(8, k=-3, dtype=bool))


def test_a_window_no_shorter_than_the_sequence_changes_no_bit():
    config, batch = FAMILIES["llama"], make_batch()
    params = make_params(config)
    apply = lambda window: transformer.make_model(dataclasses.replace(config, window=window)).apply(params, batch)
    assert_same_bits(apply(8), apply(None))
    assert not np.allclose(apply(7), apply(None))


def test_a_kernel_gets_the_window():
    seen = []
    kernel = lambda q, k, v, bias, **options: seen.append(options) or q
    config = dataclasses.replace(FAMILIES["llama"], window=3, attention=lambda *a, **o: kernel(*a, **o))
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
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "layer_types": None}, 5),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "layer_types": None}, None),
        (
            "qwen3",
            {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
            None,
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, 5),
    ],
)
def test_windows_are_those_of_all_layers(name, changes, window, tmp_path):
    config = read_config(copy_with(name, tmp_path, **changes))
    assert config.window == window
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, "float32")))
    assert read_config(tmp_path) == config


def test_a_window_of_some_layers_is_refused_until_it_is_ignored(tmp_path):
    mixed = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None}
    folder = copy_with("qwen2", tmp_path, **mixed)
    with pytest.raises(ValueError, match=r"got use_sliding_window=True in .*--ignore-config-keys use_sliding_window"):
        read_config(folder)
    config = read_config(folder, ignore=["use_sliding_window"])
    assert config.window is None
    write_model(tmp_path / "new", config, read_params(folder, config))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["use_sliding_window"] is True


# Fewer key and value heads than the tensor axis.

FEW = {"num_kv_heads": 2, "explicit_head_dim": 8}
SWITCHES = {
    "llama": {},
    "qwen2": {"biases": "qkv"},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "width", "norm_order": "post", "biases": "attention"},
}


@pytest.mark.parametrize(
    ("switches", "mesh_sizes", "constrain"),
    [
        ("qwen2", (1, 2, 4), split_copied_heads),
        pytest.param("olmo2", (1, 1, 8), sequence_parallel, marks=pytest.mark.slow),
        pytest.param("llama", (2, 1, 4), None, marks=pytest.mark.slow),
        pytest.param("qwen3", (2, 1, 4), split_copied_heads, marks=pytest.mark.slow),
        pytest.param("qwen3", (1, 2, 4), sequence_parallel, marks=pytest.mark.slow),
    ],
)
def test_copied_heads_have_the_loss_and_gradients_of_one_device_in_float64(x64, switches, mesh_sizes, constrain):
    seed, (data, stage, tensor) = tiny.fresh_seed(), mesh_sizes
    config = dataclasses.replace(FAMILIES["llama"], compute_dtype="float64", **FEW, **SWITCHES[switches])
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    copied = config.for_tensor(tensor)
    assert copied.kv_copies == tensor // 2
    params, batch = make_params(config, seed=seed), make_batch(seed=seed, dtype=np.float64)
    model = transformer.make_model(copied) if constrain is None else transformer.make_model(copied, constrain=constrain)
    value_and_grad = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2, schedule="zb-h1")
    got = jit(value_and_grad)(jaxpar.shard(params, shardings(copied, mesh)), jaxpar.shard_batch(batch, mesh))
    assert_same(got, reference(config, params, batch), message=f"seed {seed}")


def test_copied_heads_hold_no_copy_at_rest_and_gather_no_activation():
    config = dataclasses.replace(FAMILIES["llama"], **FEW).for_tensor(4)
    mesh = jaxpar.make_mesh(tensor=4, devices=jax.devices()[:4])
    where = shardings(config, mesh)
    params, batch = jaxpar.shard(make_params(config), where), jaxpar.shard_batch(make_batch(), mesh)
    weight = params["layers"]["attention"]["w_qkv"]
    assert weight.addressable_shards[0].data.size == weight.size // 4
    model = transformer.make_model(config, constrain=split_copied_heads)
    report = inspect_step(jit(jaxpar.value_and_grad(model, loss, mesh, shardings=where)), params, batch)
    copied_bytes = (
        EMBED * 4 * (2 + 2) * 8 * 4 // 4
    )  # [embed, copied heads, 2 queries and key and value, head_dim] of a device
    rest = [each for each in report.collectives if each.kind != "all-reduce"]
    assert {(each.kind, each.axes, each.payload_bytes, each.times) for each in rest} == {
        ("all-to-all", ("tensor",), copied_bytes, config.num_layers)
    }, report.render()
    assert len(rest) == 3, report.render()  # forward, backward, and the gradient


def test_a_mesh_without_a_key_and_value_head_for_each_device_generates_what_one_device_does():
    config = dataclasses.replace(FAMILIES["llama"], **FEW)
    params, mesh = make_params(config), jaxpar.make_mesh(stage=2, tensor=4)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    want = transformer.generate(config, params, prompts, 6)
    copied = config.for_tensor(4)
    got = transformer.generate(copied, jaxpar.shard(params, shardings(copied, mesh)), prompts, 6)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_tensor_axis_that_the_heads_do_not_fit_is_refused():
    config = dataclasses.replace(FAMILIES["llama"], num_heads=6, num_kv_heads=3, explicit_head_dim=4)
    for tensor in (4, 12):
        with pytest.raises(
            ValueError, match=rf"got tensor={tensor}, num_heads=6, num_kv_heads=3. Choose tensor from 1, 2, 3, 6"
        ):
            config.for_tensor(tensor)
    assert [config.for_tensor(tensor).kv_copies for tensor in (1, 2, 3, 6)] == [1, 2, 1, 2]


# Switches of the configuration.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"explicit_head_dim": 0}, "explicit_head_dim must be positive; got 0"),
        ({"window": 0}, "window must be positive; got 0"),
        (
            {"kv_copies": 3},
            "kv_copies must divide group_size; got kv_copies=3, group_size=2. Choose kv_copies from 1, 2",
        ),
        ({"biases": "heads"}, "biases must be one of True, False, 'qkv', 'attention', 'mlp'; got 'heads'"),
    ],
)
def test_switches_that_do_not_fit_are_refused(changes, message):
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=message):
        dataclasses.replace(FAMILIES["llama"], **changes)


def test_a_model_of_no_family_is_refused():
    for changes in ({"qk_norm": "head", "biases": "qkv"}, {"norm_order": "post"}, {"norm_order": "post", "window": 4}):
        with pytest.raises(ValueError, match="to be read or written; got"):
            family_of(dataclasses.replace(FAMILIES["llama"], **changes))


# The files beside the weights.


@pytest.fixture
def source(tmp_path):
    folder = copy_with("mistral", tmp_path, dtype="bfloat16", transformers_version="4.51.0")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.txt").write_text("not part of a model")
    return folder


def test_the_source_gives_all_but_the_weights(source, tmp_path):
    config = read_config(source)
    params = read_params(source, config)
    write_model(tmp_path / "tuned", params, config, source=source)  # in either order
    assert json.loads((tmp_path / "tuned/config.json").read_text()) == json.loads((source / "config.json").read_text())
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "tuned" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "tuned/notes.txt").exists()
    assert {tensor.dtype.name for tensor in all_tensors(tmp_path / "tuned").values()} == {"bfloat16"}
    assert huggingface.stop_tokens(tmp_path / "tuned") == (EOS,)
    write_model(tmp_path / "wide", config, params, source=source, dtype="float32")
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"
    assert_same_bits(all_tensors(tmp_path / "wide"), all_tensors(source))


def test_a_model_that_is_not_its_sources_is_refused(source, tmp_path):
    config = dataclasses.replace(read_config(source), rope_theta=5.0)
    with pytest.raises(
        ValueError, match=r"must be that of its source; got 'rope_theta' that differ from .*: 5.0 for 1000.0"
    ):
        write_model(tmp_path / "new", config, make_params(config), source=source)
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_outside_the_source_is_not_copied(source, tmp_path):
    (tmp_path / "secret").write_text("x")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    config = read_config(source)
    with pytest.raises(ValueError, match=r"must be in its folder; got 'tokenizer.json' in .*, a link to .*secret"):
        write_model(tmp_path / "new", config, read_params(source, config), source=source)


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({"config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [1, 2]}}, (1, 2)),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {}}, (5,)),
        ({"config.json": {}}, ()),
    ],
)
def test_texts_end_where_the_files_say(files, tokens, tmp_path):
    for name, found in files.items():
        (tmp_path / name).write_text(json.dumps(found))
    assert huggingface.stop_tokens(tmp_path) == tokens
    (tmp_path / "config.json").write_text('{"eos_token_id": "</s>"}')
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="eos_token_id must be a token or a list of tokens; got '</s>'"):
        huggingface.stop_tokens(tmp_path)


def test_packed_layers_are_written_in_the_order_of_the_model(tmp_path):
    config = dataclasses.replace(FAMILIES["llama"], num_layers=5)
    params = make_params(config)
    mesh = jaxpar.make_mesh(stage=2, devices=jax.devices()[:2])
    layout = LayerLayout(5, 2, 2)
    packed = layout.pack_params(params)
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("stage"))
    packed = packed | {"layers": jaxpar.shard(packed["layers"], one)}
    write_model(tmp_path / "packed", config, packed)
    write_model(tmp_path / "plain", config, params)
    assert_same_bits(all_tensors(tmp_path / "packed"), all_tensors(tmp_path / "plain"))
