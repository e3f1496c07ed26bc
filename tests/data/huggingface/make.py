"""Makes the small checkpoints in this folder, and what transformers computes from them.

    python tests/data/huggingface/make.py

Made with transformers 5.23.0, torch 2.13.0 and safetensors 0.8.0. All weights are drawn anew, none of them zero or one, so
that each of them is seen in the logits. The Llama has grouped heads, a head of its own and several files.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

HERE = Path(__file__).parent
VOCAB = 24


def make_models() -> dict[str, PreTrainedModel]:
    llama = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    return {
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=8, n_embd=12, n_layer=2, n_head=3)),
        "llama": LlamaForCausalLM(llama),
        "bloom": BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=12, n_layer=2, n_head=3)),
    }


def draw(model: PreTrainedModel) -> None:
    """Fills a model with numbers, norms around one."""
    for name, param in model.named_parameters():
        is_norm = param.ndim == 1 and name.endswith("weight")
        param.data.normal_(mean=float(is_norm), std=0.3)


def main() -> None:
    torch.manual_seed(0)
    for name, model in make_models().items():
        draw(model.eval())
        tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 8))
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.numpy()
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.save_pretrained(HERE / name, max_shard_size="8KB" if name == "llama" else "1GB")
        (HERE / name / "generation_config.json").unlink()
        np.savez(HERE / name / "expected.npz", tokens=tokens.astype(np.int32), logits=logits)


if __name__ == "__main__":
    main()
