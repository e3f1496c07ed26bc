"""Checkpoints of GPT-2, Llama and BLOOM: the numbers of transformers, the same bytes back, and strangers' files refused."""

import ast
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_bits
from safetensors.numpy import load_file, save_file
from tiny_transformer import FAMILIES, THREE, make_params, shardings

import jaxpar
from jaxpar import huggingface
from jaxpar.huggingface import params as reading
from jaxpar.huggingface import read_params, write_model
from jaxpar.huggingface.config import family_of
from jaxpar.huggingface.tensor_file import open_tensors
from jaxpar.huggingface.untrusted import MAX_JSON_BYTES
from jaxpar.models import transformer

GOLDEN = Path(__file__).parent / "data" / "huggingface"  # made by make.py there, with transformers
MODELS = FAMILIES | {"bloom": dataclasses.replace(FAMILIES["bloom"], mlp_dim=None)}  # transformers' is 4 times as wide
ONE_FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"

DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def read_config(folder, *, ignore=DROPOUTS, **changes):
    """As every GPT-2 is read, whose dropout is 0.1 unless its config.json says otherwise."""
    return huggingface.read_config(folder, ignore=ignore, **changes)


def all_tensors(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def copy(family, tmp_path):
    return Path(shutil.copytree(GOLDEN / family, tmp_path / family))


def change(folder, changes=None, *, remove=()):
    """Changes a checkpoint of one file."""
    tensors = load_file(folder / ONE_FILE) | (changes or {})
    save_file({name: tensor for name, tensor in tensors.items() if name not in remove}, folder / ONE_FILE)


def change_config(folder, **changes):
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))


# The same numbers.


