"""Which values of a graph to store, where some can be computed again: a minimum cut.

Each value has a price, its bytes. A value that an elementwise operation makes can be had from that operation's inputs
instead; all others must be stored where they are needed. The cheapest set of values that separates what is at hand only now
from what is needed later is a minimum cut (Ford and Fulkerson 1956), as in the partitioner of PyTorch's AOTAutograd. Of
equally cheap sets the one nearest to the need is taken, which computes least again.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxpar.backward.graph import Graph, Node

# fmt: off
ELEMENTWISE = frozenset({
    "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "eq", "erf",
    "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reshape", "round", "rsqrt", "select_n", "sign",
    "sin", "slice", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor",
})
# fmt: on

_SOURCE, _SINK = 0, 1


def cheapest_to_store(graph: Graph, needed: Collection[int], among: Collection[int], free: Collection[int]) -> set[int]:
    """Returns the values to store, of fewest bytes together, from which ``needed`` can be had by elementwise operations.

    Args:
        graph: A traced function.
        needed: Values that are needed later; those that are not in ``among`` are left out.
        among: Values that are at hand now and gone later.
        free: Values at hand both now and later.
    """
    numbers = {value: 2 + 2 * i for i, value in enumerate(sorted(among))}
    unit = max(1, sum(_num_bytes(graph, value) for value in among) >> 24)
    price = {value: max(1, _num_bytes(graph, value) // unit) for value in among}
    endless = sum(price.values()) + 1
    edges = {(numbers[value], numbers[value] + 1): price[value] for value in among}
    edges |= {(numbers[value] + 1, _SINK): endless for value in needed if value in numbers}
    made_again = set()
    for node in graph.nodes:
        inputs = [i for i in node.inputs if i not in free and i not in graph.constants]
        if node.name in ELEMENTWISE and all(i in numbers for i in inputs) and all(o in numbers for o in node.outputs):
            made_again.update(node.outputs)
            edges |= {(numbers[i] + 1, numbers[o]): endless for i in inputs for o in node.outputs}
    edges |= {(_SOURCE, numbers[value]): endless for value in among if value not in made_again}
    later = _sink_side(edges, 2 + 2 * len(numbers))
    return {value for value, number in numbers.items() if number not in later and number + 1 in later}


def peak_bytes(graph: Graph, nodes: Sequence[Node], inputs: Sequence[int], outputs: Sequence[int]) -> int:
    """Returns the most bytes that live at once while nodes run, where elementwise chains are fused away.

    What only elementwise operations read and write is taken to stay in registers, between a ring and a ring.
    """
    real = {i for node in nodes if node.name not in ELEMENTWISE for i in (*node.inputs, *node.outputs)}
    last_read = {i: at for at, node in enumerate(nodes) for i in node.inputs}
    last_read |= dict.fromkeys(outputs, len(nodes))
    live = {i for i in inputs if i in real}
    peak = sum(_num_bytes(graph, i) for i in live)
    for at, node in enumerate(nodes):
        live |= {i for i in node.outputs if i in real}
        peak = max(peak, sum(_num_bytes(graph, i) for i in live))
        live -= {i for i in live if last_read.get(i, -1) <= at}
    return peak


def _sink_side(edges: dict[tuple[int, int], int], num_vertices: int) -> set[int]:
    """The vertices from which the sink can still be reached when the greatest flow runs."""
    rows, columns = np.array(list(edges)).T
    capacity = csr_array(
        (np.array(list(edges.values()), np.int32), (rows, columns)), shape=(num_vertices, num_vertices)
    )
    left = csr_array(capacity - maximum_flow(capacity, _SOURCE, _SINK).flow)
    left.eliminate_zeros()
    return set(breadth_first_order(csr_array(left.T), _SINK, return_predecessors=False).tolist())


def _num_bytes(graph: Graph, value: int) -> int:
    aval = graph.avals[value]
    return math.prod(aval.shape) * aval.dtype.itemsize
