"""transformers itself, where it is installed: fresh models, both ways."""

import dataclasses
import json
import os
import warnings

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.huggingface import read_config, read_params, stop_tokens, write_model
from jaxpar.huggingface.config import config_json
from jaxpar.models import transformer
from jaxpar.models.transformer.rope import frequencies
from jaxpar.params import count_params, init_params
from jaxpar.sharding import shardings_from_dims
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from tests.support.model_folders import DROPOUTS, GOLDEN
from tests.support.tiny_transformer import check_twenty_steps

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.data.huggingface.make import train
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

VOCAB, SEQ = 32, 16
ENDS = {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCAB, "n_positions": 2 * SEQ, "n_embd": 32, "n_layer": 4, "n_head": 4} | ENDS
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
} | ENDS
SCALED = {"rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA_3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = SCALED | {"rope_type": "yarn", "beta_fast": 8.0}
DYNAMIC = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0},
}
GROUPED = LLAMA | {"num_key_value_heads": 4}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 4, "n_head": 12} | ENDS
MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
MODELS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu_pytorch_tanh"}),
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-grouped": ("Llama", LLAMA | {"num_key_value_heads": 2, "rope_theta": 500.0}),
    "llama-grouped-tied": ("Llama", LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama3.2": ("Llama", GROUPED | {"head_dim": 6, "tie_word_embeddings": True, "rope_parameters": LLAMA_3}),
    "llama-linear": ("Llama", GROUPED | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}),
    "llama-dynamic": ("Llama", GROUPED | DYNAMIC),
    "llama-attention-biases": ("Llama", GROUPED | {"attention_bias": True}),
    "llama-mlp-biases": ("Llama", GROUPED | {"mlp_bias": True}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "mistral-whole": ("Mistral", GROUPED | {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", GROUPED | {"max_position_embeddings": 32, "rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 6}),
    "qwen3-biases": ("Qwen3", GROUPED | {"head_dim": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm2": ("Llama", GROUPED | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "olmo2": ("Olmo2", GROUPED),
    "olmo2-biases": ("Olmo2", GROUPED | {"attention_bias": True}),
    "granite": ("Granite", GROUPED | MULTIPLIED | {"tie_word_embeddings": True}),
    "granite-plain": ("Granite", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3Moe", GROUPED | EXPERTS | {"moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True}),
    "mixtral-window": ("Mixtral", GROUPED | {"num_local_experts": 4, "sliding_window": 5}),
    "qwen3-moe-window": (
        "Qwen3Moe",
        GROUPED
        | EXPERTS
        | {"moe_intermediate_size": 16, "head_dim": 8}
        | {"use_sliding_window": True, "sliding_window": 5},
    ),
    "olmoe": ("Olmoe", GROUPED | EXPERTS),
    "bloom": ("Bloom", BLOOM),
    "bloom-untied": ("Bloom", BLOOM | {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
}  # fmt: skip


def make_theirs(name, **changes):
    """A model of transformers of which every number counts: no bias is zero, no norm's scale one."""
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(
        config
    ).eval()
    for path, param in model.named_parameters():
        is_norm = param.ndim == 1 and path.endswith("weight")
        param.data.normal_(mean=float(is_norm), std=0.2)
    return model


def make_tokens():
    return np.random.default_rng(0).integers(0, VOCAB, (3, SEQ)).astype(np.int32)


def their_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(make_tokens()).long()).logits.float().numpy()


def our_logits(config, params):
    return transformer.logits_of(
        transformer.make_model(config).apply(params, {"tokens": make_tokens()})
    )


@pytest.mark.parametrize("name", MODELS)
def test_their_model_has_the_same_logits_here_and_on_the_way_back(name, tmp_path):
    theirs = make_theirs(name)
    want = their_logits(theirs)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    config = read_config(tmp_path / "theirs", ignore=DROPOUTS)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    where = shardings_from_dims(transformer.param_table(config), mesh, TRANSFORMER_RULES)
    params = read_params(tmp_path / "theirs", config, where)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == where
    np.testing.assert_allclose(our_logits(config, params), want, rtol=0, atol=1e-5)

    write_model(tmp_path / "back", config, params, max_file_bytes=30_000)
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert {n: (t.shape, t.dtype) for n, t in back.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in theirs.state_dict().items()
    }
    assert all(torch.equal(back.state_dict()[n], t) for n, t in theirs.state_dict().items())
    np.testing.assert_allclose(their_logits(back), want, rtol=0, atol=1e-5)
    if rope := getattr(
        back.config, "rope_parameters", None
    ):  # others are in attention_factor already
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
        wanted = (
            defaults | theirs.config.rope_parameters
            if rope["rope_type"] == "yarn"
            else theirs.config.rope_parameters
        )
        assert {key: rope.get(key) for key in wanted} == wanted
    ours = {
        k: v
        for k, v in back.config.to_dict().items()
        if "token_id" not in k and k != "rope_parameters"
    }
    differ = {k for k, v in ours.items() if v != theirs.config.to_dict().get(k)}
    if name == "mistral-whole":
        assert back.config.model_type == "llama"  # the same model, whose window nothing tells
        differ -= {"model_type", "sliding_window", "attention_bias", "mlp_bias", "pretraining_tp"}
    if theirs.config.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        differ -= {
            "max_window_layers"
        }  # of no effect without a window, and written as 0 with one of all layers
    assert differ <= {"_name_or_path", "architectures", "activation_function", "seq_length"}, differ


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe"])
def test_a_row_of_a_model_of_one_layer_has_their_balance_loss(name, tmp_path):
    """Theirs is of all layers and rows together, ours the mean over those of each: with one of both they are equal."""
    theirs = make_theirs(
        name, num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=0.02
    )
    theirs.save_pretrained(tmp_path)
    tokens = make_tokens()[:1]
    with torch.no_grad():
        wanted = 0.02 * float(theirs(torch.from_numpy(tokens).long()).aux_loss)
    config = read_config(tmp_path, ignore=DROPOUTS)
    outputs = transformer.make_model(config).apply(
        read_params(tmp_path, config), {"tokens": tokens}
    )
    np.testing.assert_allclose(
        config.experts.balance_coefficient * outputs.sums.balance,
        np.full((1, SEQ), wanted),
        rtol=1e-5,
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_tuned_model_generates_what_theirs_does_and_stops_where_it_stops(name, tmp_path):
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs", ignore=DROPOUTS)
    params = read_params(tmp_path / "theirs", config)
    rows = [
        np.random.default_rng(length).integers(4, VOCAB, length) for length in (3, 7, 1, 6, 2, 5, 4)
    ]
    # Their frequencies follow the longest row of the batch, and the longest so far: each row alone, by a new model.
    batches = [[row] for row in rows] if name == "llama-dynamic" else [rows]
    write_model(tmp_path / "tuned", config, params, source=tmp_path / "theirs")
    for folder in ("theirs", "tuned"):
        found = [
            their_texts(type(theirs).from_pretrained(tmp_path / folder), batch) for batch in batches
        ]
        want = [text for texts in found for text in texts]
        got = transformer.generate(config, params, rows, 20, eos=stop_tokens(tmp_path / folder))
        for row, new, expected in zip(rows, got, want, strict=True):
            np.testing.assert_array_equal(new[len(row) :], expected[: len(new) - len(row)])
            assert not expected[len(new) - len(row) :].any(), "the rest is padding"
    assert (tmp_path / "tuned/config.json").read_bytes() == json_of(tmp_path / "theirs/config.json")


def their_texts(model, rows):
    longest = max(map(len, rows))
    left = torch.from_numpy(np.stack([np.pad(row, (longest - len(row), 0)) for row in rows]))
    mask = torch.from_numpy(
        np.stack([np.arange(longest) >= longest - len(row) for row in rows])
    ).long()
    with torch.no_grad():
        return model.generate(
            left, attention_mask=mask, max_new_tokens=20, do_sample=False
        ).numpy()[:, longest:]


def test_their_model_has_our_logits_where_dynamic_positions_begin_below_the_longest_sequence(
    tmp_path,
):
    scaling = transformer.RopeScaling(kind="dynamic", factor=4.0, original_positions=8)
    params = read_params(GOLDEN / "llama", own := read_config(GOLDEN / "llama"))
    config = dataclasses.replace(
        own, rope=dataclasses.replace(own.rope, scaling=scaling), max_positions=4 * SEQ
    )
    write_model(tmp_path, config, params)
    theirs, tokens = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(),
        make_tokens() % config.vocab_size,
    )
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(
        transformer.make_model(config).apply(params, {"tokens": tokens}), want, rtol=0, atol=1e-5
    )


LONG = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 131_072}
EXTENDED = {
    "llama3": LLAMA_3
    | {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192},  # Llama 3.1
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    },  # Qwen2.5
}


