"""Blocks of the fuzz test that compute with ``h``: products, norms, convolutions, transforms, orders, indices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar
from jaxpar.models.transformer import Experts, TransformerConfig
from jaxpar.models.transformer.experts import experts as experts_of_tokens
from jaxpar.models.transformer.router import route
from tests.support.fuzz.block import EXPERTS, D, T, block_of_h


@block_of_h("w", exact=True)
def matmul(p, h, w):
    return h @ p[w]


@block_of_h("v", exact=True)
def bias(p, h, v):
    return h + p[v][None, None]


@block_of_h("v", exact=True)
def scale(p, h, v):
    return h * p[v][None, None]


@block_of_h("s", exact=True)
def one_number(p, h, s):
    return h * p[s]


@block_of_h()
def tanh(p, h):
    return jnp.tanh(h)


@block_of_h()
def sin(p, h):
    return jnp.sin(h)


@block_of_h(exact=True)
def relu(p, h):
    return jnp.where(h > 0, h, 0)


@block_of_h()
def gelu(p, h):
    return jax.nn.gelu(h)


@block_of_h("w", exact=True)
def transposed(p, h, w):
    return jnp.einsum("btd,ed->bte", h, p[w])


@block_of_h("ww")
def gate(p, h, w, g):
    return jax.nn.silu(h @ p[g]) * jnp.tanh(h @ p[w])


@block_of_h("v", exact=True)
def only_params(p, h, v):
    return jnp.broadcast_to(p[v][None, None], h.shape)


@block_of_h("w", exact=True)
def read_thrice(p, h, w):
    return (h @ p[w]) @ p[w].T + p[w][:1][None]


@block_of_h("v")
def norm(p, h, v):
    centred = h - h.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 0.1) * p[v][None, None]


@block_of_h("v")
def rms(p, h, v):
    return h / jnp.sqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 0.1) * p[v][None, None]


@block_of_h()
def softmax(p, h):
    return h + jax.nn.softmax(h, axis=1)


@block_of_h()
def logsumexp(p, h):
    return h - jax.nn.logsumexp(h, axis=-1, keepdims=True)


@block_of_h("www")
def heads(p, h, q, k, v):
    split = lambda w: (h @ p[w]).reshape(*h.shape[:2], 2, D // 2)
    scores = jnp.einsum("bthc,bshc->bhts", split(q), split(k))
    before = jnp.tril(jnp.ones((T, T), bool))[None, None]
    scores = jax.nn.softmax(scores, axis=-1, where=before)
    return h + jnp.einsum("bhts,bshc->bthc", scores, split(v)).reshape(h.shape)


@block_of_h("k", exact=True)
def conv(p, h, k):
    return jax.lax.conv_general_dilated(
        h, p[k].astype(h.dtype), (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
    )


@block_of_h("k", exact=True)
def depthwise_conv(p, h, k):
    kernel = p[k][:, :1].astype(h.dtype)
    dims = ("NTC", "TIO", "NTC")
    return jax.lax.conv_general_dilated(
        h, kernel, (1,), ((2, 0),), dimension_numbers=dims, feature_group_count=D
    )


@block_of_h("v")
def fft(p, h, v):
    return jnp.fft.ifft(jnp.fft.fft(h, axis=1) * jnp.exp(1j * p[v])[None, None], axis=1).real


@block_of_h("v")
def rfft(p, h, v):
    return jnp.fft.irfft(jnp.fft.rfft(h, axis=2) * p[v][None, None, : D // 2 + 1], n=D, axis=2)


@block_of_h("v", exact=True)
def sort(p, h, v):
    return jnp.sort(h * p[v][None, None], axis=1)


@block_of_h("v", exact=True)
def argsort(p, h, v):
    return h + jnp.take_along_axis(h * p[v][None, None], jnp.argsort(h, axis=2), axis=2)


@block_of_h("v")
def sort_pairs(p, h, v):
    """Sorts one array by another."""
    return sum(jax.lax.sort((h, h * p[v][None, None]), dimension=1, num_keys=1))


@block_of_h(exact=True)
def cumsum(p, h):
    return jnp.cumsum(h, axis=1) - h.sum(axis=1, keepdims=True)


@block_of_h("v")
def cummax(p, h, v):
    return jax.lax.cummax(h * p[v][None, None], axis=2) + jax.lax.cumlogsumexp(h, axis=1)


@block_of_h(exact=True)
def flip(p, h):
    return jnp.concatenate([h[:, ::-1, 1:], h[..., :1]], axis=-1)


@block_of_h("v", exact=True)
def pad(p, h, v):
    return jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1] + p[v][None, None]


@block_of_h("we")
def experts(p, h, w, e):
    weight, chosen = jax.lax.top_k(jax.nn.softmax(h @ p[w][:, :EXPERTS]), 1)
    return jnp.einsum("btc,btcde,btd->bte", weight, p[e][chosen], h)


@block_of_h("wen")
def mixture(p, h, w, e, n):
    """The transformer's experts: dropless, or with room for a part of a row."""
    capacity = None if n == 3 else 0.5 * n
    experts = Experts(
        count=EXPERTS, per_token=1, normalized_routing=False, capacity_factor=capacity
    )
    config = TransformerConfig(
        vocab_size=1,
        num_layers=1,
        embed_dim=D,
        num_heads=1,
        mlp_dim=D,
        mlp="swiglu",
        biases=False,
        experts=experts,
    )
    weights = {"w_expert_gate": p[e], "w_expert_up": p[e][:, ::-1], "w_expert_down": p[e]}
    routing = route(experts, {"w_router": p[w][:, :EXPERTS]}, h)
    of_tokens = jaxpar.row_wise(functools.partial(experts_of_tokens, config))
    return h + of_tokens({"experts": weights}, h, routing)[0]


