"""The sizes and options of a transformer such as GPT-2, Llama or Mixtral: one block with switches that covers many families."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn

import jax.numpy as jnp

from jaxpar.fields import arg, check_at_least, check_field, check_kind, check_one_of, check_positive
from jaxpar.models.transformer.old_names import accepts_old_names
from jaxpar.models.transformer.rope import Rope

COMPUTE_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of each layer: small MLPs in place of one, of which each token uses a few (``experts.py``).

    Their router chooses them (``router.py``). Mesh and devices decide ``split``, ``products``, ``exchange`` and ``buffer``,
    which change no number, unless a buffer is too small.

    Attributes:
        count: The number of experts of a layer (Shazeer et al. 2017, arXiv 1701.06538).
        per_token: The number of experts that a token uses.
        mlp_dim: Hidden width of an expert; None: that of the model's MLP.
        num_shared: Experts that every token uses in addition, computed as one MLP of so many times their width.
        num_dense_layers: The first so many layers have one MLP for all tokens, the model's ``mlp_dim`` wide, in place of
            experts (DeepSeek-V3, arXiv 2412.19437, section 4.2). They run in the embedding, so a pipeline does not split them.
        num_groups: Groups of consecutive experts, of which a token uses only ``groups_per_token`` (DeepSeek-V2, arXiv
            2405.04434). A group is as good as its best expert, by "sigmoid" as its two best together.
        groups_per_token: The number of groups that a token's experts may come from.
        router_score: "softmax" over the experts (Mixtral, Qwen3, OLMoE), or the "sigmoid" of each (DeepSeek-V3).
        router_bias: Whether each expert has a bias that counts when experts are chosen, and not in their weights
            (Wang et al. 2024, arXiv 2408.15664). Its gradient counts tokens; see ``balance_experts``.
        normalized_routing: Whether the weights of a token's experts are divided by their sum.
        routed_scaling_factor: The weights of a token's experts are multiplied by this.
        balance_coefficient: Factor of the balance loss of each document, as ``add_routing_losses`` adds it: a sum over layers,
            each of 1 if experts are used equally. ``router_aux_loss_coef`` is what transformers calls the same strength.
        z_coefficient: Factor of the mean square of the logarithm of the router's normalizer (Zoph et al. 2022, arXiv
            2202.08906).
        capacity_factor: An expert takes at most this many times its equal share of the tokens of a row, the first ones, and
            drops the others; None: nothing is dropped. With a cache nothing is dropped either.
        split: The dim of the experts' weights that a tensor axis splits: "experts", or "expert_mlp", their hidden width.
            Sharding rules should name the same one. It changes traffic, not numbers.
        products: How rows are multiplied by the weights of their experts. "ragged": ``jax.lax.ragged_dot``, which runs
            anywhere, and on GPUs costs ``count`` times the operations. "tiles": a kernel for GPUs (``grouped_product.py``).
            "auto": "tiles" on GPUs where it can be used, else "ragged". Or a function ``(rows, weights, sizes) -> rows``, as
            ``jax.lax.ragged_dot`` is.
        exchange: How tokens get to experts that a sharding puts over ``data``. "all_to_all": each to the owners of its
            experts. "gather": all to all owners. "auto": "gather" where a token has as many experts as there are owners.
            It changes traffic, not numbers.
        buffer: A replica that owns experts has room for this many times the rows of its own tokens; in a step in which it
            gets more the loss is NaN. None: for all rows that it can get. Without such a sharding it has no effect.
    """

    count: int
    per_token: int = 2
    mlp_dim: int | None = None
    num_shared: int = 0
    num_dense_layers: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    normalized_routing: bool = True
    routed_scaling_factor: float = 1.0
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0
    capacity_factor: float | None = None
    split: Literal["experts", "expert_mlp"] = "experts"
    products: Literal["auto", "ragged", "tiles"] | Callable[..., Any] = "auto"
    exchange: Literal["auto", "all_to_all", "gather"] = "auto"
    buffer: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            check_field(each, getattr(self, each.name))
        positive = ("count", "per_token", "mlp_dim", "num_groups", "groups_per_token")
        others = (
            "num_shared",
            "num_dense_layers",
            "routed_scaling_factor",
            "balance_coefficient",
            "z_coefficient",
        )
        check_at_least(1, **{name: getattr(self, name) for name in positive})
        check_at_least(0, **{name: getattr(self, name) for name in others})
        _check_divides(self, "num_groups", "count")
        self._check_per_token()
        # Replicas get as many rows as their tokens have on average.
        check_at_least(
            1, "Choose such as 1.5, or leave it out for room for all rows.", buffer=self.buffer
        )
        check_positive(
            "Choose such as 1.25, or None to drop nothing.", capacity_factor=self.capacity_factor
        )
        for name, default in {"products": "auto", "buffer": None}.items():
            if self.capacity_factor is not None and getattr(self, name) != default:
                raise ValueError(
                    f"with a capacity the experts are one batched product, so {name} has no effect; got "
                    f"capacity_factor={self.capacity_factor}, {name}={getattr(self, name)!r}. Leave one of them out."
                )

    def _check_per_token(self) -> None:
        if self.groups_per_token > self.num_groups:
            raise ValueError(
                f"a token can use as many groups as there are; got groups_per_token={self.groups_per_token}, "
                f"num_groups={self.num_groups}. Choose groups_per_token from 1 to {self.num_groups}."
            )
        there = self.count // self.num_groups * self.groups_per_token
        if self.per_token > there:
            of_groups = f" in {self.groups_per_token} groups" if self.num_groups > 1 else ""
            raise ValueError(
                f"a token can use as many experts as there are; got per_token={self.per_token} of {there} "
                f"experts{of_groups}. Choose per_token from 1 to {there}."
            )


