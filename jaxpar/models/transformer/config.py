"""The sizes and options of a transformer such as GPT-2, Llama or BLOOM, and the published models by name.

Shapes are those of the papers and model cards; tests/test_transformer.py checks the parameter counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.numpy as jnp

COMPUTE_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer, pre-norm.

    Attributes:
        vocab_size: The number of tokens in the vocabulary.
        num_layers: The number of blocks of attention and MLP.
        embed_dim: Width of the activations between blocks.
        num_heads: The number of query heads, each ``embed_dim / num_heads`` wide.
        num_kv_heads: The number of key and value heads, each shared by a group of query heads (Ainslie et al. 2023, arXiv
            2305.13245); None: ``num_heads``.
        mlp_dim: Hidden width of the MLP; None: 4 times ``embed_dim``.
        max_positions: Length of a learned table of positions; ignored for other kinds of positions, which have no limit.
        norm: "layer": LayerNorm with scale and shift. "rms": RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467).
        positions: "learned": a table. "rope": rotated queries and keys (Su et al. 2021, arXiv 2104.09864), first half of a
            head against second half. "alibi": a penalty on distance (Press et al. 2021, arXiv 2108.12409).
        mlp: "gelu", in its tanh form, or "swiglu" (Shazeer 2020, arXiv 2002.05202).
        biases: Whether linear maps have biases.
        tied: Whether the head uses the weights of the token embedding.
        norm_embedding: Whether the embedding is normalized before the first block.
        norm_epsilon: The constant added to the variance.
        rope_theta: Base of the wavelengths of "rope".
        vocab_multiple: The rows of the embedding are padded to a multiple of this, so that a ``tensor`` axis divides them;
            logits of the padding rows are the lowest finite number of their dtype.
        compute_dtype: The dtype of matrix products and activations. Params keep their own dtype and are cast at each use;
            softmax and norms are computed in float32 or wider.
        attention: "xla" runs anywhere; "cudnn" is flash attention on one NVIDIA GPU, for 16-bit ``compute_dtype``. Or a
            function ``(q, k, v, bias) -> mixed`` of causal attention, such as ``jaxpar.flash_attention``, which
            runs cuDNN's on any mesh. With a cache or in float64 "xla" is always used.
        tokens: "bytes": the tokens are the bytes of a text, as ``jaxpar.data.text`` reads it. None: those of a tokenizer.
        ignored: For a model that was read from a ``config.json``, the keys that the caller chose to ignore, and their values.
            They have no effect and are written back on export; configs that differ only in them are equal.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    max_positions: int = 1024
    norm: Literal["layer", "rms"] = "layer"
    positions: Literal["learned", "rope", "alibi"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    biases: bool = True
    tied: bool = True
    norm_embedding: bool = False
    norm_epsilon: float = 1e-5
    rope_theta: float = 10_000.0
    vocab_multiple: int = 1
    compute_dtype: Any = jnp.float32
    attention: Literal["xla", "cudnn"] | Callable[..., Any] = "xla"
    tokens: Literal["bytes"] | None = None
    ignored: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "max_positions", "vocab_multiple")
        optional = [name for name in ("num_kv_heads", "mlp_dim") if getattr(self, name) is not None]
        for name in (*sizes, *optional):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}. Choose 1 or more.")
        for name, of in (("num_heads", "embed_dim"), ("kv_heads", "num_heads")):
            if getattr(self, of) % getattr(self, name):
                told = "num_kv_heads" if name == "kv_heads" else name
                divisors = [n for n in range(1, getattr(self, of) + 1) if getattr(self, of) % n == 0]
                raise ValueError(
                    f"{told} must divide {of}; got {told}={getattr(self, name)}, {of}={getattr(self, of)}. "
                    f"Choose {told} from {', '.join(map(str, divisors))}."
                )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f'positions="rope" rotates pairs, so head_dim must be even; got embed_dim={self.embed_dim}, '
                f"num_heads={self.num_heads}, head_dim={self.head_dim}. Choose an embed_dim that 2 * num_heads divides, such "
                f"as {-(-self.embed_dim // (2 * self.num_heads)) * 2 * self.num_heads}."
            )
        self._check_compute_dtype()
        if self.attention == "cudnn" and jnp.dtype(self.compute_dtype).itemsize != 2:
            raise ValueError(
                f'attention="cudnn" needs a 16-bit compute_dtype; got {jnp.dtype(self.compute_dtype)}. '
                'Use compute_dtype="bfloat16", or attention="xla".'
            )

    def _check_compute_dtype(self) -> None:
        try:
            is_known = jnp.dtype(self.compute_dtype).name in COMPUTE_DTYPES
        except TypeError:
            is_known = False
        if not is_known:
            raise ValueError(
                f"compute_dtype must be one of {', '.join(COMPUTE_DTYPES)}; got {self.compute_dtype!r}. Choose "
                '"float32", or "bfloat16".'
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def group_size(self) -> int:
        """The number of query heads that share a key and value head."""
        return self.num_heads // self.kv_heads

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the MLP."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, including padding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def _gpt2(num_layers: int, embed_dim: int, num_heads: int, **others: Any) -> TransformerConfig:
    """Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2."""
    shape: dict[str, Any] = {"vocab_size": 50_257, "max_positions": 1024} | others
    return TransformerConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads, **shape)


def _llama(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **others: Any) -> TransformerConfig:
    """Touvron et al. 2023, arXiv 2302.13971, 2307.09288; Llama 3: arXiv 2407.21783; TinyLlama: arXiv 2401.02385."""
    shape: dict[str, Any] = {"vocab_size": 32_000, "max_positions": 2048, "tied": False} | others
    return TransformerConfig(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        norm="rms",
        positions="rope",
        mlp="swiglu",
        biases=False,
        **shape,
    )


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
    "llama-bytes": _llama(4, 128, 8, 384, num_kv_heads=4, **_BYTES),
    "bloom-bytes": _bloom(4, 128, 4, **_BYTES),
}


def preset(name: str, **changes: Any) -> TransformerConfig:
    """Returns a published config by its name, with some fields changed.

    Args:
        name: One of ``PRESETS``.
        **changes: Fields of ``TransformerConfig`` to change, such as ``compute_dtype`` or ``vocab_multiple``.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no transformer of this name; got {name!r}. Choose from {', '.join(PRESETS)}.")
    return replace(PRESETS[name], **changes)
