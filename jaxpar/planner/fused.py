"""Kernels that are more than a product: fused attention, and products of rows with the weights of their experts.

Rows of experts are multiplied by ``models/grouped_product.py``, whose kernel is planned as a batch of products. Each expert's
rows fill whole tiles, and all experts have as many, times ``Software.expert_imbalance`` for the busiest.

``planned_attention`` stands in for a fused kernel of causal attention on a machine that has none:

    config = dataclasses.replace(config, attention=planned_attention)

It is traced, never run. Like cuDNN's kernel it stores queries, keys, values, the result and a number per row of scores for the
backward pass, and no scores (Dao et al. 2022, arXiv 2205.14135, section 3).
"""

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar._compat import Primitive, with_inner
from jaxpar.backward.cut_rules import RULES as BUILT_IN
from jaxpar.backward.cut_rules import Found, Operation, elementwise
from jaxpar.backward.graph import Graph, Node
from jaxpar.context_parallel import gather_sequence, num_parts
from jaxpar.models.grouped_product import OF_WEIGHTS, PRODUCT, TILE

FORWARD, BACKWARD = "planned_attention", "planned_attention_backward"
_forward, _backward = Primitive(FORWARD), Primitive(BACKWARD)
_forward.multiple_results = _backward.multiple_results = True


@_forward.def_abstract_eval
def _(q: Any, k: Any, v: Any, *bias: Any, window: int | None) -> list[Any]:
    del k, v, bias, window
    batch, seq, heads, _ = q.shape
    return [q, q.update(shape=(batch, heads, seq), dtype=jnp.dtype(jnp.float32))]


@_backward.def_abstract_eval
def _(q: Any, k: Any, v: Any, *others: Any, window: int | None) -> list[Any]:
    del others, window
    return [q, k, v]


def planned_attention(
    q: Array, k: Array, v: Array, bias: Array | None = None, *, window: int | None = None
) -> Array:
    """Returns what stands for causal attention in a traced function: ``TransformerConfig.attention`` for the planner.

    Where ``context`` splits sequences it gathers keys and values, unless it is given those of the whole sequence.

    Args:
        q: Queries ``[batch, seq, heads, head_dim]``.
        k: Keys ``[batch, seq, kv_heads, head_dim]``.
        v: Values, likewise.
        bias: Added to the scores; no gradient is computed for it.
        window: Each position attends to this many, itself included; None: to all up to itself.
    """
    if num_parts() > 1 and k.shape[1] == q.shape[1]:
        k = gather_sequence(k)
        v = gather_sequence(v)
    given = [q, k, v] if bias is None else [q, k, v, bias]
    return _attention(window, *given)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(window: int | None, *given: Array) -> Array:
    return _run(window, *given)[0]


def _run(window: int | None, *given: Array) -> tuple[Array, tuple]:
    mixed, sums = _forward.bind(*given, window=window)
    return mixed, (given, mixed, sums)


def _run_backward(window: int | None, kept: tuple, ct: Array) -> tuple:
    given, mixed, sums = kept
    grads = _backward.bind(*given, mixed, sums, ct, window=window)
    bias = given[3:]
    return (*grads, *map(jnp.zeros_like, bias))


_attention.defvjp(_run, _run_backward)


def attention_flops(graph: Graph, node: Node) -> int:
    """Returns the operations of the two products of scores and values below the diagonal; twice as many backward.

    Of a window, those of the scores in it.
    """
    q, k = (graph.avals[i].shape for i in node.inputs[:2])
    batch, seq, heads, head_dim = q
    num_keys = k[1]
    window = min(node.equation.params["window"] or num_keys, num_keys)
    # Twice as many as are below the diagonal and in the window.
    scores = seq * num_keys - (num_keys - window) ** 2
    forward = 2 * batch * heads * scores * head_dim
    return 2 * forward if node.name == BACKWARD else forward


def shard_attention(op: Operation) -> Found | None:
    """The rule of ``backward.partition`` for both kernels: each device computes its own heads."""
    if op.cuts[0] != 2:
        return None
    return Found([2, 1] if op.node.name == FORWARD else [2, 2, 2])


def shard_rows(op: Operation) -> Found | None:
    """The rule for what carries rows to experts and back, or multiplies them: the shards are the leading dim of all arrays."""
    shapes = *op.inputs, *op.outputs
    leading = {shape[0] for shape in shapes if len(shape) > 1}
    if set(op.cuts) <= {None, 0} and len(leading) == 1:
        return op.gives(0)
    return BUILT_IN["custom_vjp_call"](op)


def shard_look_up(op: Operation) -> Found | None:
    """The rule for a lookup with a derivative of its own: of a table whose rows are sharded the shards' finds are summed."""
    inner = with_inner(op.node.equation)
    looks_up = any(each.primitive.name == "gather" for each in inner)
    if looks_up and set(op.cuts) <= {None, 0}:
        return op.gives(None, "all-reduce")
    return elementwise(op)


RULES = {
    FORWARD: shard_attention,
    BACKWARD: shard_attention,
    "custom_vjp_call": shard_rows,
    "custom_jvp_call": shard_look_up,
}


_GROUPED = (PRODUCT.name, OF_WEIGHTS.name)


class Grouped(NamedTuple):
    """A product of rows with the weights of their experts on a device, or one that gives the gradient of the weights.

    Attributes:
        slots: Rows, of which each expert's end at a multiple of ``TILE``.
        experts: Weights.
        depth: The dim over which is summed, for the gradient that of a weight.
        columns: Columns of a weight.
        num_bytes: Bytes of operands and result.
        is_gradient: Whether it gives the gradient of the weights.
    """

    slots: int
    experts: int
    depth: int
    columns: int
    num_bytes: int
    is_gradient: bool

    @property
    def pairs(self) -> int:
        """The pairs of a token and an expert for which there are slots."""
        return self.slots - self.experts * TILE

    def as_batch(self, imbalance: float, own_share: float) -> tuple[int, int, int, int, int]:
        """Returns it as a batch of products: batch, rows, columns, depth and bytes.

        Args:
            imbalance: Rows of the busiest expert over the mean.
            own_share: The share of the pairs that the device's own experts have.
        """
        pairs = round(self.pairs * own_share * imbalance)
        num_tiles = -(-pairs // (self.experts * TILE))
        rows = num_tiles * TILE
        if self.is_gradient:
            return self.experts, self.depth, self.columns, rows, self.num_bytes
        return self.experts, rows, self.columns, self.depth, self.num_bytes


@lru_cache(maxsize=4096)
def grouped_of(node: Node) -> Grouped | None:
    """Returns the grouped product that a node is, if it is one."""
    if node.name not in ("shard_map", "custom_vjp_call", *_GROUPED):
        return None
    inner = with_inner(node.equation)
    products = [each for each in inner if each.primitive.name in _GROUPED]
    if not products:
        return None
    product = products[0]
    values = *product.invars, *product.outvars
    avals = [each.aval for each in values]
    num_bytes = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
    _, left, right, made = (aval.shape for aval in avals)
    slots = left[1]
    if product.primitive is OF_WEIGHTS:
        return Grouped(slots, made[1], left[2], right[2], num_bytes, is_gradient=True)
    return Grouped(slots, right[1], left[2], made[2], num_bytes, is_gradient=False)
