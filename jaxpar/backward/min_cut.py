"""Which values of a graph to store for later, and which to recompute: a minimum cut.

The cost of a value is its bytes on a device. The output of an elementwise operation can be recomputed from its inputs; any
other value that is needed later must be stored. The cheapest set of values that separates those that exist only now from those
that are needed later is a minimum cut (Ford and Fulkerson 1956), as in the partitioner of PyTorch's AOTAutograd. Among equally
cheap sets the one closest to the needed values is chosen, which recomputes least.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product

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
    size_of = num_bytes or graph.num_bytes
    prices = _as_capacities({value: size_of(value) for value in among})
    never_cut = sum(prices.values()) + 1
    known = {*free, *graph.constants}
    edges: dict[tuple[int, int], int] = {}
    for value, price in prices.items():
        edges[_entry(value), _exit(value)] = price
    for value in prices.keys() & set(needed):
        edges[_exit(value), _SINK] = never_cut
    repeatable: set[int] = set()
    for node in _repeatable(graph, prices, gathers):
        inputs = set(node.inputs) - known
        if prices.keys() >= inputs.union(node.outputs):
            repeatable.update(node.outputs)
            for before, after in product(inputs, node.outputs):
                edges[_exit(before), _entry(after)] = never_cut
    for value in prices.keys() - repeatable:
        edges[_SOURCE, _entry(value)] = never_cut
    later = _sink_side(edges)
    is_cut = lambda value: _entry(value) not in later and _exit(value) in later
    return set(filter(is_cut, prices))


# A value is stored where the edge from its entry to its exit is cut:
#
#     source -> entry --price--> exit -> entry of what is computed from it --price--> exit -> sink


def _entry(value: int) -> int:
    return 2 + 2 * value


def _exit(value: int) -> int:
    return 3 + 2 * value


def _as_capacities(sizes: dict[int, int]) -> dict[int, int]:
    """Returns sizes in a unit in which SciPy's maximum flow, whose capacities are int32, can add them up."""
    unit = max(1, sum(sizes.values()) >> 24)
    return {value: max(1, size // unit) for value, size in sizes.items()}


def _repeatable(graph: Graph, among: Collection[int], gathers: bool) -> Iterator[Node]:
    """Yields the operations that may run again, with ``gathers`` those that gather and that move what was gathered."""
    gathered: set[int] = set()
    for node in graph.nodes:
        moves = node.name in MOVES and not gathered.isdisjoint(node.inputs)
        is_gathered = moves or _gathers_sequence(node)
        if is_gathered:
            gathered.update(node.outputs)
        if (gathers and is_gathered) or _is_recomputable(node, among, gathers):
            yield node


def _is_recomputable(node: Node, among: Collection[int], gathers: bool) -> bool:
    """Whether the outputs of an operation may be recomputed: elementwise ones, lookups, and with ``gathers`` constraints.

    A lookup in activations moves as many bytes as it returns: the rows of experts are then stored once a token, and not once an
    expert of it. One in params, whose rows may be sharded, is not repeated.

    With sequence parallelism a device stores only its shard of an activation, and the backward pass gathers it again
    (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
    """
    if node.name in ELEMENTWISE:
        return True
    if node.name == "gather" and node.inputs[0] in among:
        return True
    return gathers and constraint_of(node.equation) is not None


def _gathers_sequence(node: Node) -> bool:
    """Whether a node gathers over ``context`` and does nothing else, also on each shard over ``tensor``.

    A device then stores its own keys and values alone, and gathers those of all others again in the backward pass.
    """
    gathers = False
    for equation in with_inner(node.equation):
        name = equation.primitive.name
        if name == "shard_map":
            continue
        if name != "all_gather" or CONTEXT not in equation.params["axis_name"]:
            return False
        gathers = True
    return gathers


def peak_bytes(
    graph: Graph,
    nodes: Sequence[Node],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> int:
    """Returns the peak number of bytes that are live while nodes run, if chains of elementwise operations are fused.

    Those inside a loop or a branch are live while it runs. Values that only elementwise operations read and write are assumed
    to stay in registers.
    """
    views = {*ELEMENTWISE, "optimization_barrier"}
    in_memory: set[int] = set()
    last_read: dict[int, int] = {}
    for at, node in enumerate(nodes):
        last_read.update(dict.fromkeys(node.inputs, at))
        if node.name not in views:
            in_memory.update(node.inputs, node.outputs)
    last_read.update(dict.fromkeys(outputs, len(nodes)))
    live = in_memory.intersection(inputs)
    peak = sum(map(graph.num_bytes, live))
    for at, node in enumerate(nodes):
        live |= in_memory.intersection(node.outputs)
        total = sum(map(graph.num_bytes, live))
        peak = max(peak, total + bytes_inside(graph, node))
        live -= {value for value in live if last_read.get(value, -1) <= at}
    return peak


def bytes_inside(graph: Graph, node: Node) -> int:
    """Returns the peak bytes of live values inside a loop or a branch, without those that it is given."""
    peak = 0
    for body in graph.bodies.get(node.first, ()):
        of_body = peak_bytes(body, body.nodes, body.inputs, body.outputs)
        given = sum(map(body.num_bytes, body.inputs))
        peak = max(peak, of_body - given)
    return peak


def _sink_side(edges: Mapping[tuple[int, int], int]) -> set[int]:
    """The vertices from which the sink can be reached in the residual graph of a maximum flow."""
    from scipy.sparse import (
        csr_array,
    )  # imported here: it takes a tenth of the time to import jaxpar
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    ends = np.array(list(edges)).T
    widths = np.array(list(edges.values()), np.int32)
    count = ends.max() + 1
    capacity = csr_array((widths, ends), shape=(count, count))
    flow = maximum_flow(capacity, _SOURCE, _SINK).flow
    left = csr_array(capacity - flow)
    left.eliminate_zeros()
    backwards = csr_array(left.T)
    found = breadth_first_order(backwards, _SINK, return_predecessors=False)
    return set(found.tolist())
