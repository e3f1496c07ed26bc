"""The sizes and options of a transformer such as GPT-2, Llama or BLOOM: one block with switches, which covers many families."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.numpy as jnp

from jaxpar.models.transformer.rope import RopeScaling

BIASES = (True, False, "qkv", "attention", "mlp")
COMPUTE_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer.

    Attributes:
        vocab_size: The number of tokens in the vocabulary.
        num_layers: The number of blocks of attention and MLP.
        embed_dim: Width of the activations between blocks.
        num_heads: The number of query heads, each ``head_dim`` wide.
        num_kv_heads: The number of key and value heads, each shared by a group of query heads (Ainslie et al. 2023, arXiv
            2305.13245); None: ``num_heads``.
        explicit_head_dim: Width of a head; None: ``embed_dim / num_heads``.
        mlp_dim: Hidden width of the MLP; None: 4 times ``embed_dim``.
        max_positions: Length of a learned table of positions; ignored for other kinds of positions, which have no limit.
        norm: "layer": LayerNorm with scale and shift. "rms": RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467).
        norm_order: "pre": the inputs of attention and MLP are normalized. "post": their outputs are, before they are added
            (OLMo 2, arXiv 2501.00656).
        qk_norm: RMSNorm of queries and keys before they are rotated. "head": of each head (Qwen3, arXiv 2505.09388). "width":
            of all heads together (OLMo 2). None: none.
        positions: "learned": a table. "rope": rotated queries and keys (Su et al. 2021, arXiv 2104.09864), first half of a
            head against second half. "alibi": a penalty on distance (Press et al. 2021, arXiv 2108.12409).
        mlp: "gelu", in its tanh form, or "swiglu" (Shazeer 2020, arXiv 2002.05202).
        window: Each position attends to this many positions, itself included; None: to all up to itself (Mistral, arXiv
            2310.06825).
        biases: Which linear maps have biases: True: all. "qkv": those to queries, keys and values. "attention": those and the
            output of attention. "mlp": those of the MLP. False: none.
        tied: Whether the head uses the weights of the token embedding.
        norm_embedding: Whether the embedding is normalized before the first block.
        norm_epsilon: The constant added to the variance.
        rope_theta: Base of the wavelengths of "rope".
        rope_scaling: How wavelengths are stretched for longer sequences; None: not at all.
        kv_copies: Copies of each key and value head that a pass computes, so that a ``tensor`` axis divides them; see
            ``for_tensor``. The params, and so checkpoints, are the same.
        vocab_multiple: The rows of the embedding are padded to a multiple of this, so that a ``tensor`` axis divides them;
            logits of the padding rows are the lowest finite number of their dtype.
        compute_dtype: The dtype of matrix products and activations. Params keep their own dtype and are cast at each use;
            softmax and norms are computed in float32 or wider.
        attention: "xla" runs anywhere; "cudnn" is flash attention on one NVIDIA GPU, for 16-bit ``compute_dtype``. Or a
            function ``(q, k, v, bias) -> mixed`` of causal attention, such as ``jaxpar.flash_attention``, which
            runs cuDNN's on any mesh; it also gets ``window=`` where a window is shorter than the sequence. With a cache or in
            float64 "xla" is always used.
        tokens: "bytes": the tokens are the bytes of a text, as ``jaxpar.data.text`` reads it. None: those of a tokenizer.
        ignored: For a model that was read from a ``config.json``, the keys that the caller chose to ignore, and their values.
            They have no effect and are written back on export; configs that differ only in them are equal.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    explicit_head_dim: int | None = None
    mlp_dim: int | None = None
    max_positions: int = 1024
    norm: Literal["layer", "rms"] = "layer"
    norm_order: Literal["pre", "post"] = "pre"
    qk_norm: Literal["head", "width"] | None = None
    positions: Literal["learned", "rope", "alibi"] = "learned"
    window: int | None = None
    mlp: Literal["gelu", "swiglu"] = "gelu"
    biases: bool | Literal["qkv", "attention", "mlp"] = True
    tied: bool = True
    norm_embedding: bool = False
    norm_epsilon: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    kv_copies: int = 1
    vocab_multiple: int = 1
    compute_dtype: Any = jnp.float32
    attention: Literal["xla", "cudnn"] | Callable[..., Any] = "xla"
    tokens: Literal["bytes"] | None = None
    ignored: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "max_positions", "vocab_multiple", "kv_copies")
        optional = ("num_kv_heads", "mlp_dim", "explicit_head_dim", "window")
        for name in (*sizes, *(name for name in optional if getattr(self, name) is not None)):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}. Choose 1 or more.")
        for name, of in (("num_heads", "embed_dim"), ("kv_heads", "num_heads"), ("kv_copies", "group_size")):
            if name == "num_heads" and self.explicit_head_dim:
                continue
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
        if self.positions == "rope" and self.head_dim < 4 and self.rope_scaling and self.rope_scaling.kind == "dynamic":
            raise ValueError(
                f'a "dynamic" rope scaling needs two pairs or more, so head_dim must be 4 or more; got {self.head_dim}. Choose '
                "fewer num_heads, or another kind of rope scaling."
            )
        if not any(self.biases is one or self.biases == one for one in BIASES):
            raise ValueError(
                f"biases must be one of {', '.join(map(repr, BIASES))}; got {self.biases!r}. Choose one of them."
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
        return self.explicit_head_dim or self.embed_dim // self.num_heads

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

    def has_biases(self, where: Literal["qkv", "out", "mlp"]) -> bool:
        """Returns whether the linear maps to queries, keys and values, out of attention, or of the MLP have biases."""
        return self.biases is True or self.biases == where or (self.biases == "attention" and where != "mlp")

    def for_tensor(self, tensor: int) -> "TransformerConfig":
        """Returns the model with as many copies of its key and value heads as a ``tensor`` axis needs to divide them.

        With 2 of them, 8 query heads and ``tensor=4``, each device computes 2 query heads and one of 2 copies of their key and
        value head. The gradient of a head is the sum over its copies. The weights at rest are sharded over ``head_dim``.

        Args:
            tensor: The size of the axis.

        Raises:
            ValueError: The axis does not divide the query heads.
        """
        copies = tensor // math.gcd(tensor, self.kv_heads)
        if self.num_heads % tensor or self.group_size % copies:
            fits = [n for n in range(1, self.num_heads + 1) if self._fits(n)]
            raise ValueError(
                f"the tensor axis must divide the heads, and the copies of each key and value head its query heads; got "
                f"tensor={tensor}, num_heads={self.num_heads}, num_kv_heads={self.kv_heads}. Choose tensor from "
                f"{', '.join(map(str, fits))}."
            )
        return replace(self, kv_copies=copies)

    def _fits(self, tensor: int) -> bool:
        return self.num_heads % tensor == 0 and self.group_size % (tensor // math.gcd(tensor, self.kv_heads)) == 0
