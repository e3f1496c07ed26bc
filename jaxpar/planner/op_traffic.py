"""What the ops of a layer send between devices: the collectives over ``data``, ``context`` and ``tensor`` of their nodes.

Those of a step for its params and gradients, and the messages of a pipeline, are in ``traffic.py``.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxpar._compat import constraint_of, with_inner
from jaxpar.backward.graph import Graph, Node
from jaxpar.backward.partition import Partition
from jaxpar.dtypes import num_bytes
from jaxpar.mesh import CONTEXT, DATA, TENSOR
from jaxpar.planner.fused import BACKWARD, FORWARD
from jaxpar.planner.kernels import VIEWS

EXCHANGES = {
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


class Sent(NamedTuple):
    """A collective of an op over an axis, as ``Collective``; ``of_rows`` if it joins parts of rows on their way to experts."""

    axis: str
    kind: str
    payload_bytes: int
    of_rows: bool = False


def over_data(nodes: Iterable[Node]) -> Iterator[Sent]:
    """Yields the collectives over ``data`` that carry rows to experts and back, in the form that the layer has."""
    for node in nodes:
        for each in with_inner(node.equation):
            kind = EXCHANGES.get(each.primitive.name)
            if kind and DATA in each.params["axis_name"]:
                # Inside a part that is manual over ``tensor`` the shapes are those of a shard.
                whole = each.invars if kind == "reduce-scatter" else each.outvars
                yield Sent(DATA, kind, num_bytes(value.aval for value in whole))


def over_context(graph: Graph, nodes: Iterable[Node], size: int) -> Iterator[Sent]:
    """Yields the collectives over ``context`` of attention, in the form that sends fewer bytes.

    Either keys and values are gathered in F and again in B, and their gradients scattered; or queries, keys, values and the
    result are exchanged for those of fewer heads and complete sequences.

    Args:
        graph: The graph of the layer, on a device.
        nodes: The nodes of an op in it.
        size: The number of devices of ``context``.
    """
    if size == 1:
        return
    kernels = [node for node in nodes if node.name in (FORWARD, BACKWARD)]
    for at, node in enumerate(kernels):
        q, k, v = node.inputs[:3]
        of_q = graph.num_bytes(q)
        of_kv = graph.num_bytes(k) + graph.num_bytes(v)
        heads = graph.avals[q].shape[2]
        kv_heads = graph.avals[k].shape[2]
        copies = size // math.gcd(size, kv_heads)  # of kv heads
        exchanged = 2 * of_q + of_kv * copies
        gathered = size * of_kv
        if heads % size == 0 and 2 * exchanged <= 3 * gathered:
            yield Sent(CONTEXT, "all-to-all", exchanged)
            continue
        if at == 0:  # what is gathered for a recomputed F is there for B
            yield Sent(CONTEXT, "all-gather", gathered)
        if node.name == BACKWARD:
            yield Sent(CONTEXT, "reduce-scatter", gathered)


def over_tensor(part: Partition, nodes: Iterable[Node]) -> Iterator[Sent]:
    """Yields the collectives over ``tensor`` of some nodes; a sum that is read only to be sharded is scattered at once.

    XLA for GPUs makes such a reduce-scatter; on CPU devices it sums all, and each device takes its shard.
    """
    sharded = _sharded_when_read(part)
    for node in nodes:
        for body in part.bodies.get(node.first, ()):
            yield from list(over_tensor(body.part, body.part.graph.nodes)) * body.times
        if each := part.collectives.get(node.first):
            is_scattered = each.kind == "all-reduce" and node.first in sharded
            kind = "reduce-scatter" if is_scattered else each.kind
            yield Sent(TENSOR, kind, each.payload_bytes)


def _sharded_when_read(part: Partition) -> set[int]:
    """Returns the values that are sharded over ``tensor`` where they are read, also in another shape."""
    readers = Counter(value for node in part.graph.nodes for value in node.inputs)
    sharded: set[int] = set()
    for node in reversed(part.graph.nodes):
        shards = constraint_of(node.equation) or (
            node.name == "shard_map" and len(node.inputs) == 1
        )
        if shards and part.cuts.get(node.outputs[0]) is not None:
            sharded.update(node.inputs)
        elif _keeps_numbers(node) and readers[node.outputs[0]] == 1:
            sharded.update(node.inputs if node.outputs[0] in sharded else ())
    return sharded


def _keeps_numbers(node: Node) -> bool:
    """Whether an operation gives the numbers of its input, in another shape at most."""
    if not (node.name in (*VIEWS, "reduce_sum") or constraint_of(node.equation)):
        return False
    sizes = [each.aval.size for each in (*node.equation.invars, *node.equation.outvars)]
    return len(sizes) == 2 and sizes[0] == sizes[1]