@pytest.mark.parametrize("kind", EXTENDED)
def test_a_model_extended_to_131072_tokens_has_their_frequencies(kind, tmp_path):
    theirs = transformers.LlamaConfig(**LLAMA | LONG | {"rope_parameters": EXTENDED[kind]})
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    wanted, attention_factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](
        theirs, "cpu"
    )
    found = frequencies(config.head_dim, config.rope, config.max_positions)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6)
    assert config.rope.scaling.attention_factor == attention_factor
    assert config.max_positions == 131_072


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_on_a_mesh_have_the_losses_of_torch(name, tmp_path):
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path, ignore=DROPOUTS)
    expected = train(theirs, SEQ)
    check_twenty_steps(config, read_params(tmp_path, config), expected["rows"], expected["losses"])


def json_of(path):
    """As write_model formats it."""
    return (json.dumps(json.loads(path.read_text()), indent=2, sort_keys=True) + "\n").encode()


@pytest.mark.parametrize("name", ["gpt2-bytes", "llama-bytes", "bloom-bytes"])
def test_our_model_has_the_same_logits_there(name, tmp_path):
    config = transformer.preset(name, vocab_size=VOCAB)
    params = init_params(transformer.param_table(config), jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params
    )
    write_model(tmp_path, config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    np.testing.assert_allclose(their_logits(theirs), our_logits(config, params), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "olmoe-1b-7b"]
)
def test_a_published_model_has_as_many_params_there(name):
    config = transformer.preset(name)
    keys = config_json(config, "bfloat16")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
        )
    assert sum(param.numel() for param in theirs.parameters()) == count_params(
        transformer.param_table(config)
    )


def test_bfloat16_goes_there_and_back(tmp_path):
    theirs = make_theirs("llama-grouped").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    params = read_params(tmp_path / "theirs", config, dtype="bfloat16")
    write_model(tmp_path / "back", config, params)
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert back.dtype == torch.bfloat16
    assert all(torch.equal(back.state_dict()[n], t) for n, t in theirs.state_dict().items())
