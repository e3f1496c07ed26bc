"""The GPT that the CPU comparisons train: 8 layers, 256 wide, 4 heads, 128 positions, 512 tokens, batch 32, float32.

Pre-LayerNorm, learned positions, tanh GELU, an untied head; initial values from ``numpy.random.RandomState(0)`` and one batch
from ``RandomState(1234)``, so that programs in any library can train the same model: with SGD at 0.05 its first losses are
6.28772, 6.25203, 6.22753, 6.20622.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxpar

FIRST_LOSSES = (6.28772, 6.25203, 6.22753, 6.20622)
SMOKE = {"layers": 8, "embed": 16, "positions": 8, "vocab": 16}  # a tiny one, to check that a benchmark runs


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
    num_layers, embed, heads, head_dim = shape.layers, shape.embed, shape.heads, shape.embed // shape.heads
    normal = lambda *dims: (0.02 * rng.randn(*dims)).astype(np.float32)
    ones, zeros = (lambda *dims: np.ones(dims, np.float32)), (lambda *dims: np.zeros(dims, np.float32))
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
    tokens = np.random.RandomState(1234).randint(0, shape.vocab, (shape.batch, shape.positions + 1)).astype(np.int32)
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
    hidden = jax.nn.gelu(normalise(x, p["scale_2"], p["shift_2"]) @ p["w_up"] + p["b_up"], approximate=True)
    return x + hidden @ p["w_down"] + p["b_down"]


def head(outer, x):
    return normalise(x, outer["scale"], outer["shift"]) @ outer["w_head"]


def normalise(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale + shift


def loss(logits, batch):
    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])


MODEL = jaxpar.LayeredModel(embed, layer, head)


def rules(tensor: int) -> dict:
    """Returns sharding rules: attention sharded by heads, the MLP by its width, the rest replicated."""
    if tensor == 1:
        return {"**": jaxpar.replicated()}
    return {
        "layers/w_qkv": PartitionSpec(None, None, "tensor"),
        "layers/b_qkv": PartitionSpec(None, "tensor"),
        "layers/w_out": jaxpar.row_parallel(ndim=3),
        "layers/w_up": jaxpar.column_parallel(),
        "layers/b_up": jaxpar.column_parallel(ndim=1),
        "layers/w_down": jaxpar.row_parallel(),
        "**": jaxpar.replicated(),
    }


def one_device(params, batch, num_microbatches):
    """The reference: plain JAX on one device, with gradients of equal microbatches averaged in a scan."""

    def mean(params, microbatch):
        total, weight = loss(MODEL.apply(params, microbatch), microbatch)
        return total / weight

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(mean)(params, microbatch)), None

    parts = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), parts)
    return jax.tree.map(lambda t: t / num_microbatches, total)
