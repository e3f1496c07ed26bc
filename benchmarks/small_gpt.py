"""The GPT that the CPU comparisons train: 8 layers, 256 wide, 4 heads, 128 positions, 512 tokens, batch 32, float32.

Pre-LayerNorm, learned positions, tanh GELU, an untied head; initial values from ``numpy.random.RandomState(0)`` and one batch
from ``RandomState(1234)``, so that programs in any library can train the same model: with SGD at 0.05 its first losses are
6.28772, 6.25203, 6.22753, 6.20622. The model itself is in `plain_gpt.py`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from plain_gpt import FIRST_LOSSES, SMOKE, Shape, embed, head, layer, make_batch, make_params

import jaxpar

__all__ = ["FIRST_LOSSES", "SMOKE", "Shape", "embed", "head", "layer", "make_batch", "make_params"]


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