@pytest.mark.parametrize("family", THREE)
def test_logits_equal_those_of_transformers(family):
    config = read_config(GOLDEN / family)
    expected = np.load(GOLDEN / family / "expected.npz")
    params = read_params(GOLDEN / family, config)
    logits = transformer.make_model(config).apply(params, {"tokens": expected["tokens"]})
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", THREE)
def test_what_is_written_is_what_was_read(family, tmp_path):
    config = read_config(GOLDEN / family)
    params = read_params(GOLDEN / family, config)
    write_model(tmp_path / "new", config, params)
    assert_same_bits(all_tensors(tmp_path / "new"), all_tensors(GOLDEN / family))
    assert read_config(tmp_path / "new") == config
    if (GOLDEN / family / ONE_FILE).exists():
        assert (tmp_path / "new" / ONE_FILE).read_bytes() == (GOLDEN / family / ONE_FILE).read_bytes()


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("family", THREE)
def test_each_device_gets_its_own_part_and_a_host_holds_no_more(family, zero, tmp_path, monkeypatch):
    config = MODELS[family]
    params = make_params(config, dtype=np.float32)
    write_model(tmp_path / "model", config, params)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    state = jaxpar.abstract_state(
        lambda _: jax.tree.map(jax.numpy.asarray, params),
        jax.random.key(0),
        optax.sgd(0.1),
        mesh,
        shardings(config, mesh),
        zero=zero,
    )
    where = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    blocks = []
    read_block = reading.read_block
    monkeypatch.setattr(reading, "read_block", lambda *args: blocks.append(read_block(*args)) or blocks[-1])
    got = read_params(tmp_path / "model", config, where)
    assert jax.tree.map(lambda leaf: leaf.sharding, got) == where
    assert_same_bits(got, params)
    unique = [
        {
            str(index): np.prod([len(range(*at.indices(n))) for at, n in zip(index, leaf.shape, strict=True)])
            for index in leaf.sharding.devices_indices_map(leaf.shape).values()
        }
        for leaf in jax.tree.leaves(got)
    ]
    assert sum(block.size for block in blocks) == sum(sum(parts.values()) for parts in unique)
    assert max(block.size for block in blocks) < max(leaf.size for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_comes_back_from_a_mesh_and_several_files(family, tmp_path):
    config = MODELS[family]
    params = make_params(config, dtype=np.float32)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    write_model(tmp_path, config, jaxpar.shard(params, shardings(config, mesh)), max_file_bytes=8000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 1
    assert max(sum(t.nbytes for t in load_file(file).values()) for file in files) <= 8000
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in all_tensors(tmp_path).values())
    assert {file.name: sorted(load_file(file)) for file in files} == {
        file.name: sorted(t for t, name in index["weight_map"].items() if name == file.name) for file in files
    }
    assert_same_bits(read_params(tmp_path, read_config(tmp_path)), params)


def test_rows_that_fill_up_the_vocabulary_are_zeros_and_are_not_written(tmp_path):
    config = read_config(GOLDEN / "llama", vocab_multiple=16)
    expected = np.load(GOLDEN / "llama" / "expected.npz")
    params = read_params(GOLDEN / "llama", config)
    assert params["outer"]["tokens"].shape == (32, 16)
    assert not params["outer"]["tokens"][24:].any()
    assert not params["outer"]["head"][:, 24:].any()
    logits = transformer.make_model(config).apply(params, {"tokens": expected["tokens"]})
    np.testing.assert_allclose(logits[..., :24], expected["logits"], rtol=0, atol=1e-5)
    write_model(tmp_path, config, params)
    assert_same_bits(all_tensors(tmp_path), all_tensors(GOLDEN / "llama"))


@pytest.mark.parametrize(
    ("written", "read"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16")]
)
def test_dtypes_are_those_that_are_asked_for(written, read, tmp_path):
    config = read_config(GOLDEN / "gpt2")
    params = read_params(GOLDEN / "gpt2", config)
    write_model(tmp_path, config, params, dtype=written)
    assert {str(tensor.dtype) for tensor in all_tensors(tmp_path).values()} == {written}
    assert json.loads((tmp_path / CONFIG).read_text())["torch_dtype"] == written
    got = read_params(tmp_path, config, dtype=read)
    names = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    assert_same_bits(
        got, jax.tree.map(lambda leaf: np.asarray(leaf).astype(names[written]).astype(names[read]), params)
    )


def test_checkpoints_without_a_head_have_no_prefix(tmp_path):
    folder = copy("gpt2", tmp_path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / ONE_FILE).items()}
    save_file(tensors, folder / ONE_FILE)
    assert_same_bits(read_params(folder, read_config(folder)), read_params(GOLDEN / "gpt2", read_config(folder)))


def test_known_masks_are_no_params(tmp_path):
    folder = copy("gpt2", tmp_path)
    masks = {f"transformer.h.{i}.attn.bias": np.tril(np.ones((1, 1, 8, 8), bool)) for i in range(2)}
    change(folder, masks | {"transformer.h.0.attn.masked_bias": np.full((), -1e4, np.float32)})
    assert_same_bits(read_params(folder, read_config(folder)), read_params(GOLDEN / "gpt2", read_config(folder)))


def test_a_head_beside_a_tied_embedding_must_be_the_same(tmp_path):
    folder = copy("bloom", tmp_path)
    tokens = load_file(folder / ONE_FILE)["transformer.word_embeddings.weight"]
    change(folder, {"lm_head.weight": tokens})
    read_params(folder, read_config(folder))
    change(folder, {"lm_head.weight": tokens + np.eye(*tokens.shape, dtype=np.float32)})
    with pytest.raises(
        ValueError, match=r"head must be its embedding; got 'lm_head.weight' that differs in .* tied=False"
    ):
        read_params(folder, read_config(folder))
    params = read_params(folder, read_config(folder, tied=False))
    assert not np.array_equal(params["outer"]["head"], params["outer"]["tokens"].T)


# Published config.json files.

SMOL = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.0417, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
    "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "transformers_version": "4.40.1", "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip
DISTIL = {
    "_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02,
    "label2id": {"LABEL_0": 0}, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 6, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
}  # fmt: skip


def test_configs_of_well_known_models_hold_nothing_unknown(tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(SMOL))
    smol = huggingface.read_config(tmp_path)
    assert smol == transformer.TransformerConfig(
        vocab_size=49152, num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3, mlp_dim=1536, max_positions=8192,
        norm="rms", positions="rope", mlp="swiglu", biases=False, rope_theta=1e5,
    )  # fmt: skip
    (tmp_path / CONFIG).write_text(json.dumps(DISTIL))
    assert read_config(tmp_path) == transformer.preset("gpt2", num_layers=6)


PUBLISHED = {
    "gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5, "vocab_size": 50257, "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "initializer_range": 0.02,
    },
    "llama2-70b": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672, "pretraining_tp": 1,
        "max_position_embeddings": 4096, "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "vocab_size": 32000,
    },
    "llama3-8b": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "attention_bias": False,
        "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "vocab_size": 128256, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
    },
    "bloom-560m": {
        "model_type": "bloom", "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "n_embed": 1024,
        "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "vocab_size": 250880, "unk_token_id": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_presets(name, tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(PUBLISHED[name]))
    assert read_config(tmp_path) == transformer.preset(name)
    assert read_config(tmp_path, compute_dtype="bfloat16").compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"model_type": "opt"}, "model_type must be one of gpt2, llama, mistral, .*, bloom; got 'opt' in"),
        ("gpt2", {"model_type": ["gpt2"]}, r"model_type must be one of gpt2, .*, bloom; got \['gpt2'\] in"),
        ("gpt2", {"activation_function": "relu"}, "activation_function of a gpt2 must be 'gelu_new' or .*; got 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "by_inverse_layer_idx of a gpt2 must be False; got True"),
        ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights of a gpt2 must be True; got 1"),
        ("gpt2", {"n_embd": "12"}, "n_embd must be an integer from 1 to 16777216; got '12'"),
        ("gpt2", {"n_layer": True}, "n_layer must be an integer from 1 to .*; got True"),
        ("gpt2", {"n_layer": 10**9}, "n_layer must be an integer from 1 to .*; got 1000000000"),
        ("gpt2", {"n_head": 5}, "num_heads must divide embed_dim; got num_heads=5, embed_dim=12"),
        ("gpt2", {"n_head": None}, "config.json must have n_head; got nothing in"),
        ("gpt2", {"hidden_size": 13}, "keys of one meaning must agree; got {'n_embd': 12, 'hidden_size': 13}"),
        ("gpt2", {"layer_norm_epsilon": -1}, "layer_norm_epsilon must be a positive number; got -1"),
        ("gpt2", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be a positive number; got nan"),
        ("gpt2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false; got 'yes'"),
        ("gpt2", {"sliding_window": 4}, r"key of a gpt2's config.json must be known.*; got sliding_window=4 in .*ignore="),
        ("gpt2", {"quantization_config": {"bits": 4}}, r"must be known.*; got quantization_config={'bits': 4}"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved of a llama must be False; got True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act of a llama must be 'silu' or 'swish'; got 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "default", "factor": 8}}, "with its own keys alone; got {'factor': 8"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters must be an object; got \[1\]"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a positive number; got 0"),
        ("llama", {"head_dim": "8"}, "head_dim must be an integer from 1 to 16777216; got '8'"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false; got 1"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm of a bloom must be False; got True"),
        ("bloom", {"n_inner": 24}, "n_inner of a bloom must be None; got 24"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_by_its_name(family, changes, message, tmp_path):
    folder = copy(family, tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        read_config(folder)


# What a config.json asks for beyond the model.


@pytest.mark.parametrize(
    ("family", "changes", "asked"),
    [
        ("gpt2", {}, dict.fromkeys(DROPOUTS, 0.1)),
        (
            "gpt2",
            {"attn_pdrop": 0.0, "embd_pdrop": None, "resid_pdrop": 0},
            {"embd_pdrop": 0.1},
        ),  # transformers' default
        ("bloom", {"hidden_dropout": 0.2}, {"hidden_dropout": 0.2}),
        ("llama", {"attention_dropout": 0.1}, {"attention_dropout": 0.1}),
        ("llama", {"attention_dropout": "0"}, {"attention_dropout": "0"}),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 4}, {"pretraining_tp": 4, "slow_but_exact": True}),
        ("llama", {"my_note": [1, "a b"], "your note": {"of": 2}}, {"my_note": [1, "a b"], "your note": {"of": 2}}),
        ("bloom", {f"key_{i}": i for i in range(1, 6)}, {f"key_{i}": i for i in range(1, 6)}),
    ],
)
def test_what_is_not_modelled_is_refused_until_it_is_ignored_and_then_written_back(family, changes, asked, tmp_path):
    folder = copy(family, tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ValueError, match="must be known and modelled, since any may change the model") as refused:
        huggingface.read_config(folder)
    assert all(f"{key}={value!r}" in str(refused.value) for key, value in list(asked.items())[:3])
    named = ast.literal_eval(re.search(r"give ignore=(\(.*?\)), or", str(refused.value))[1])
    flags = re.search(r"--ignore-config-keys (.*?): write_model", str(refused.value))[1]
    assert sorted(named) == sorted(shlex.split(flags)) == sorted(asked)

    config = huggingface.read_config(folder, ignore=named)
    assert config.ignored == asked
    assert config == read_config(GOLDEN / family), "what is ignored changes no model"
    hash(config)
    write_model(tmp_path / "new", config, read_params(folder, config))
    assert asked.items() <= json.loads((tmp_path / "new" / CONFIG).read_text()).items()
    assert huggingface.read_config(tmp_path / "new", ignore=named).ignored == asked


