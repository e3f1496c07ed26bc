"""config.json: those of published models, and what is refused until it is ignored."""

import ast
import dataclasses
import json
import re
import shlex

import numpy as np
import pytest

from jaxpar import huggingface
from jaxpar.huggingface import read_params, write_model
from jaxpar.huggingface.config import config_json
from jaxpar.models import transformer
from tests.support.model_folders import (
    CONFIG,
    DROPOUTS,
    GOLDEN,
    change_config,
    copy,
    read_config,
)
from tests.support.tiny_transformer import FAMILIES, make_params

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
        norm="rms", positions="rope", mlp="swiglu", biases=False, rope=transformer.Rope(theta=1e5),
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


LINEAR = {"rope_type": "linear", "factor": 2}


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
        ("gpt2", {"activation_function": "relu"}, "activation_function of gpt2 must be 'gelu_new' or .*; got 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "by_inverse_layer_idx of gpt2 must be False; got True"),
        ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights of gpt2 must be True; got 1"),
        ("gpt2", {"n_embd": "12"}, "n_embd must be an integer from 1 to 16777216; got '12'"),
        ("gpt2", {"n_layer": True}, "n_layer must be an integer from 1 to .*; got True"),
        ("gpt2", {"n_layer": 10**9}, "n_layer must be an integer from 1 to .*; got 1000000000"),
        ("gpt2", {"n_head": 5}, "n_head must divide n_embd; got n_head=5, n_embd=12 in .*config.json. Choose n_head"),
        ("gpt2", {"n_head": None}, "config.json must have n_head; got nothing in"),
        ("gpt2", {"hidden_size": 13}, "keys of one meaning must agree; got {'n_embd': 12, 'hidden_size': 13}"),
        ("gpt2", {"layer_norm_epsilon": -1}, "layer_norm_epsilon must be a positive number; got -1"),
        ("granite", {"attention_multiplier": None}, "attention_multiplier must be a positive number; got None in"),
        ("gpt2", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be a positive number; got nan"),
        ("gpt2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false; got 'yes'"),
        ("gpt2", {"sliding_window": 4}, r"key of gpt2's config.json must be known.*; got sliding_window=4 in .*ignore="),
        ("gpt2", {"quantization_config": {"bits": 4}}, "must not be quantised; got a quantization_config, {'bits': 4}, in"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "'gptq', in .*quantize=nf4 beside lora_rank"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved of llama must be False; got True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act of llama must be 'silu' or 'swish'; got 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "default", "factor": 8}}, "with its own keys alone; got {'factor': 8"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters must be an object; got \[1\]"),
        ("llama", {"rope_theta": 7.0}, "must agree; got {'rope_theta': 7.0, 'rope_theta of rope_parameters': 1000.0}"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "rope_theta": 7}}, "{'rope_theta of rope_scaling': 7.0, "),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, r"one meaning must agree; got {'rope_parame"),
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4}}, "one meaning must agree.*Leave one of"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a positive number; got 0"),
        ("llama", {"head_dim": "8"}, "head_dim must be an integer from 1 to 16777216; got '8'"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false; got 1"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"] * 2, "num_hidden_layers": 4},
            "layer_types must be a list of full_.* or sliding_attention, .*; got 'linear_attention' for layers 1, 3 of 4"),
        ("qwen2", {"layer_types": "linear_attention"}, "layer_types must be .*; got 'linear_attention' for layers 0 of 1"),
        ("llama", {"layer_types": [None, "full_attention"]}, "layer_types must be .*; got None for layers 0 of 2"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm of bloom must be False; got True"),
        ("bloom", {"n_inner": 24}, "n_inner of bloom must be None; got 24"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_by_its_name(family, changes, message, tmp_path):
    folder = copy(family, tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        read_config(folder)


def test_layers_that_are_not_modelled_cannot_be_ignored(tmp_path):
    folder = copy("qwen3", tmp_path)
    change_config(folder, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ValueError, match="got 'linear_attention' for layers 0 of 2"):
        read_config(folder, ignore=["layer_types"])


def test_a_model_of_bytes_names_the_one_that_ends_a_text():
    """Another server than jaxpar's would otherwise write past the end of an answer."""
    for tokens, end in (("bytes", 0), (None, None)):
        found = config_json(dataclasses.replace(FAMILIES["llama"], tokens=tokens), "float32")
        assert found["eos_token_id"] == end


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
        (
            "bloom",
            {"slow_but_exact": True, "pretraining_tp": 4},
            {"pretraining_tp": 4, "slow_but_exact": True},
        ),
        (
            "llama",
            {"my_note": [1, "a b"], "your note": {"of": 2}},
            {"my_note": [1, "a b"], "your note": {"of": 2}},
        ),
        ("bloom", {f"key_{i}": i for i in range(1, 6)}, {f"key_{i}": i for i in range(1, 6)}),
    ],
)
def test_what_is_not_modelled_is_refused_until_it_is_ignored_and_then_written_back(
    family, changes, asked, tmp_path
):
    folder = copy(family, tmp_path)
    change_config(folder, **changes)
    with pytest.raises(
        ValueError, match="must be known and modelled, since any may change the model"
    ) as refused:
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
    with pytest.raises(
        ValueError, match=r"key_2='x.* and 997 more in .*To ignore them, name them in"
    ) as refused:
        huggingface.read_config(folder)
    assert len(str(refused.value)) < 1500


def test_keys_that_the_model_is_made_of_cannot_be_ignored():
    with pytest.raises(
        ValueError, match="cannot be ignored; got 'activation_function', 'n_layer' for gpt2"
    ):
        huggingface.read_config(
            GOLDEN / "gpt2", ignore=[*DROPOUTS, "n_layer", "activation_function"]
        )
    with pytest.raises(
        TypeError,
        match=r"must be a sequence of keys; got 'attn_pdrop'. Give ignore=\('attn_pdrop',\)",
    ):
        huggingface.read_config(GOLDEN / "gpt2", ignore="attn_pdrop")


def test_a_model_of_bytes_comes_back_as_one(tmp_path):
    config = dataclasses.replace(FAMILIES["llama"], tokens="bytes")
    write_model(tmp_path, config, make_params(config, dtype=np.float32))
    assert read_config(tmp_path) == config
    change_config(tmp_path, jaxpar_tokens="words")
    with pytest.raises(ValueError, match="jaxpar_tokens of llama must be 'bytes'; got 'words'"):
        read_config(tmp_path)
