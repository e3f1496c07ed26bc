"""The published transformers by name, and small ones for a laptop.

Shapes are those of the papers, model cards and published config.json files; tests/test_transformer.py checks the parameter
counts.
"""

from dataclasses import replace
from typing import Any

from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.rope import RopeScaling


def _gpt2(num_layers: int, embed_dim: int, num_heads: int, **others: Any) -> TransformerConfig:
    """Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2."""
    shape: dict[str, Any] = {"vocab_size": 50_257, "max_positions": 1024} | others
    return TransformerConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads, **shape)


def _llama(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **others: Any) -> TransformerConfig:
    """Touvron et al. 2023, arXiv 2302.13971, 2307.09288; Llama 3: arXiv 2407.21783; TinyLlama: arXiv 2401.02385.

    The same block with other switches: Mistral 7B: arXiv 2310.06825; Qwen2.5: arXiv 2412.15115; Qwen3: arXiv 2505.09388;
    SmolLM2: arXiv 2502.02737; OLMo 2: arXiv 2501.00656.
    """
    shape: dict[str, Any] = {"vocab_size": 32_000, "max_positions": 2048, "tied": False, "biases": False} | others
    return TransformerConfig(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        norm="rms",
        positions="rope",
        mlp="swiglu",
        **shape,
    )


def _mixtral(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **others: Any) -> TransformerConfig:
    """Jiang et al. 2024, arXiv 2401.04088, table 1, and the config.json files of the two models."""
    experts: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2}
    attention: dict[str, Any] = {"num_kv_heads": 8, "rope_theta": 1e6}
    return _llama(num_layers, embed_dim, num_heads, mlp_dim, **attention, **experts, **others)


def _olmoe() -> TransformerConfig:
    """Muennighoff et al. 2024, arXiv 2409.02060, table 10."""
    routing: dict[str, Any] = {"normalized_routing": False, "balance_coefficient": 0.01, "z_coefficient": 0.001}
    sizes: dict[str, Any] = {"vocab_size": 50_304, "max_positions": 4096, "num_experts": 64, "experts_per_token": 8}
    return _llama(16, 2048, 16, 1024, qk_norm="width", **sizes, **routing)


def _bloom(num_layers: int, embed_dim: int, num_heads: int, **others: Any) -> TransformerConfig:
    """BigScience 2022, arXiv 2211.05100, table 3."""
    shape: dict[str, Any] = {"vocab_size": 250_880, "max_positions": 2048} | others
    return TransformerConfig(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        positions="alibi",
        norm_embedding=True,
        **shape,
    )


_LLAMA_3: dict[str, Any] = {"vocab_size": 128_256, "num_kv_heads": 8, "max_positions": 8192, "rope_theta": 500_000.0}
_LLAMA_3_1 = _LLAMA_3 | {
    "max_positions": 131_072,
    "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_positions=8192),
}
_LLAMA_3_2 = _LLAMA_3_1 | {
    "tied": True,
    "rope_scaling": RopeScaling(kind="llama3", factor=32.0, original_positions=8192),
}
_QWEN_2_5: dict[str, Any] = {"biases": "qkv", "max_positions": 32_768, "rope_theta": 1e6, "norm_epsilon": 1e-6}
_QWEN_3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_kv_heads": 8,
    "explicit_head_dim": 128,
    "qk_norm": "head",
    "max_positions": 40_960,
    "rope_theta": 1e6,
    "norm_epsilon": 1e-6,
}
_SMOL_2: dict[str, Any] = {"vocab_size": 49_152, "max_positions": 8192, "rope_theta": 1e5, "tied": True}
_OLMO_2: dict[str, Any] = {
    "vocab_size": 100_352,
    "max_positions": 4096,
    "norm_order": "post",
    "qk_norm": "width",
    "rope_theta": 5e5,
    "norm_epsilon": 1e-6,
}
_QWEN_3_MOE: dict[str, Any] = _QWEN_3 | {
    "num_kv_heads": 4,
    "num_experts": 128,
    "experts_per_token": 8,
    "balance_coefficient": 0.001,
}
_BYTES: dict[str, Any] = {"vocab_size": 256, "max_positions": 256, "tokens": "bytes"}

