"""Blocks of the fuzz test that mix the positions of a row, as norms and routers do, and that mix the rows, which is wrong."""

import jax
import jax.numpy as jnp

from tests.support.fuzz.block import EXPERTS, D, T, block, block_of_h


def normalized(a, axes):
    centred = a - a.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axes, keepdims=True) + 0.1)


# --- layers -----------------------------------------------------------------------------------------------------------


@block_of_h("v")
def group_norm(p, h, v):
    groups = h.reshape(*h.shape[:2], 2, D // 2)
    return normalized(groups, (1, 3)).reshape(h.shape) * p[v][None, None]


@block_of_h("v")
def instance_norm(p, h, v):
    return normalized(h, (1,)) * p[v][None, None]


@block_of_h("w")
def squeeze_and_excite(p, h, w):
    return h * jax.nn.sigmoid(h.mean(1) @ p[w])[:, None]


@block_of_h("ww")
def linear_attention(p, h, q, k):
    q, k = (jax.nn.elu(h @ p[name]) + 1 for name in (q, k))
    summed = jnp.einsum("btd,bte->bde", k, h)
    return jnp.einsum("btd,bde->bte", q, summed) / jnp.einsum("btd,bsd->bt", q, k)[..., None]


@block_of_h()
def rotary(p, h):
    angles = jnp.arange(T)[:, None] * 0.5 ** jnp.arange(D // 2)[None]
    pairs = h.reshape(*h.shape[:2], D // 2, 2)
    turned = (
        jax.lax.complex(*(pairs[..., i].astype(jnp.float64) for i in (0, 1)))
        * jnp.exp(1j * angles)[None]
    )
    return jnp.stack([turned.real, turned.imag], -1).reshape(h.shape)


# --- routers ----------------------------------------------------------------------------------------------------------


@block_of_h("we")
def expert_choice(p, h, w, e):
    """Each expert takes half of the tokens of a row."""
    scores = jax.nn.softmax(h @ p[w][:, :EXPERTS]).swapaxes(1, 2)
    weights, tokens = jax.lax.top_k(scores, T // 2)
    taken = jnp.take_along_axis(h[:, None], tokens[..., None], axis=2)
    made = jnp.einsum("betd,edf,bet->betf", taken, p[e], weights)
    return h + jnp.einsum("bets,betf->bsf", jax.nn.one_hot(tokens, T, dtype=h.dtype), made)


@block_of_h("we")
def soft_experts(p, h, w, e):
    """Each expert gets a mean of the tokens of a row, and each token a mean of what experts make."""
    scores = h @ p[w][:, :EXPERTS]
    slots = jnp.einsum("bte,btd->bed", jax.nn.softmax(scores, axis=1), h)
    return h + jnp.einsum("bte,bed,edf->btf", jax.nn.softmax(scores, axis=2), slots, p[e])


@block_of_h("we")
def hashed_experts(p, h, w, e):
    chosen = jnp.argmax(jax.lax.stop_gradient(h) @ p[w], axis=-1) % EXPERTS
    return h + jnp.einsum("btd,btdf->btf", h, p[e][chosen])


@block_of_h("we")
def balanced_experts(p, h, w, e):
    """Scores that are normalized over the tokens of a row and over the experts in turn."""
    scores = h @ p[w][:, :EXPERTS]
    for axis in (1, 2, 1, 2):
        scores = scores - jax.nn.logsumexp(scores, axis=axis, keepdims=True)
    return h + jnp.einsum("bte,btd,edf->btf", jnp.exp(scores), h, p[e])


@block_of_h("vw")
def some_depths(p, h, v, w):
    """Half of the tokens of a row go through the layer."""
    scores = h @ p[v]
    ranks = jnp.sum(scores[:, :, None] < scores[:, None, :], axis=-1)
    return jnp.where((ranks < T // 2)[..., None], h + scores[..., None] * jnp.tanh(h @ p[w]), h)


# --- what makes rows depend on others ---------------------------------------------------------------------------------


@block("v")
def batch_norm(p, x, v):
    return x | {"h": (normalized(x["h"], (0, 1)) * p[v][None, None]).astype(x["h"].dtype)}


@block("v")
def centred_by_the_batch(p, x, v):
    h = x["h"] * p[v][None, None]
    return x | {"h": (h - h.mean(0, keepdims=True)).astype(x["h"].dtype)}


@block("v", needs=["aux"])
def balance_of_the_batch(p, x, v):
    """A product of two means over the batch, as the balance loss of routers often is."""
    scores = jax.nn.softmax(x["h"] * p[v][None, None])
    shares = jnp.mean(scores == scores.max(-1, keepdims=True), axis=(0, 1))
    return x | {"aux": x["aux"] + D * jnp.sum(shares * scores.mean((0, 1))).astype(x["aux"].dtype)}
