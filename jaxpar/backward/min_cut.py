"""Which values of a graph to store for later, and which to recompute: a minimum cut.

The cost of a value is its bytes on a device. The output of an elementwise operation can be recomputed from its inputs; any
other value that is needed later must be stored. The cheapest set of values that separates those that exist only now from those
that are needed later is a minimum cut (Ford and Fulkerson 1956), as in the partitioner of PyTorch's AOTAutograd. Among equally
cheap sets the one closest to the needed values is chosen, which recomputes least.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxpar._compat import constraint_of, with_inner
from jaxpar.backward.graph import ELEMENTWISE, MOVES, Graph, Node
from jaxpar.context_parallel import CONTEXT

_SOURCE, _SINK = 0, 1


def cheapest_to_store(
    graph: Graph,
    needed: Collection[int],
    among: Collection[int],
    free: Collection[int],
    num_bytes: Callable[[int], int] | None = None,
    *,
    gathers: bool = True,
) -> set[int]:
    """Returns the values to store, with the fewest bytes in total, from which elementwise operations can compute ``needed``.

    Args:
        graph: A traced function.
        needed: Values that are needed later; those that are not in ``among`` are ignored.
        among: Values that are available now but not later.
        free: Values that are available both now and later.
        num_bytes: The bytes of a value on a device, where they are not those of the whole array.
        gathers: Whether what may gather counts as an elementwise operation: a sharding constraint, and ``gather_sequence``.
    """
    sizes = {value: (num_bytes or graph.num_bytes)(value) for value in among}
    unit = max(1, sum(sizes.values()) >> 24)  # SciPy's maximum flow takes capacities in int32
    price = {value: max(1, size // unit) for value, size in sizes.items()}
    infinite = sum(price.values()) + 1
    # An edge from the entry of a value to its exit is cut where the value is stored.
    entry = {value: 2 + 2 * i for i, value in enumerate(sorted(among))}
    exit_ = {value: vertex + 1 for value, vertex in entry.items()}
    edges = {(entry[value], exit_[value]): price[value] for value in among}
    edges |= {(exit_[value], _SINK): infinite for value in needed if value in exit_}
    recomputable, gathered = set(), set()
    for node in graph.nodes:
        inputs = [i for i in node.inputs if i not in free and i not in graph.constants]
        if _gathers_sequence(node) or (node.name in MOVES and not gathered.isdisjoint(node.inputs)):
            gathered.update(node.outputs)
        is_gathered = gathers and not gathered.isdisjoint(node.outputs)
        may_repeat = is_gathered or _is_recomputable(node, entry, gathers)
        if may_repeat and all(i in entry for i in (*inputs, *node.outputs)):
            recomputable.update(node.outputs)
            edges |= {(exit_[i], entry[o]): infinite for i in inputs for o in node.outputs}
    edges |= {(_SOURCE, entry[value]): infinite for value in among if value not in recomputable}
    later = _sink_side(edges, 2 + 2 * len(entry))
    return {value for value in among if entry[value] not in later and exit_[value] in later}


def _is_recomputable(node: Node, among: Collection[int], gathers: bool) -> bool:
    """Whether the outputs of an operation may be recomputed: elementwise ones, lookups, and with ``gathers`` constraints.

    A lookup in activations moves as many bytes as it returns: the rows of experts are then stored once a token, and not once an
    expert of it. One in params, whose rows may be sharded, is not repeated.

    With sequence parallelism a device stores only its shard of an activation, and the backward pass gathers it again
    (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
    """
    is_lookup = node.name == "gather" and node.inputs[0] in among
    return node.name in ELEMENTWISE or is_lookup or (gathers and constraint_of(node.equation) is not None)


def _gathers_sequence(node: Node) -> bool:
    """Whether a node gathers over ``context`` and does nothing else, also on each shard over ``tensor``.

    A device then stores its own keys and values alone, and gathers those of all others again in the backward pass.
    """
    own = [equation for equation in with_inner(node.equation) if equation.primitive.name != "shard_map"]
    return bool(own) and all(
        equation.primitive.name == "all_gather" and CONTEXT in equation.params["axis_name"] for equation in own
    )


def peak_bytes(graph: Graph, nodes: Sequence[Node], inputs: Sequence[int], outputs: Sequence[int]) -> int:
    """Returns the peak number of bytes that are live while nodes run, if chains of elementwise operations are fused.

    Values that only elementwise operations read and write are assumed to stay in registers.
    """
    views = {*ELEMENTWISE, "optimization_barrier"}
    real = {i for node in nodes if node.name not in views for i in (*node.inputs, *node.outputs)}
    last_read = {i: at for at, node in enumerate(nodes) for i in node.inputs}
    last_read |= dict.fromkeys(outputs, len(nodes))
    live = {i for i in inputs if i in real}
    peak = sum(graph.num_bytes(i) for i in live)
    for at, node in enumerate(nodes):
        live |= {i for i in node.outputs if i in real}
        peak = max(peak, sum(graph.num_bytes(i) for i in live))
        live -= {i for i in live if last_read.get(i, -1) <= at}
    return peak


def _sink_side(edges: dict[tuple[int, int], int], num_vertices: int) -> set[int]:
    """The vertices from which the sink can be reached in the residual graph of a maximum flow."""
    from scipy.sparse import csr_array  # imported here: it takes a tenth of the time to import jaxpar
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    rows, columns = np.array(list(edges)).T
    capacity = csr_array(
        (np.array(list(edges.values()), np.int32), (rows, columns)), shape=(num_vertices, num_vertices)
    )
    left = csr_array(capacity - maximum_flow(capacity, _SOURCE, _SINK).flow)
    left.eliminate_zeros()
    return set(breadth_first_order(csr_array(left.T), _SINK, return_predecessors=False).tolist())
