"""A small GPT with all that a pipeline must carry, for tests that share it. The reference is one device, plain JAX.

Its embedding is also its head. In x travel, beside the activations, a mask of the tokens that count, positions, and a PRNG
key a row, from which each layer draws its dropout: the draws belong to the row, wherever it is computed.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar
from tests.support import tiny

RULES = {
    "layers/w_qkv": jaxpar.column_parallel(ndim=3),
    "layers/w_out": jaxpar.row_parallel(ndim=3),
    "layers/w_up": jaxpar.column_parallel(),
    "layers/b_up": jaxpar.column_parallel(ndim=1),
    "layers/w_down": jaxpar.row_parallel(),
    "layers/*": jaxpar.replicated(),
    "outer/tokens": jaxpar.vocab_parallel(),
    "outer/*": jaxpar.replicated(),
}
KEEP = 0.8


def make_params(
    *, num_layers, embed=8, heads=4, mlp=8, vocab=8, positions=4, seed=0, dtype=np.float64
):
    """Params on the host, none of them zero or one, so that each gradient is there to be wrong."""
    rng = np.random.default_rng(seed)
    head_dim = embed // heads
    draw = lambda *shape, around=0.0: (around + 0.3 * rng.normal(size=shape)).astype(dtype)
    layers = {
        "scale_1": draw(num_layers, embed, around=1.0),
        "shift_1": draw(num_layers, embed),
        "w_qkv": draw(num_layers, embed, 3 * head_dim, heads),
        "w_out": draw(num_layers, heads, head_dim, embed),
        "scale_2": draw(num_layers, embed, around=1.0),
        "w_up": draw(num_layers, embed, mlp),
        "b_up": draw(num_layers, mlp),
        "w_down": draw(num_layers, mlp, embed),
        "b_down": draw(num_layers, embed),
    }
    outer = {
        "tokens": draw(vocab, embed),
        "positions": draw(positions, embed),
        "scale": draw(embed, around=1.0),
    }
    return {"outer": outer, "layers": layers}


def make_batch(*, num_rows=16, num_positions=4, vocab=8, seed=0, dtype=np.float64):
    """Rows of uneven weight, so that no two parts of the batch weigh the same."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, num_positions)
    return {
        "tokens": rng.integers(0, vocab, shape).astype(np.int32),
        "targets": rng.integers(0, vocab, shape).astype(np.int32),
        "weight": (rng.uniform(0, 2, shape) * (rng.uniform(size=shape) < 0.7)).astype(dtype),
        "mask": rng.uniform(size=shape) < 0.8,
        "key": jax.random.split(jax.random.key(seed), num_rows),
    }


def norm(h, scale):
    centred = h - h.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale[None, None]


def attention(p, h, seen):
    mixed = norm(h, p["scale_1"]) + p["shift_1"][None, None]
    q, k, v = jnp.split(jnp.einsum("btd,dch->bhtc", mixed, p["w_qkv"]), 3, axis=-1)
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
    scores = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9), axis=-1)
    return jnp.einsum("bhts,bhsk,hkd->btd", scores, v, p["w_out"])


def mlp(p, h):
    up = jax.nn.gelu(norm(h, p["scale_2"]) @ p["w_up"] + p["b_up"][None, None], approximate=True)
    return up @ p["w_down"] + p["b_down"][None, None]


def embed(outer, batch):
    position = jnp.broadcast_to(
        jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)[None], batch["tokens"].shape
    )
    h = outer["tokens"][batch["tokens"]] + outer["positions"][position]
    return {"h": h, "mask": batch["mask"], "position": position, "key": batch["key"]}


def layer(p, x):
    position = x["position"]
    before = (position[:, :, None] > position[:, None, :]) & x["mask"][:, None, :]
    h = x["h"] + attention(p, x["h"], before | jnp.eye(position.shape[1], dtype=bool)[None])
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, KEEP, h.shape[1:]))(x["key"])
    h = h + jnp.where(kept, mlp(p, h) / KEEP, 0)
    return x | {"h": h, "key": jax.vmap(lambda key: jax.random.fold_in(key, 1))(x["key"])}


def head(outer, x):
    return norm(x["h"], outer["scale"]) @ outer["tokens"].T


def loss(outputs, batch):
    return jaxpar.losses.softmax_cross_entropy(outputs, batch["targets"], batch["weight"])


MODEL = jaxpar.LayeredModel(embed, layer, head)


@partial(jax.jit, static_argnames="model")
def reference(params, batch, model=MODEL):
    """The loss and gradients of one device."""

    def mean(params):
        total, weight = loss(model.apply(params, batch), batch)
        return total / weight

    return jax.value_and_grad(mean)(params)


def on_mesh(mesh, params):
    return tiny.on_mesh(mesh, params, RULES)
