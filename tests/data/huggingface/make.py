"""Makes the small checkpoints in this folder, and what transformers and torch compute from them.

    python tests/data/huggingface/make.py              all of them, and rope.npz
    python tests/data/huggingface/make.py granite      only these, with the numbers that they have among all

A new family is the last of OTHERS: the numbers of those before it stay as they are.

Made with transformers 5.23.0 (granite: 5.24.0), torch 2.13.0 and safetensors 0.8.0. All weights are drawn anew, none of them
zero or one, so that each of them is seen in the logits. The Llama has grouped heads, a head of its own and several files.
expected.npz has logits, texts that transformers continues, and the losses of 20 steps of torch's AdamW. rope.npz has the logits
of the Llama with scaled positions, on more tokens than it has positions.
"""

import shutil
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
VOCAB, EOS, PAD = 24, 3, 0
FIRST = ("gpt2", "llama", "bloom")
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
ENDS = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPE = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA_3 | {"original_max_position_embeddings": 6},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
    },
    "yarn-scaled": {
        **{
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "truncate": False,
        },
        **{"mscale": 0.7, "mscale_all_dim": 1.4},
    },
}
_LONG = {"rope_theta": 500_000.0, "factor": 8.0}
# As Llama 3.1, and Qwen2.5 for long texts: heads of 128, and max_position_embeddings.
PUBLISHED_ROPE = {
    "linear": (4096, _LONG | {"rope_type": "linear"}),
    "dynamic": (4096, _LONG | {"rope_type": "dynamic"}),
    "llama3": (
        131_072,
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        | _LONG
        | {"rope_type": "llama3"},
    ),
    "yarn": (
        131_072,
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32_768,
        },
    ),
}
# Each differs from LLAMA in what sets its family apart. Those of a later table are made after the others.
OTHERS = [
    {
        "llama3.1": (
            "Llama",
            {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": ROPE["llama3"]},
        ),
        "mistral": ("Mistral", {"sliding_window": 3}),
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "qwen3": ("Qwen3", {"head_dim": 6}),
        "olmo2": ("Olmo2", {}),
    },
    {
        "smollm2": (  # with the keys of its own that its config.json has
            "Llama",
            {
                "tie_word_embeddings": True,
                "rms_norm_eps": 1e-5,
                "is_llama_config": True,
                "rope_interleaved": False,
            },
        ),
    },
    {
        "granite": (
            "Granite",
            {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.6,
                "logits_scaling": 2.5,
            },
        ),
    },
]


def make_first() -> dict[str, PreTrainedModel]:
    return {
        "gpt2": make(
            "GPT2",
            "LMHeadModel",
            {"vocab_size": VOCAB, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 6},
        ),
        "llama": make("Llama", "ForCausalLM", LLAMA),
        "bloom": make(
            "Bloom",
            "ForCausalLM",
            {"vocab_size": VOCAB, "hidden_size": 12, "n_layer": 2, "n_head": 6},
        ),
    }


def make_families(families: dict[str, tuple[str, dict]]) -> dict[str, PreTrainedModel]:
    return {
        name: make(kind, "ForCausalLM", LLAMA | ENDS | own)
        for name, (kind, own) in families.items()
    }


def make(kind: str, head: str, sizes: dict) -> PreTrainedModel:
    return getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**sizes))


def generate(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Returns prompts of unequal lengths, padded with -1 on the right, and their likeliest continuations up to the end."""
    most, num_tokens = (
        (4, 4) if model.config.model_type == "gpt2" else (7, 12)
    )  # GPT-2 has 8 positions
    rng = np.random.default_rng(7)
    rows = [rng.integers(4, VOCAB, length)[:most] for length in (2, 7, 1, 5, 4, 3)]
    left = np.stack([np.pad(row, (most - len(row), 0), constant_values=PAD) for row in rows])
    mask = np.stack([np.arange(most) >= most - len(row) for row in rows])
    with torch.no_grad():
        found = model.generate(
            torch.from_numpy(left),
            attention_mask=torch.from_numpy(mask).long(),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=PAD,
        ).numpy()[:, most:]
    found = np.pad(found, ((0, 0), (0, num_tokens - found.shape[1])), constant_values=PAD)
    right = np.stack([np.pad(row, (0, most - len(row)), constant_values=-1) for row in rows])
    return {"prompts": right.astype(np.int32), "continued": found.astype(np.int32)}


def train(model: PreTrainedModel, seq: int = 8) -> dict[str, np.ndarray]:
    """Trains a model in evaluation mode; returns the rows of 20 steps, and the loss of each."""
    rng, vocab = np.random.default_rng(8), model.config.vocab_size
    rows = rng.integers(1, vocab, (20, 8, seq + 1)).astype(
        np.int32
    )  # no PAD: torch gives its row no gradient
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1
    )
    losses = []
    for batch in torch.from_numpy(rows).long():
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, vocab), batch[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"rows": rows, "losses": np.array(losses, np.float32)}


def rope() -> dict[str, np.ndarray]:
    """Returns the logits of the Llama with each kind of scaling."""
    tokens = np.random.default_rng(9).integers(0, VOCAB, (2, 24))
    found: dict[str, np.ndarray] = {"tokens": tokens.astype(np.int32)}
    for name, scaling in ROPE.items():
        config = transformers.LlamaConfig(
            **LLAMA | {"rope_parameters": {"rope_theta": 1000.0} | scaling}
        )
        model = transformers.LlamaForCausalLM.from_pretrained(HERE / "llama", config=config)
        with torch.no_grad():
            found[name] = model(torch.from_numpy(tokens)).logits.numpy()
    for name, (positions, scaling) in PUBLISHED_ROPE.items():
        sizes = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": positions}
        config = transformers.LlamaConfig(**sizes, rope_parameters=scaling)
        turns, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=3 * positions)
        found[f"turns of {name}"] = np.array([*turns.numpy(), scale], np.float32)
    return found


def draw(model: PreTrainedModel) -> None:
    """Fills a model with numbers, norms around one."""
    for name, param in model.named_parameters():
        is_norm = param.ndim == 1 and name.endswith("weight")
        param.data.normal_(mean=float(is_norm), std=0.3)


def main(names: Collection[str]) -> None:
    known = [*FIRST, *(name for families in OTHERS for name in families)]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"a name must be one of {', '.join(known)}; got {unknown[0]}")
    torch.manual_seed(0)
    save(make_first(), names)
    for families in OTHERS:
        save(make_families(families), names)
    if not names:
        np.savez(HERE / "rope.npz", **rope())


def save(models: dict[str, PreTrainedModel], names: Collection[str]) -> None:
    """Draws the numbers of all models, and writes those of the names, or all, with what they compute."""
    for name, model in models.items():
        draw(model.eval())
        if names and name not in names:
            continue
        tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 8))
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.numpy()
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.save_pretrained(HERE / name, max_shard_size="8KB" if name == "llama" else "1GB")
        expected = (
            {"tokens": tokens.astype(np.int32), "logits": logits} | generate(model) | train(model)
        )
        if name in FIRST:  # with the eos of their classes
            (HERE / name / "generation_config.json").unlink()
        np.savez(HERE / name / "expected.npz", **expected)


if __name__ == "__main__":
    main(sys.argv[1:])
