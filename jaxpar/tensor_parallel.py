"""Tensor parallelism: how weights are sharded over the ``tensor`` axis. XLA inserts the collectives.

A weight W [in, out] on tensor=2, and what each device computes of y = x W:

    column_parallel           row_parallel
      in |W0|W1|                in |W0  |      x = [x0 x1]
         |  |  |                   |----|
         |  |  |                   |W1  |
      y = [x W0, x W1]          y = x0 W0 + x1 W1       one all-reduce
      each has half of y        each has all of y

If a column-parallel weight is followed by a row-parallel one, as in the attention and MLP of a transformer, each device's
half of y is the half of x that it needs next: the pair takes one all-reduce forward and one backward (Shoeybi et al. 2019,
arXiv 1909.08053, section 3).

Sequence parallelism shards the activations between such pairs, which are otherwise replicated, along the sequence
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). An all-gather and a reduce-scatter then replace each all-reduce
and together move the same bytes, and norms and the residual stream take 1 / tensor of the memory:

    stream [b, t/2, d] --norm--> all-gather --> x [b, t, d] --column, row--> sum, scattered --> stream [b, t/2, d]

``value_and_grad`` does not store x, which is the input of the pair on every device. The backward pass gathers it again: one
more all-gather for each pair.

If a model has fewer key and value heads than ``tensor``, each device computes a copy of one, for its own query heads
(``TransformerConfig.for_tensor``). At rest the weights to queries, keys and values are then sharded over head_dim, so that no
device holds a copy of params, gradients or optimizer state; one all-to-all of the layer's weights makes the copies.
"""

from collections.abc import Callable
from functools import partial, reduce

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, Float

from jaxpar import documents
from jaxpar._compat import cudnn_attention, cudnn_attention_gradients
from jaxpar.fields import arg, check_kind
from jaxpar.mesh import DATA, TENSOR
from jaxpar.shard_map import each_on_its_tensor_shard

# Dims of a transformer's params to axes (models/transformer/params.py): attention by heads, column then row; the MLP by its
# hidden width, column then row; experts by their number; embedding and head by vocabulary.
_SPLIT = ("vocab", "heads", "kv_heads", "mlp", "experts", "copied_head_dim")
_WHOLE = (
    "expert_mlp",
    "router",
    "embed",
    "copied_kv_heads",
    "head_dim",
    "qkv",
    "gate",
    "positions",
)
TRANSFORMER_RULES: dict[str, str | None] = {
    **dict.fromkeys(_SPLIT, TENSOR),
    **dict.fromkeys(_WHOLE),
}
# In place of those above, what splits the experts of a model by the ``split`` of its ``Experts``: their number, or their
# hidden width.
EXPERT_RULES: dict[str, dict[str, str | None]] = {
    "experts": {"experts": TENSOR, "expert_mlp": None},
    "expert_mlp": {"experts": None, "expert_mlp": TENSOR},
}
# Or replicas own them, whatever ``split`` is; ``tensor`` then splits the hidden width.
EXPERTS_OVER_DATA: dict[str, str | None] = {"experts": DATA, "expert_mlp": TENSOR}


def column_parallel(*, ndim: int = 2) -> PartitionSpec:
    """Returns the spec of a weight ``[in, out]`` split by column: its last dim, out, is sharded over ``tensor``.

    Args:
        ndim: Number of dims of the weight; 1 is the bias ``[out]`` of a column-parallel weight.
    """
    return PartitionSpec(*(None,) * (_checked(ndim) - 1), TENSOR)


def row_parallel(*, ndim: int = 2) -> PartitionSpec:
    """Returns the spec of a weight ``[in, out]`` split by row: its first dim, in, is sharded over ``tensor``.

    The bias ``[out]`` of a row-parallel weight is added after the sum, so it is replicated.

    Args:
        ndim: Number of dims of the weight.
    """
    return PartitionSpec(TENSOR, *(None,) * (_checked(ndim) - 1))


def vocab_parallel(*, vocab_dim: int = 0) -> PartitionSpec:
    """Returns the spec of an embedding ``[vocab, embed]`` split over its vocabulary.

    Args:
        vocab_dim: 0 for an embedding ``[vocab, embed]``, 1 for an output projection ``[embed, vocab]``.
    """
    if vocab_dim not in (0, 1):
        raise ValueError(
            f"vocab_dim must be 0 or 1; got {vocab_dim}. Use 0 for [vocab, embed], 1 for [embed, vocab]."
        )
    return column_parallel() if vocab_dim else row_parallel()


def _checked(ndim: int) -> int:
    check_kind((int,), "an integer", "Give the number of dims of the weight.", ndim=ndim)
    if ndim < 1:
        raise ValueError(
            f"a split weight must have at least one dim; got ndim={ndim}. Use jaxpar.replicated() for scalars."
        )
    return ndim


_cudnn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


