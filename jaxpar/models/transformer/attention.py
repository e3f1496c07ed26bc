"""Causal self-attention: a projection to queries, keys and values, positions, the softmax, and an output projection.

    x [b, t, d] --w_qkv--> q [b, t, heads, head_dim], k and v [b, s, kv_heads, head_dim] --softmax--> --w_out--> [b, t, d]

With a cache, the keys and values of earlier positions are read from it, and those of x are added to it. A row may hold several
documents, its segments: no position attends to another segment, and positions begin anew in each.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.models.transformer.config import TransformerConfig

Cache = tuple[Array, Array]


def attention(
    config: TransformerConfig,
    params: PyTree,
    x: Float[Array, "batch seq embed"],
    cache: Cache | None = None,
    start: Int[Array, ""] | int = 0,
    segments: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq embed"], Cache | None]:
    """Returns the attention of each position to itself and earlier ones, and the cache with the keys and values of ``x``.

    Args:
        config: The model.
        params: The params under ``attention`` of a layer.
        x: The normalized input.
        cache: Keys and values ``[batch, length, kv_heads, head_dim]``, filled up to ``start``.
        start: The position of the first token of ``x``.
        segments: The segment of each token; None: each row is one.
    """
    q, k, v = project(config, params, x)
    positions = start + jnp.arange(x.shape[1])
    if config.positions == "rope":
        own = positions if segments is None else positions_in(segments)
        q, k = rotate(q, own, config.rope_theta), rotate(k, own, config.rope_theta)
    if cache is not None:
        at = (0, start, 0, 0)
        k, v = (jax.lax.dynamic_update_slice(old, new, at) for old, new in zip(cache, (k, v), strict=True))
    mixed = attend(config, q, k, v, positions, segments)
    out = jnp.einsum("bthk,hkd->btd", mixed, params["w_out"].astype(x.dtype))
    return _plus(out, params, "b_out"), None if cache is None else (k, v)


def project(
    config: TransformerConfig, params: PyTree, x: Float[Array, "batch seq embed"]
) -> tuple[Array, Array, Array]:
    """Returns queries ``[batch, seq, heads, head_dim]``, and keys and values ``[batch, seq, kv_heads, head_dim]``."""
    qkv = _plus(jnp.einsum("btd,dhgk->bthgk", x, params["w_qkv"].astype(x.dtype)), params, "b_qkv")
    q, k, v = jnp.split(qkv, (config.group_size, config.group_size + 1), axis=3)
    return q.reshape(*x.shape[:2], config.num_heads, config.head_dim), k[:, :, :, 0], v[:, :, :, 0]


def _plus(x: Array, params: PyTree, name: str) -> Array:
    return x + params[name].astype(x.dtype)[None, None] if name in params else x


def positions_in(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns the position of each token in its segment, a run of equal numbers."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1])[None], segments.shape)
    is_first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)


def rotate(
    x: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "*batch seq"], theta: float
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns ``x`` with each pair (i, i + head_dim / 2) rotated by an angle of position / theta^(2 i / head_dim)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    half = x.shape[-1] // 2
    angles = jnp.multiply.outer(positions.astype(wide), theta ** -(jnp.arange(half, dtype=wide) / half))
    angles = angles.reshape(-1, positions.shape[-1], 1, half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the penalty of each head per unit of distance.

    For a power of two the slopes are 2^(-8/n), 2^(-16/n) and so on; for other numbers those of the power below, then every
    second slope of the power above.

    **Reference**: Press et al. 2021, arXiv 2108.12409, section 3 and the authors' code.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * power, 2) / power)
    return np.concatenate([slopes, between])[:num_heads]


def attend(
    config: TransformerConfig,
    q: Array,
    k: Array,
    v: Array,
    positions: Int[Array, " seq"],
    segments: Int[Array, "batch seq"] | None = None,
) -> Array:
    """Returns for each query the mean of the values up to its position, weighted by the softmax of its scores.

    Args:
        config: The model.
        q: Queries ``[batch, seq, heads, head_dim]``.
        k: Keys ``[batch, length, kv_heads, head_dim]`` from position 0; those after the last query are masked.
        v: Values, likewise.
        positions: The positions of the queries in their rows.
        segments: The segment of each query and key, of which there are as many; those of other segments are masked.
    """
    ahead = jnp.arange(k.shape[1])[None, :] - positions[:, None]
    bias = _alibi(config, ahead, q.dtype) if config.positions == "alibi" else None
    is_whole = q.shape[1] == k.shape[1]  # no cache: with is_causal a flash kernel skips later positions
    kernel = config.attention if is_whole and q.dtype != jnp.float64 else "xla"
    together = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    if callable(kernel):
        return kernel(q, k, v, bias if together is None else _masked(bias, together, q.dtype))
    if kernel == "cudnn":
        _check_can_be_split()
    elif q.dtype in (jnp.float64, jnp.float16):
        # jax.nn.dot_product_attention computes the softmax of float64 in float32, and does not compile for float16 on a CPU.
        seen = (ahead <= 0)[None, None]
        return _written_out(q, k, v, bias, seen if together is None else seen & together)
    mask = together if is_whole else (ahead <= 0)[None, None]
    return jax.nn.dot_product_attention(q, k, v, bias, mask, is_causal=is_whole, implementation=kernel)


def _masked(bias: Array | None, seen: Bool[Array, "batch 1 seq seq"], dtype: jnp.dtype) -> Array:
    """Returns a bias that is so low where ``seen`` is false that the softmax gives 0, and no sum with a score overflows."""
    lowest = jnp.asarray(jnp.finfo(dtype).min / 2, dtype)
    return jnp.where(seen, jnp.zeros((1, 1, 1, 1), dtype) if bias is None else bias.astype(dtype), lowest)


def _check_can_be_split() -> None:
    """Raises if XLA would have to partition cuDNN's kernel, which it cannot: some axes manual, others not."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and mesh.manual_axes and mesh.auto_axes:
        raise ValueError(
            'attention="cudnn" runs on one device, or where no axis is manual; got a mesh of '
            f"{dict(mesh.shape)}. Use attention=jaxpar.flash_attention, which is the same kernel on any mesh."
        )


def _alibi(config: TransformerConfig, ahead: Int[Array, "seq length"], dtype: jnp.dtype) -> Array:
    wide = dtype if config.attention != "xla" else jnp.promote_types(dtype, jnp.float32)
    slopes = jnp.asarray(alibi_slopes(config.num_heads), jnp.promote_types(dtype, jnp.float32))
    return (slopes[:, None, None] * ahead[None].astype(slopes.dtype)).astype(wide)[None]


def _written_out(q: Array, k: Array, v: Array, bias: Array | None, seen: Bool[Array, "rows 1 seq length"]) -> Array:
    grouped, wide = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]), jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bthgk,bshk->bhgts", grouped, k, preferred_element_type=wide) * q.shape[3] ** -0.5
    if bias is not None:
        scores = scores + bias.reshape(1, *scores.shape[1:3], *bias.shape[2:]).astype(wide)
    weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, jnp.finfo(wide).min), axis=-1).astype(v.dtype)
    return jnp.einsum("bhgts,bshk->bthgk", weights, v).reshape(q.shape)
