"""The small GPT of `small_gpt.py` as functions of plain JAX: its values, its batch, embedding, layer and head.

This file does not import jaxpar, so that a peer in an environment of its own can read it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

FIRST_LOSSES = (6.28772, 6.25203, 6.22753, 6.20622)
SMOKE = {
    "layers": 8,
    "embed": 16,
    "positions": 8,
    "vocab": 16,
}  # a tiny one, to check that a benchmark runs


@dataclass(frozen=True)
class Shape:
    """Extents of the model and its batch."""

    layers: int = 8
    embed: int = 256
    heads: int = 4
    positions: int = 128
    vocab: int = 512
    batch: int = 32


def make_params(shape: Shape) -> dict:
    """Returns initial values, float32, as a LayeredModel's tree on the host."""
    rng = np.random.RandomState(0)
    num_layers, embed, heads, head_dim = (
        shape.layers,
        shape.embed,
        shape.heads,
        shape.embed // shape.heads,
    )
    normal = lambda *dims: (0.02 * rng.randn(*dims)).astype(np.float32)
    ones, zeros = (
        (lambda *dims: np.ones(dims, np.float32)),
        (lambda *dims: np.zeros(dims, np.float32)),
    )
    tokens, positions = normal(shape.vocab, embed), normal(shape.positions, embed)
    layers = {
        "w_qkv": normal(num_layers, embed, 3, heads, head_dim),
        "w_out": normal(num_layers, heads, head_dim, embed),
        "w_up": normal(num_layers, embed, 4 * embed),
        "w_down": normal(num_layers, 4 * embed, embed),
        "b_qkv": zeros(num_layers, 3, heads, head_dim),
        "b_out": zeros(num_layers, embed),
        "b_up": zeros(num_layers, 4 * embed),
        "b_down": zeros(num_layers, embed),
        "scale_1": ones(num_layers, embed),
        "shift_1": zeros(num_layers, embed),
        "scale_2": ones(num_layers, embed),
        "shift_2": zeros(num_layers, embed),
    }
    outer = {"tokens": tokens, "positions": positions, "w_head": normal(embed, shape.vocab)}
    return {"outer": outer | {"scale": ones(embed), "shift": zeros(embed)}, "layers": layers}


def make_batch(shape: Shape) -> dict:
    """Returns random tokens, and as targets the tokens one position later."""
    tokens = (
        np.random.RandomState(1234)
        .randint(0, shape.vocab, (shape.batch, shape.positions + 1))
        .astype(np.int32)
    )
    return {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


def embed(outer, batch):
    return outer["tokens"][batch["tokens"]] + outer["positions"][None]


def layer(p, x):
    """Attention and MLP, each after a LayerNorm and around a residual. b batch, t s positions, d embed, h heads, k head_dim."""
    qkv = jnp.einsum("btd,dchk->cbhtk", normalise(x, p["scale_1"], p["shift_1"]), p["w_qkv"])
    q, k, v = qkv + p["b_qkv"][:, None, :, None, :]
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
    past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    attention = jax.nn.softmax(jnp.where(past, scores, -1e30), axis=-1)
    x = x + jnp.einsum("bhts,bhsk,hkd->btd", attention, v, p["w_out"]) + p["b_out"]
    hidden = jax.nn.gelu(
        normalise(x, p["scale_2"], p["shift_2"]) @ p["w_up"] + p["b_up"], approximate=True
    )
    return x + hidden @ p["w_down"] + p["b_down"]


def head(outer, x):
    return normalise(x, outer["scale"], outer["shift"]) @ outer["w_head"]


def normalise(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale + shift
    )