def test_a_model_without_dropout_is_written_so(tmp_path):
    config = FAMILIES["gpt2"]
    write_model(tmp_path, config, make_params(config, dtype=np.float32))
    assert huggingface.read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 1}),
        ("bloom", {"pretraining_tp": 4}),
        ("llama", {"sliding_window": None}),
    ],
)
def test_keys_that_change_no_number_are_read_as_they_are(family, changes, tmp_path):
    folder = copy(family, tmp_path)
    change_config(folder, **changes)
    assert huggingface.read_config(folder) == read_config(GOLDEN / family)


def test_a_refusal_of_many_keys_is_short(tmp_path):
    folder = copy("llama", tmp_path)
    change_config(folder, **{f"key_{i}": "x" * 1000 for i in range(1000)})
    with pytest.raises(ValueError, match=r"key_2='x.* and 997 more in .*To ignore them, name them in") as refused:
        huggingface.read_config(folder)
    assert len(str(refused.value)) < 1500


def test_keys_that_the_model_is_made_of_cannot_be_ignored():
    with pytest.raises(ValueError, match="cannot be ignored; got 'activation_function', 'n_layer' for a gpt2"):
        huggingface.read_config(GOLDEN / "gpt2", ignore=[*DROPOUTS, "n_layer", "activation_function"])
    with pytest.raises(TypeError, match=r"must be a sequence of keys; got 'attn_pdrop'. Give ignore=\('attn_pdrop',\)"):
        huggingface.read_config(GOLDEN / "gpt2", ignore="attn_pdrop")