def flash_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    bias: Float[Array, "rows bias_heads seq seq"] | None = None,
    *,
    window: int | None = None,
    kernel: Callable[..., Array] = _cudnn,
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns causal attention from a fused kernel that each device runs on its own heads; for ``TransformerConfig.attention``.

    XLA cannot partition cuDNN's kernel where ``data`` and ``stage`` are manual, as in ``value_and_grad``: compilation for more
    than one device would fail with an internal error. Therefore the heads are split here.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        bias: Added to the scores, for each row or the same for all, for each head or the same for all.
        window: Each position attends to this many positions, itself included; None: to all up to itself.
        kernel: ``kernel(q, k, v, bias)``, with ``local_window_size=(window - 1, 0)`` where there is a window; by default
            cuDNN's flash attention, for 16-bit floats on NVIDIA GPUs.

    **Collectives**: none.
    """
    heads = PartitionSpec(None, None, TENSOR)
    of_bias = None if bias is None else PartitionSpec(None, TENSOR if bias.shape[1] > 1 else None)
    specs = (heads, heads, heads, of_bias)
    kernel = kernel if window is None else partial(kernel, local_window_size=(window - 1, 0))
    return each_on_its_tensor_shard(kernel, in_specs=specs, out_specs=heads)(q, k, v, bias)


# For keys and values that are gathered over ``context`` (models/transformer/flash_chunks.py).
flash_attention.kernel_of_chunks = cudnn_attention, cudnn_attention_gradients  # pyright: ignore[reportFunctionMemberAccess]
# For several documents in a row (documents.py).
flash_attention.kernel_of_documents = documents.CUDNN  # pyright: ignore[reportFunctionMemberAccess]

# The axis over which the sequence of an activation is split, and that of its gradient.
_PLACES = {
    "stream": (TENSOR, TENSOR),
    "in": (None, TENSOR),
    "out": (TENSOR, None),
}


def sequence_parallel(x: Float[Array, "..."], where: str) -> Float[Array, "..."]:
    """Returns the activation ``x`` with the sharding constraint of sequence parallelism.

    ``transformer.make_model(config, constrain=sequence_parallel)`` turns it on. Outside ``value_and_grad``,
    where there is no mesh, and on one whose ``tensor`` is 1 ``x`` is returned unchanged.

    Args:
        x: An activation ``[batch, seq, embed]``.
        where: "stream": between column-row pairs; x and its gradient are sharded. "in": input of a pair; x is gathered, and its
            gradient, a sum over the shards, is sharded. "out": output of a pair; x, a sum over the shards, is sharded, and its
            gradient is gathered; so are rows that a vocabulary-parallel lookup finds. "kv_heads": as in ``split_copied_heads``.

    Raises:
        ValueError: The ``tensor`` axis does not divide the sequence.

    **Collectives**: over ``tensor`` an all-gather for "in" and a reduction for "out" in the forward pass, and the reverse
    in the backward pass, which repeats the gather for "in", since only a shard of x is stored. On GPUs and TPUs XLA turns the
    reduction into a reduce-scatter. On CPUs it remains an all-reduce whose result is sliced, which costs more than no sequence
    parallelism.
    """
    if where == "kv_heads":
        return split_copied_heads(x, where)
    forward, backward = _PLACES[where]
    mesh = jax.sharding.get_abstract_mesh()
    if not _is_automatic(mesh) or mesh.shape[TENSOR] == 1:
        return x
    if x.shape[1] % mesh.shape[TENSOR]:
        raise ValueError(
            "sequence parallelism splits the sequence over the tensor axis, which must divide it; got a sequence of "
            f"{x.shape[1]}, {arg(tensor=mesh.shape[TENSOR])}. Choose a sequence of {-(-x.shape[1] // mesh.shape[TENSOR])} "
            f"times {mesh.shape[TENSOR]}, or leave sequence parallelism off."
        )
    own, of_gradient = (
        PartitionSpec(PartitionSpec.UNCONSTRAINED, axis, None) for axis in (forward, backward)
    )
    return _constrained(x, own, (of_gradient,))


def _is_automatic(mesh: AbstractMesh) -> bool:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return not mesh.empty and kinds.get(TENSOR) == AxisType.Auto


def split_copied_heads(x: Float[Array, "..."], where: str) -> Float[Array, "..."]:
    """Returns ``x``, with the sharding constraint of copied key and value heads if that is what it is.

    ``transformer.make_model(config.for_tensor(tensor), constrain=split_copied_heads)`` uses it. Without it the numbers are the
    same, and the traffic is up to XLA. Outside ``value_and_grad`` ``x`` is returned unchanged.

    Args:
        x: An activation, or a weight or bias ``[..., kv_heads, qkv, head_dim]`` with copied heads.
        where: "kv_heads": x is sharded over its heads, and its gradient over head_dim, as the params are. Others: unchanged.

    **Collectives**: for "kv_heads" one all-to-all of the weight over ``tensor`` in each forward and backward pass of a layer,
    and one of its gradient.
    """
    if where != "kv_heads" or not _is_automatic(jax.sharding.get_abstract_mesh()):
        return x
    heads, head_dim = (PartitionSpec(*(None,) * (x.ndim - back), TENSOR) for back in (3, 1))
    # First by heads, so that the gradient of the weight moves and not that of the activation: the sum over copies is local.
    return _constrained(x, heads, (heads, head_dim))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _constrained(
    x: Float[Array, "..."], spec: PartitionSpec, of_gradient: tuple[PartitionSpec, ...]
) -> Array:
    """Returns ``x`` with a sharding constraint, whose gradient has others, one after another."""
    del of_gradient
    return jax.lax.with_sharding_constraint(x, spec)


# A constraint alone would also apply to the gradient: the sum of "in" would be replicated, then sliced.
_constrained.defvjp(
    lambda x, spec, of_gradient: (_constrained(x, spec, of_gradient), None),
    lambda spec, of_gradient, _, ct: (reduce(jax.lax.with_sharding_constraint, of_gradient, ct),),
)