@block_of_h("v", exact=True)
def pool(p, h, v):
    return h + jax.lax.reduce_window(
        h * p[v][None, None], -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "SAME"
    )


@block_of_h("v", exact=True)
def update_slice(p, h, v):
    return jax.lax.dynamic_update_slice(
        h, (h[:, 1:2] * p[v][None, None]).astype(h.dtype), (0, 2, 0)
    )


@block_of_h("ww")
def factored(p, h, a, b):
    """A weight that is made from others at some cost."""
    return h @ jnp.sin(p[a] @ p[b])


@block_of_h("w")
def normed_weight(p, h, w):
    return h @ (p[w] / jnp.linalg.norm(p[w]))


@block_of_h("w")
def solve(p, h, w):
    return jnp.linalg.solve(p[w] + 4 * jnp.eye(D), h.reshape(-1, D).T).T.reshape(h.shape)


@block_of_h("w")
def cholesky(p, h, w):
    return jnp.einsum(
        "btd,de->bte",
        h,
        jnp.linalg.cholesky(p[w] @ p[w].T + jnp.eye(D)),
        precision=("highest", "default"),
    )


@block_of_h("w")
def gradient_step(p, h, w):
    """A layer that differentiates."""
    return h - 0.3 * jax.grad(lambda h: jnp.sum(jnp.sin(h @ p[w])))(h)


@block_of_h("w", exact=True)
def forward_mode(p, h, w):
    return sum(jax.jvp(lambda h: jnp.where(h > 0, h, 0) @ p[w], (h,), (h[:, ::-1],)))


@block_of_h("w")
def stopped(p, h, w):
    return h * jax.lax.stop_gradient(jax.nn.sigmoid(h @ p[w]))


@block_of_h(exact=True)
def integers(p, h):
    return h + (h > 0).astype(jnp.int32) * h.astype(jnp.int8)


@block_of_h("wL")
def quantised(p, h, w, dtype):
    """Small integers in a small dtype, where every order of operations gives the same; no gradient passes."""
    whole = lambda a: jnp.round(2 * jnp.tanh(a)).astype(dtype)
    return h * (1 + 0.1 * (whole(h) @ whole(p[w])).astype(h.dtype))


@block_of_h(exact=True)
def constants(p, h):
    return (
        h[:, ::-1] * np.array([1.0, -1.0, 1.0, 2.0] * 2)[None, None] + jnp.arange(T)[None, :, None]
    )