def test_a_model_of_bytes_comes_back_as_one(tmp_path):
    config = dataclasses.replace(FAMILIES["llama"], tokens="bytes")
    write_model(tmp_path, config, make_params(config, dtype=np.float32))
    assert read_config(tmp_path) == config
    change_config(tmp_path, jaxpar_tokens="words")
    with pytest.raises(ValueError, match="jaxpar_tokens of a llama must be 'bytes'; got 'words'"):
        read_config(tmp_path)


# Strangers' folders.


@pytest.mark.parametrize(
    ("changes", "remove", "message"),
    [
        ({}, ["transformer.h.1.ln_1.bias"], r"every tensor of its model; got none for 'transformer.h.1.ln_1.bias' in .*gpt2"),
        ({"transformer.h.2.ln_1.bias": np.ones(12)}, [], r"must belong to the model; got 'transformer.h.2.ln_1.bias' in"),
        ({"lm_head.bias": np.ones(24)}, [], "must belong to the model; got 'lm_head.bias' in"),
        ({"transformer.h.0.attn.bias.x": np.ones(2)}, [], "must belong to the model; got 'transformer.h.0.attn.bias.x' in"),
        (
            {"transformer.h.0.mlp.c_fc.weight": np.ones((48, 12), np.float32)},
            [],
            r"got float32\[48, 12\] for 'transformer.h.0.mlp.c_fc.weight' in .* where the model has \[12, 48\]",
        ),
        ({"transformer.ln_f.bias": np.ones(12, np.int32)}, [], r"got int32\[12\] for 'transformer.ln_f.bias'"),
        ({"transformer.ln_f.bias": np.ones((1, 12), np.float32)}, [], r"got float32\[1, 12\] for 'transformer.ln_f.bias'"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_refused(changes, remove, message, tmp_path):
    folder = copy("gpt2", tmp_path)
    change(folder, changes, remove=remove)
    with pytest.raises(ValueError, match=message):
        read_params(folder, read_config(folder))


def test_a_model_of_more_layers_than_tensors_is_refused_at_once():
    config = read_config(GOLDEN / "gpt2", num_layers=10**9)
    with pytest.raises(
        ValueError, match=r"each layer of a model must have tensors; got num_layers=1000000000, 28 tensors"
    ):
        read_params(GOLDEN / "gpt2", config)


def test_shardings_of_another_model_are_refused():
    mesh = jaxpar.make_mesh(tensor=2)
    with pytest.raises(ValueError, match="shardings must have the structure of the params; got"):
        read_params(GOLDEN / "gpt2", read_config(GOLDEN / "gpt2"), shardings(FAMILIES["llama"], mesh))


def header_of(**tensors):
    return {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | about
        for name, about in (tensors or {"a": {}}).items()
    }


def write_file(path, header, data=bytes(8), *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


TWO = header_of(a={}, b={"data_offsets": [8, 16]})


@pytest.mark.parametrize(
    ("header", "kwargs"),
    [
        (header_of(), {"length": 2**63}),
        (header_of(), {"length": 10**6}),
        (header_of(), {"length": 0}),
        (b"[]", {}),
        (b'{"a": ', {}),
        (b'{"\xff": 1}', {}),
        (b'{"a":' + b"[" * 100_000, {}),
        (b'{"a": {"shape": [' + b"9" * 5000 + b"]}}", {}),
        (header_of(a={"shape": [-2]}), {}),
        (header_of(__metadata__={}), {}),
        ({"a": {"dtype": "F32", "shape": [2]}}, {}),
        ({"a": 3}, {}),
        (header_of(a={"shape": 2}), {}),
        (header_of(a={"shape": [2.0]}), {}),
        (header_of(a={"shape": [True]}), {}),
        (header_of(a={"data_offsets": [0, 8, 8]}), {}),
        (header_of(a={"data_offsets": [8, 0]}), {}),
        (header_of(a={"data_offsets": [0, 4]}), {}),
        (header_of(a={"shape": [10**17, 10**17]}), {}),
        (header_of(), {"data": bytes(7)}),
        (header_of(), {"data": bytes(9)}),
        (header_of(a={"data_offsets": [1, 9]}), {"data": bytes(9)}),
        (header_of(a={}, b={}), {}),
        (header_of(a={}, b={"data_offsets": [4, 12]}), {"data": bytes(12)}),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_its_file_is_refused(header, kwargs, tmp_path):
    with pytest.raises(
        ValueError, match=r"must hold exactly the tensors of its header; got .*download it again"
    ) as told:
        open_tensors(write_file(tmp_path / "x.safetensors", header, **kwargs))
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_quantised_weights_are_refused(kind, tmp_path):
    header = header_of(a={"dtype": kind, "shape": [8]})
    with pytest.raises(ValueError, match=rf"dtype must be one of F64, .*; got '{kind}' for 'a' .* quantised"):
        open_tensors(write_file(tmp_path / "x.safetensors", header))


def test_a_tensor_given_twice_is_not_read_past_its_bytes(tmp_path):
    tensor = json.dumps(header_of()["a"])
    path = write_file(tmp_path / "x.safetensors", f'{{"a": {tensor}, "a": {tensor}}}'.encode())
    judge(path)


def test_the_tensors_of_a_good_file_are_views_of_it(tmp_path):
    path = write_file(
        tmp_path / "x.safetensors", TWO | {"__metadata__": {"format": "pt"}}, np.arange(4.0, dtype="f4").tobytes()
    )
    tensors = open_tensors(path)
    np.testing.assert_array_equal(tensors["b"], [2, 3])
    assert isinstance(tensors["a"], np.memmap)
    assert not tensors["a"].flags.writeable


@pytest.mark.parametrize("size", [0, 7, 8])
def test_a_file_without_a_header_is_refused(size, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=r"must hold exactly the tensors of its header; got .*header"):
        open_tensors(tmp_path / "x.safetensors")


def judge(path):
    """Ours refuses a file with a ValueError, or gives what the format's own reader gives."""
    try:
        got = open_tensors(path)
    except ValueError:
        return
    assert_same_bits(got, load_file(path))


SOUND = (GOLDEN / "llama" / "model-00003-of-00003.safetensors").read_bytes()
HEADER_BYTES = int.from_bytes(SOUND[:8], "little")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 4000) | st.floats() | st.sampled_from(["F32", "BF16", "I64"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=150)
@given(st.data())
def test_no_change_of_a_header_leads_past_the_checks(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    changed = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 8 + HEADER_BYTES - 1))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"0", b'"', b"}"])
        )
    path.write_bytes(changed)
    judge(path)


@settings(max_examples=150)
@given(st.data())
def test_no_value_in_a_header_leads_past_the_checks(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    header = json.loads(SOUND[8 : 8 + HEADER_BYTES])
    name = data.draw(st.sampled_from(sorted(header)))
    where = data.draw(st.sampled_from([None, "dtype", "shape", "data_offsets", "more"]))
    if where is None or name == "__metadata__":
        header[data.draw(st.sampled_from([name, "other"]))] = data.draw(VALUES)
    elif where in ("shape", "data_offsets") and data.draw(st.booleans()):
        values = header[name][where]
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(VALUES)
    else:
        header[name][where] = data.draw(VALUES)
    write_file(path, header, SOUND[8 + HEADER_BYTES :])
    judge(path)


@settings(max_examples=100)
@given(st.data())
def test_no_value_in_an_index_or_a_config_leads_past_the_checks(tmp_path_factory, data):
    folder = copy("llama", tmp_path_factory.mktemp("fuzz"))
    file = folder / data.draw(st.sampled_from([CONFIG, INDEX]))
    found = json.loads(file.read_text())
    inner = found["weight_map"] if file.name == INDEX and data.draw(st.booleans()) else found
    paths = st.sampled_from(
        ["../llama/model-00001-of-00003.safetensors", "/etc/hostname", "config.json", ".", "..", "\0", "x" * 300]
    )
    inner[data.draw(st.sampled_from(sorted(inner)) | st.text(max_size=4))] = data.draw(VALUES | paths)
    file.write_text(json.dumps(found))
    try:
        params = read_params(folder, read_config(folder))
    except (ValueError, FileNotFoundError):
        return
    assert_same_bits(params, read_params(GOLDEN / "llama", read_config(GOLDEN / "llama")))


# Paths.


def with_name_in_index(folder, name):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/secret.safetensors", "..", "", "a\\b", "a\0b", "x" * 300, "sub/x.safetensors"]
)
def test_names_that_lead_out_of_the_folder_are_refused(name, tmp_path):
    folder = with_name_in_index(copy("llama", tmp_path), name)
    shutil.copy(folder / "model-00003-of-00003.safetensors", tmp_path / "secret.safetensors")
    with pytest.raises(ValueError, match="must be in its folder, under plain names; got"):
        read_params(folder, read_config(folder))


def test_links_may_not_lead_out_of_the_folder_except_to_the_blobs_of_a_cache(tmp_path):
    folder = copy("gpt2", tmp_path)
    (folder / ONE_FILE).rename(tmp_path / "blob")
    (folder / ONE_FILE).symlink_to(tmp_path / "blob")
    with pytest.raises(ValueError, match=r"must be in its folder; got 'model.safetensors' in .*, a link to .*blob"):
        read_params(folder, read_config(folder))

    (folder / ONE_FILE).unlink()
    shutil.copy(tmp_path / "blob", folder / ONE_FILE)  # as the message says
    read_params(folder, read_config(folder))

    snapshot, blobs = tmp_path / "models--gpt2" / "snapshots" / "1234", tmp_path / "models--gpt2" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, file in ((CONFIG, folder / CONFIG), (ONE_FILE, tmp_path / "blob")):
        shutil.copy(file, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert_same_bits(read_params(snapshot, read_config(snapshot)), read_params(GOLDEN / "gpt2", read_config(snapshot)))


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    folder = copy("gpt2", tmp_path)
    (folder / ONE_FILE).unlink()
    os.mkfifo(folder / ONE_FILE)  # opening it would wait for a writer
    with pytest.raises(ValueError, match=r"must be a regular file; got .*model.safetensors"):
        read_params(folder, read_config(folder))
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(CONFIG)
    with pytest.raises((ValueError, FileNotFoundError), match=r"config.json"):
        read_config(folder)


def test_an_index_must_agree_with_its_files(tmp_path):
    folder = copy("llama", tmp_path)
    config = read_config(folder)
    with_name_in_index(folder, "model-00001-of-00003.safetensors")
    with pytest.raises(ValueError, match=r"must name the tensors of its files; got 'lm_head.weight' in only one of"):
        read_params(folder, config)
    with_name_in_index(folder, "model-00009-of-00003.safetensors")
    with pytest.raises(FileNotFoundError, match=r"file must exist; got .*model-00009"):
        read_params(folder, config)
    with_name_in_index(folder, 3)
    with pytest.raises(ValueError, match="must have a weight_map of file by tensor; got none in"):
        read_params(folder, config)
    shutil.copy(GOLDEN / "gpt2" / ONE_FILE, folder)
    with pytest.raises(ValueError, match=r"model.safetensors or in the files of .*index.json; got both in"):
        read_params(folder, config)


def test_folders_without_a_model_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        read_config(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"must hold model.safetensors or .*; got 'pytorch_model.bin' in"):
        read_params(tmp_path, FAMILIES["gpt2"])
    (tmp_path / CONFIG).write_text(" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(ValueError, match="must have at most 4194304 bytes; got 4194305"):
        read_config(tmp_path)
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(ValueError, match="must be an object; got a list"):
        read_config(tmp_path)


# Writing.


def test_writing_is_checked_before_anything_is_written(tmp_path):
    config = FAMILIES["llama"]
    params = make_params(config, dtype=np.float32)
    new = tmp_path / "new"
    other = make_params(dataclasses.replace(config, vocab_size=24), dtype=np.float32)
    with pytest.raises(
        ValueError, match=r"must be those of the model; got \(16, 24\) for outer/head, .* has \(16, 16\)"
    ):
        write_model(new, config, other)
    with pytest.raises(
        ValueError, match=r"positions='rope' must be a llama to be read or written; got norm='layer'. Choose"
    ):
        write_model(new, dataclasses.replace(config, norm="layer"), params)
    with pytest.raises(ValueError, match=r"must be a gpt2 .*; got num_kv_heads=4"):
        write_model(new, dataclasses.replace(FAMILIES["gpt2"], num_kv_heads=4), params)
    with pytest.raises(ValueError, match=r"must be a bloom .*; got mlp_dim=24"):
        write_model(new, FAMILIES["bloom"], params)
    with pytest.raises(ValueError, match=r"params must be float32, bfloat16 or float16, .*; got int8"):
        write_model(new, config, params, dtype="int8")
    with pytest.raises(ValueError, match="max_file_bytes must be positive; got 0"):
        write_model(new, config, params, max_file_bytes=0)
    mixed = {**params, "outer": jax.tree.map(lambda leaf: leaf.astype(np.float16), params["outer"])}
    with pytest.raises(ValueError, match=r"of one dtype, or be written as one; got float16, float32. Give dtype"):
        write_model(new, config, mixed)
    assert not new.exists()
    write_model(tmp_path / "narrow", config, mixed, dtype="float16")
    write_model(new, config, params)
    with pytest.raises(
        ValueError, match=r"to a folder without one; got .*new with 'config.json', 'model.safetensors'. Name"
    ):
        write_model(new, config, params)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"num_kv_heads": 4}),
        ("gpt2", {"norm": "rms", "norm_embedding": True}),
        ("llama", {"norm": "layer", "mlp": "gelu"}),
        ("bloom", {"mlp_dim": 24, "biases": False}),
    ],
)
def test_a_model_changed_as_a_refusal_says_belongs_to_its_family(family, changes):
    config = dataclasses.replace(MODELS[family], **changes)
    with pytest.raises(ValueError, match=rf"must be a {family} to be read or written; got .*\. Choose ") as refused:
        family_of(config)
    chosen = re.search(r"Choose (.*), or keep it", str(refused.value))[1]
    assert family_of(dataclasses.replace(config, **eval(f"dict({chosen})"))) == family


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    config = read_config(GOLDEN / "gpt2")
    params = read_params(GOLDEN / "gpt2", config)
    with pytest.raises(
        ImportError, match=r"need the package safetensors; got .* Install it: pip install 'jaxpar\[hf\]'"
    ):
        write_model(tmp_path, config, params)