PRESETS = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-7b": _llama(32, 4096, 32, 11_008, norm_epsilon=1e-6),
    "llama-13b": _llama(40, 5120, 40, 13_824, norm_epsilon=1e-6),
    "llama-33b": _llama(60, 6656, 52, 17_920, norm_epsilon=1e-6),
    "llama-65b": _llama(80, 8192, 64, 22_016),
    "llama2-7b": _llama(32, 4096, 32, 11_008, max_positions=4096),
    "llama2-70b": _llama(80, 8192, 64, 28_672, num_kv_heads=8, max_positions=4096),
    "llama3-8b": _llama(32, 4096, 32, 14_336, **_LLAMA_3),
    "llama3-70b": _llama(80, 8192, 64, 28_672, **_LLAMA_3),
    "llama3.1-8b": _llama(32, 4096, 32, 14_336, **_LLAMA_3_1),
    "llama3.1-70b": _llama(80, 8192, 64, 28_672, **_LLAMA_3_1),
    "llama3.1-405b": _llama(126, 16_384, 128, 53_248, **_LLAMA_3_1),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, **_LLAMA_3_2),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, **_LLAMA_3_2),
    "mistral-7b": _llama(32, 4096, 32, 14_336, num_kv_heads=8, max_positions=32_768, window=4096),
    "qwen2.5-0.5b": _llama(24, 896, 14, 4864, vocab_size=151_936, num_kv_heads=2, tied=True, **_QWEN_2_5),
    "qwen2.5-7b": _llama(28, 3584, 28, 18_944, vocab_size=152_064, num_kv_heads=4, **_QWEN_2_5),
    "qwen3-0.6b": _llama(28, 1024, 16, 3072, tied=True, **_QWEN_3),
    "qwen3-8b": _llama(36, 4096, 32, 12_288, **_QWEN_3),
    "smollm2-135m": _llama(30, 576, 9, 1536, num_kv_heads=3, **_SMOL_2),
    "smollm2-1.7b": _llama(24, 2048, 32, 8192, **_SMOL_2 | {"rope_theta": 130_000.0}),
    "olmo2-7b": _llama(32, 4096, 32, 11_008, **_OLMO_2),
    "olmoe-1b-7b": _olmoe(),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14_336, max_positions=32_768, balance_coefficient=0.02),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16_384, max_positions=65_536, balance_coefficient=0.001),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 6144, expert_dim=768, **_QWEN_3_MOE),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 12_288, expert_dim=1536, **_QWEN_3_MOE),
    "tinyllama-1.1b": _llama(22, 2048, 32, 5632, num_kv_heads=4),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-1b1": _bloom(24, 1536, 16),
    "bloom-1b7": _bloom(24, 2048, 16),
    "bloom-3b": _bloom(30, 2560, 32),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14_336, 112),
    "gpt3-6.7b": _gpt2(32, 4096, 32, max_positions=2048),  # Brown et al. 2020, arXiv 2005.14165, table 2.1
    # Small models of bytes, for a laptop.
    "gpt2-bytes": _gpt2(4, 128, 4, **_BYTES),
    "llama-tiny": _llama(1, 64, 1, 128, rope_theta=500_000.0, **_BYTES),
    "llama-bytes": _llama(4, 128, 8, 384, num_kv_heads=4, **_BYTES),
    "bloom-bytes": _bloom(4, 128, 4, **_BYTES),
    "moe-bytes": _llama(4, 128, 8, 48, num_kv_heads=4, num_experts=8, balance_coefficient=0.01, **_BYTES),
}

# Published models whose blocks are others, and what is missing.
REFUSED = {
    "deepseek-v3": "multi-head latent attention (MLA), DeepSeek's own, is not among the transformer's kinds of attention",
}


def preset(name: str, **changes: Any) -> TransformerConfig:
    """Returns a published config by its name, with some fields changed.

    Args:
        name: One of ``PRESETS``.
        **changes: Fields of ``TransformerConfig`` to change, such as ``compute_dtype`` or ``vocab_multiple``.
    """
    if name in REFUSED:
        raise ValueError(f"{REFUSED[name]}; got {name!r}. Choose from {', '.join(PRESETS)}.")
    if name not in PRESETS:
        raise ValueError(f"there is no transformer of this name; got {name!r}. Choose from {', '.join(PRESETS)}.")
    return replace(PRESETS[name], **changes)
