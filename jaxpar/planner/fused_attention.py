"""A stand-in for a fused kernel of causal attention, with its shapes: for planning on a machine that has no such kernel.

    config = dataclasses.replace(config, attention=planned_attention)

It is traced, never run. Like cuDNN's kernel it stores queries, keys, values, the result and a number per row of scores for the
backward pass, and no scores (Dao et al. 2022, arXiv 2205.14135, section 3).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar._compat import Primitive
from jaxpar.backward.graph import Graph, Node
from jaxpar.backward.partition import Cut, Found

FORWARD, BACKWARD = "planned_attention", "planned_attention_backward"
_forward, _backward = Primitive(FORWARD), Primitive(BACKWARD)
_forward.multiple_results = _backward.multiple_results = True


@_forward.def_abstract_eval
def _(q: Any, k: Any, v: Any, *bias: Any) -> list[Any]:
    del k, v, bias
    batch, seq, heads, _ = q.shape
    return [q, q.update(shape=(batch, heads, seq), dtype=jnp.dtype(jnp.float32))]


@_backward.def_abstract_eval
def _(q: Any, k: Any, v: Any, *others: Any) -> list[Any]:
    del others
    return [q, k, v]


@jax.custom_vjp
def planned_attention(q: Array, k: Array, v: Array, bias: Array | None = None) -> Array:
    """Returns what stands for causal attention in a traced function: ``TransformerConfig.attention`` for the planner.

    Args:
        q: Queries ``[batch, seq, heads, head_dim]``.
        k: Keys ``[batch, seq, kv_heads, head_dim]``.
        v: Values, likewise.
        bias: Added to the scores; no gradient is computed for it.
    """
    return _forward.bind(q, k, v, *([] if bias is None else [bias]))[0]


def _run(q: Array, k: Array, v: Array, bias: Array | None = None) -> tuple[Array, tuple]:
    mixed, sums = _forward.bind(q, k, v, *([] if bias is None else [bias]))
    return mixed, (q, k, v, bias, mixed, sums)


def _run_backward(kept: tuple, ct: Array) -> tuple:
    q, k, v, bias, mixed, sums = kept
    grads = _backward.bind(q, k, v, *([] if bias is None else [bias]), mixed, sums, ct)
    return (*grads, None if bias is None else jnp.zeros_like(bias))


planned_attention.defvjp(_run, _run_backward)


def attention_flops(graph: Graph, node: Node) -> int:
    """Returns the operations of the two products of scores and values below the diagonal; twice as many backward."""
    q, k = (graph.avals[i].shape for i in node.inputs[:2])
    batch, seq, heads, head_dim = q
    return (2 if node.name == BACKWARD else 1) * 2 * batch * heads * seq * k[1] * head_dim


def shard_attention(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found | None:
    """The rule of ``backward.partition`` for both kernels: each device computes its own heads."""
    del graph
    if cuts[0] != 2:
        return None
    return Found([2, 1] if node.name == FORWARD else [2, 2, 2])


RULES = {FORWARD: shard_attention, BACKWARD: shard_attention}