def test_float64_needs_jax_to_have_it(x64):
    config = read_config(GOLDEN / "gpt2")
    assert {leaf.dtype for leaf in jax.tree.leaves(read_params(GOLDEN / "gpt2", config, dtype="float64"))} == {
        np.dtype("f8")
    }


def test_float64_is_refused_where_jax_has_it_not():
    with pytest.raises(ValueError, match="float64 where jax_enable_x64 is set; got float64"):
        read_params(GOLDEN / "gpt2", read_config(GOLDEN / "gpt2"), dtype="float64")


ON_TWO_PROCESSES = """
import sys
from pathlib import Path
import jaxpar
from jaxpar.huggingface import read_config, read_params, write_model
from jaxpar.models import transformer
from jaxpar.tensor_parallel import TRANSFORMER_RULES

jaxpar.initialize()
theirs, new = map(Path, sys.argv[1:])
config = read_config(theirs)
mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
shardings = jaxpar.shardings_from_dims(transformer.param_table(config), mesh, TRANSFORMER_RULES)
params = read_params(theirs, config, shardings)
write_model(new, config, params, max_file_bytes=8000)
try:
    write_model(new, config, params)
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_two_processes_read_and_write_one_model(tmp_path):
    (tmp_path / "script.py").write_text(ON_TWO_PROCESSES)
    command = [sys.executable, "-m", "jaxpar", "launch", "-n", "2", "--devices-per-process", "4", "--log-dir", tmp_path]
    root = GOLDEN.parents[2]
    done = subprocess.run(
        [*command, tmp_path / "script.py", GOLDEN / "llama", tmp_path / "new"],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_bits(all_tensors(tmp_path / "new"), all_tensors(GOLDEN / "llama"))
    logs = [(tmp_path / f"{process}.log").read_text() for process in range(2)]
    assert all("refused: a model is written to a folder without one" in log for log in logs), logs