# Fields of TransformerConfig that are 1 or more, those that are positive numbers, and those that divide another.
POSITIVE = (
    "vocab_size",
    "num_layers",
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "explicit_head_dim",
    "mlp_dim",
    "max_positions",
    "window",
    "vocab_multiple",
    "kv_copies",
)
MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_divisor",
)
DIVIDES = {"num_heads": "embed_dim", "num_kv_heads": "num_heads", "kv_copies": "group_size"}


@accepts_old_names(experts=Experts, rope=Rope)
@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer.

    Attributes:
        vocab_size: The number of tokens in the vocabulary.
        num_layers: The number of blocks of attention and MLP, or experts.
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
        embedding_multiplier: The embedding of the tokens is multiplied by this (Granite, and below).
        attention_multiplier: The scores of attention are multiplied by this before the softmax; None: by ``head_dim**-0.5``.
        residual_multiplier: The outputs of attention and MLP are multiplied by this before they are added.
        logits_divisor: The logits are divided by this.
        norm_epsilon: The constant added to the variance.
        rope: The wavelengths of "rope"; ignored for other kinds of positions.
        kv_copies: Copies of each key and value head that a pass computes, so that a ``tensor`` axis divides them; see
            ``for_tensor``. The params, and so checkpoints, are the same.
        vocab_multiple: The rows of the embedding are padded to a multiple of this, so that a ``tensor`` axis divides them;
            logits are those of the ``vocab_size`` words alone.
        compute_dtype: The dtype of matrix products and activations. Params keep their own dtype and are cast at each use;
            softmax and norms are computed in float32 or wider.
        products: What layers multiply by their weights in: "compute": the compute dtype. "fp8": FP8 with a scale for each
            tensor (``jaxpar.fp8``), of weights of at least 1,024 by 1,024 (``products.py``), on Hopper and later GPUs.
        attention: "xla" runs anywhere; "cudnn" is flash attention on one NVIDIA GPU, for 16-bit ``compute_dtype``. Or a
            function ``(q, k, v, bias) -> mixed`` of causal attention, such as ``jaxpar.flash_attention``, which
            runs cuDNN's on any mesh; it also gets ``window=`` where a window is shorter than the sequence. A function may have
            the attribute ``kernel_of_chunks``, a ``flash_chunks.Kernel``, for gathered keys, and ``kernel_of_documents``, a
            ``jaxpar.documents.Kernel``, for rows of several documents. With a cache or in float64 "xla"
            is always used.
        max_documents: The most documents of a row, its padding included: cuDNN's attention on Hopper and later GPUs is then
            told where they lie (``jaxpar.documents``), in memory that grows with this number. A row with more gives NaN, with
            any attention. None: any number, parted by a bias [seq, seq].
        attention_over_context: How attention reads other positions where a mesh splits sequences over ``context``. "gather":
            keys and values are gathered. "ulysses": heads are exchanged for positions, which needs as many heads. None: what
            moves fewer bytes (``attention.over_context``).
        experts: The experts of each layer; None: one MLP for all tokens.
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
    biases: Literal[True, False, "qkv", "attention", "mlp"] = True
    tied: bool = True
    norm_embedding: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    norm_epsilon: float = 1e-5
    rope: Rope = field(default_factory=Rope)
    kv_copies: int = 1
    vocab_multiple: int = 1
    compute_dtype: Any = jnp.float32
    products: Literal["compute", "fp8"] = "compute"
    attention: Literal["xla", "cudnn"] | Callable[..., Any] = "xla"
    max_documents: int | None = None
    attention_over_context: Literal["gather", "ulysses"] | None = None
    experts: Experts | None = None
    tokens: Literal["bytes"] | None = None
    ignored: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            check_field(each, getattr(self, each.name))
        kinds = (Experts, None)
        check_kind(
            kinds, "Experts or None", "Write experts=Experts(count=8), say.", experts=self.experts
        )
        check_kind((Rope,), "a Rope", "Write rope=Rope(theta=10_000), say.", rope=self.rope)
        check_at_least(1, **{name: getattr(self, name) for name in POSITIVE})
        check_positive(
            "Leave it out for a model without it.",
            **{name: getattr(self, name) for name in MULTIPLIERS},
        )
        for name, of in DIVIDES.items():
            if name != "num_heads" or self.explicit_head_dim is None:
                _check_divides(self, name, of)
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f'positions="rope" rotates pairs, so head_dim must be even; got embed_dim={self.embed_dim}, '
                f"num_heads={self.num_heads}, head_dim={self.head_dim}. Choose an embed_dim that 2 * num_heads divides, such "
                f"as {-(-self.embed_dim // (2 * self.num_heads)) * 2 * self.num_heads}."
            )
        is_dynamic = self.rope.scaling is not None and self.rope.scaling.kind == "dynamic"
        if self.positions == "rope" and self.head_dim < 4 and is_dynamic:
            raise ValueError(
                f'a "dynamic" rope scaling needs two pairs or more, so head_dim must be 4 or more; got {self.head_dim}. Choose '
                "fewer num_heads, or another kind of rope scaling."
            )
        check_at_least(
            2, "Leave it out where each row is one document.", max_documents=self.max_documents
        )
        check_one_of(COMPUTE_DTYPES, compute_dtype=_name_of(self.compute_dtype))
        if self.attention == "cudnn" and jnp.dtype(self.compute_dtype).itemsize != 2:
            raise ValueError(
                f'attention="cudnn" needs a 16-bit compute_dtype; got {jnp.dtype(self.compute_dtype)}. '
                'Use compute_dtype="bfloat16", or attention="xla".'
            )
        if self.experts is not None:
            self._check_experts(self.experts)

    def _check_experts(self, experts: Experts) -> None:
        if experts.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"some layers must have experts; got num_dense_layers={experts.num_dense_layers}, "
                f"num_layers={self.num_layers}. Choose num_dense_layers from 0 to {self.num_layers - 1}, or leave out experts."
            )
        if self.has_biases("mlp"):
            raise ValueError(
                f"experts have no biases; got {experts.count} experts, biases={self.biases!r}. Choose biases=False, or "
                '"qkv" or "attention".'
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
    def num_leading_layers(self) -> int:
        """The layers before the stacked ones, which run in the embedding: the dense ones of a model with experts."""
        return 0 if self.experts is None else self.experts.num_dense_layers

    @property
    def num_stacked_layers(self) -> int:
        """The layers that are stacked, of which each stage of a pipeline has some: all but the leading ones."""
        return self.num_layers - self.num_leading_layers

    @property
    def expert_hidden_dim(self) -> int:
        """Hidden width of an expert."""
        own = None if self.experts is None else self.experts.mlp_dim
        return own or self.hidden_dim

    @property
    def has_routing_losses(self) -> bool:
        """Whether the model's outputs have sums of its routers beside the logits (``RoutedLogits``)."""
        own = self.experts
        if own is None:
            return False
        return bool(
            own.router_bias or own.balance_coefficient or own.z_coefficient or own.capacity_factor
        )

    @property
    def router_aux_loss_coef(self) -> float:
        """``balance_coefficient`` as transformers has it: there the loss is of all layers together, and at least top-k."""
        if self.experts is None:
            return 0.0
        return _rounded(
            self.experts.balance_coefficient * self.num_stacked_layers / self.experts.per_token
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, including padding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def has_biases(self, where: Literal["qkv", "out", "mlp"]) -> bool:
        """Returns whether the linear maps to queries, keys and values, out of attention, or of the MLP have biases."""
        return (
            self.biases is True
            or self.biases == where
            or (self.biases == "attention" and where != "mlp")
        )

    def with_experts(self, **changes: Any) -> "TransformerConfig":
        """Returns the model with some fields of its ``experts`` changed.

        Args:
            **changes: Fields of ``Experts``.

        Raises:
            ValueError: It has no experts.
        """
        if self.experts is None:
            got = ", ".join(f"{name}={value!r}" for name, value in changes.items())
            raise ValueError(
                f"{got} is for a model with experts; got one without. Give experts=Experts(count=8), say."
            )
        return replace(self, experts=replace(self.experts, **changes))

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
            self._refuse_tensor(tensor)
        return replace(self, kv_copies=copies)

    def check_tensor(self, tensor: int) -> None:
        """Raises ValueError unless a ``tensor`` axis divides all that ``TRANSFORMER_RULES`` split: heads, hidden width."""
        if not self._is_divided(tensor):
            self._refuse_tensor(tensor)

    def _refuse_tensor(self, tensor: int) -> NoReturn:
        sizes = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        sizes |= {} if self.experts else {"mlp_dim": self.hidden_dim}
        sizes |= {"vocab_rows": self.vocab_rows}
        got = ", ".join(f"{name}={size}" for name, size in sizes.items())
        fitting = filter(self._is_divided, range(1, self.num_heads + 1))
        raise ValueError(
            "the tensor axis must divide the heads, mlp_dim and the vocabulary, and, beyond the key and value heads, head_dim "
            f"and the query heads of each; got {arg(tensor=tensor)}, {got}. Choose {arg('tensor')} from "
            f"{', '.join(map(str, fitting))}."
        )

    def _is_divided(self, tensor: int) -> bool:
        copies = tensor // math.gcd(tensor, self.kv_heads)
        whole = [
            (self.num_heads, tensor),
            (self.group_size, copies),
            (self.vocab_rows, tensor),
        ]
        if copies > 1:  # weights at rest are then sharded over head_dim
            whole.append((self.head_dim, tensor))
        if not self.experts:
            whole.append((self.hidden_dim, tensor))
        return all(size % count == 0 for size, count in whole)


def balance_of_aux_loss(
    router_aux_loss_coef: float, experts_per_token: int, num_layers: int
) -> float:
    """Returns the ``balance_coefficient`` of the same strength as a coefficient of transformers.

    Its loss is the number of experts times the sum over experts of share of uses times mean score, both over all layers and
    tokens: ``experts_per_token`` if experts are used equally, for any number of layers. jaxpar's is then ``num_layers``.

    Args:
        router_aux_loss_coef: The coefficient in transformers.
        experts_per_token: The experts of a token.
        num_layers: The layers with experts.
    """
    return _rounded(router_aux_loss_coef * experts_per_token / num_layers)


def _rounded(coefficient: float) -> float:
    """Returns a coefficient without the rounding of a product and a division, so that it survives the way there and back."""
    return float(f"{coefficient:.14g}")


def _check_divides(config: Any, name: str, of: str) -> None:
    divisor, whole = getattr(config, name) or 1, getattr(config, of) or 0
    if whole % divisor:
        fits = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise ValueError(
            f"{name} must divide {of}; got {name}={divisor}, {of}={whole}. Choose {name} from {fits}."
        )


def _name_of(dtype: Any) -> Any:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return dtype
