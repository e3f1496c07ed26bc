"""The kernels of one op on one device: matrix products by shape, fused attention, and the bytes of the rest.

Products and fused attention write their results to memory. Chains of other operations are fused into one kernel, which reads
the values with which the chain begins and writes those that leave it: operands of products, results of the op, and sums over
``tensor``. A normalization or a softmax is such a chain, with its reductions. Reshapes and transposes of a value cost nothing,
and an optimization barrier is left out: what it returns is what it was given. ``kernel_seconds.py`` has the time of kernels.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxpar._compat import constraint_of
from jaxpar.backward.bodies import BODIES
from jaxpar.backward.graph import Graph, Node
from jaxpar.backward.min_cut import bytes_inside
from jaxpar.backward.products import PRODUCTS, product_flops
from jaxpar.planner.fused import BACKWARD, FORWARD, Grouped, attention_flops, grouped_of

VIEWS = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "copy", "broadcast_in_dim", "split", "slice"}
)
_NEVER_WRITTEN = VIEWS - {"broadcast_in_dim"}
_ADDED = frozenset({"scatter-add", "sort", "cumsum"})  # kernels that are counted by their bytes
_OF_THEIR_OWN = _ADDED | BODIES | PRODUCTS | {"gather", FORWARD, BACKWARD}

Values = frozenset[int]
_NONE: Values = frozenset()


@dataclass(frozen=True, order=True)
class Product:
    """A matrix product ``[rows, depth] x [depth, columns]``, or ``batch`` of them.

    Attributes:
        batch: Products in the batch.
        rows: Rows of the result.
        columns: Columns of the result.
        depth: The dim over which is summed.
        num_bytes: Bytes of operands and result.
        in_fp8: Whether both operands are in FP8.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    num_bytes: int
    in_fp8: bool = False


@dataclass(frozen=True)
class Kernels:
    """The kernels of one op.

    Attributes:
        products: Matrix products, each with its number.
        grouped: Products of rows with the weights of their experts.
        attention: Operations of fused attention, without those above the diagonal: of forward and of backward passes.
        head_dim: That of fused attention.
        attention_bytes: Bytes that fused attention reads and writes.
        num_bytes: Bytes that all other kernels read and write, those of ``replicated_bytes`` among them.
        replicated_bytes: Those of values that are not sharded over ``tensor``.
        score_bytes: Those of values with an element for each attention score: of a batch of products with more results than
            operands.
        num_others: Number of the other kernels.
    """

    products: tuple[tuple[Product, int], ...] = ()
    grouped: tuple[Grouped, ...] = ()
    attention: tuple[int, int] = (0, 0)
    head_dim: int = 0
    attention_bytes: int = 0
    num_bytes: int = 0
    replicated_bytes: int = 0
    score_bytes: int = 0
    num_others: int = 0

    def and_of_body(self, body: "Kernels", times: int) -> "Kernels":
        """Returns these, and those of a loop's body as often as it runs."""
        products = Counter(dict(self.products))
        for product, number in body.products:
            products[product] += times * number
        forward, backward = self.attention
        of_body = body.attention
        return Kernels(
            products=tuple(sorted(products.items())),
            grouped=self.grouped + times * body.grouped,
            attention=(forward + times * of_body[0], backward + times * of_body[1]),
            head_dim=max(self.head_dim, body.head_dim),
            attention_bytes=self.attention_bytes + times * body.attention_bytes,
            num_bytes=self.num_bytes + times * body.num_bytes,
            replicated_bytes=self.replicated_bytes + times * body.replicated_bytes,
            score_bytes=self.score_bytes + times * body.score_bytes,
            num_others=self.num_others + times * body.num_others,
        )


def kernels_of(
    graph: Graph,
    nodes: Iterable[Node],
    results: Collection[int],
    sharded: Collection[int],
) -> Kernels:
    """Returns the kernels that run nodes of a graph.

    Args:
        graph: A graph with the shapes on one device.
        nodes: Those to run, in order.
        results: The values that must be in memory afterwards.
        sharded: The values that are sharded over ``tensor``.
    """
    nodes, wanted = _without_barriers(nodes, results)
    counted = _Counted(graph, frozenset(sharded))
    for node in nodes:
        if counted.is_alone(node):
            wanted.update(node.inputs)
    products: Counter[Product] = Counter()
    grouped = []
    for node in nodes:
        counted.add(node)
        for output in node.outputs:
            if output in wanted:
                counted.write(output)
        if node.name in PRODUCTS:
            products[product_of(graph, node)] += 1
        if (of_experts := grouped_of(node)) is not None:
            grouped.append(of_experts)
    return replace(
        _attention_of(graph, nodes),
        products=tuple(sorted(products.items())),
        grouped=tuple(grouped),
        num_bytes=counted.num_bytes,
        replicated_bytes=counted.replicated_bytes,
        score_bytes=counted.score_bytes,
        num_others=counted.num_others,
    )


def _attention_of(graph: Graph, nodes: Iterable[Node]) -> Kernels:
    """Returns the fused attention of nodes alone."""
    flops = {FORWARD: 0, BACKWARD: 0}
    head_dim = attention_bytes = 0
    for node in nodes:
        if node.name in flops:
            queries = graph.avals[node.inputs[0]]
            head_dim = max(head_dim, queries.shape[-1])
            flops[node.name] += attention_flops(graph, node)
            attention_bytes += _bytes_beside(graph, node)
    attention = flops[FORWARD], flops[BACKWARD]
    return Kernels(attention=attention, head_dim=head_dim, attention_bytes=attention_bytes)


def _bytes_beside(graph: Graph, node: Node) -> int:
    """The bytes that a kernel of a node reads and writes."""
    values = *node.inputs, *node.outputs
    return sum(map(graph.num_bytes, values))


def _without_barriers(
    nodes: Iterable[Node],
    results: Collection[int],
) -> tuple[list[Node], set[int]]:
    """Returns the nodes without barriers, and the results, with what each barrier was given in place of what it returns."""
    given: dict[int, int] = {}
    kept = []
    for node in nodes:
        inputs = tuple(given.get(i, i) for i in node.inputs)
        if node.name == "optimization_barrier":
            given.update(zip(node.outputs, inputs, strict=True))
        else:
            kept.append(replace(node, inputs=inputs))
    return kept, {given.get(i, i) for i in results}


def product_of(graph: Graph, node: Node) -> Product:
    """Returns the shape of the matrix product that a ``dot_general`` or a convolution is.

    That of a convolution has a row for each place of its result, which meets as much of the image as the kernel covers.
    """
    of = _shape_of_dot if node.name == "dot_general" else _shape_of_convolution
    batch, rows = of(graph, node)
    size = _size(graph, node.outputs[0])
    operands = [graph.avals[i].dtype for i in node.inputs]
    return Product(
        batch=batch,
        rows=rows,
        columns=size // max(1, batch * rows),
        depth=product_flops(graph, node) // max(1, 2 * size),
        num_bytes=_bytes_beside(graph, node),
        in_fp8=all(dtype.itemsize == 1 for dtype in operands),
    )


def _shape_of_dot(graph: Graph, node: Node) -> tuple[int, int]:
    """Returns the products in the batch of a ``dot_general``, and the rows of each."""
    (contracted, _), (batched, _) = node.equation.params["dimension_numbers"]
    batch = rows = 1
    for dim, size in enumerate(graph.avals[node.inputs[0]].shape):
        if dim in batched:
            batch *= size
        elif dim not in contracted:
            rows *= size
    return batch, rows


def _shape_of_convolution(graph: Graph, node: Node) -> tuple[int, int]:
    """Returns the groups of a convolution, and the places of its result."""
    params = node.equation.params
    features = graph.avals[node.outputs[0]].shape[params["dimension_numbers"].out_spec[1]]
    groups = params["feature_group_count"] * params["batch_group_count"]
    return groups, _size(graph, node.outputs[0]) // max(1, features)


def _size(graph: Graph, value: int) -> int:
    return math.prod(graph.avals[value].shape)


class _Counted:
    """Bytes of fused chains. ``_reads`` maps a value to the values in memory from which its chain computes it."""

    def __init__(self, graph: Graph, sharded: Values) -> None:
        self.graph = graph
        self.num_bytes = self.replicated_bytes = self.score_bytes = self.num_others = 0
        self._sharded = sharded
        self._scores = _score_sizes(graph)
        self._reads: dict[int, Values] = {}
        self._is_view: set[int] = set()
        self._looked_up: set[int] = set()

    def reads(self, value: int) -> Values:
        if value not in self._reads:
            is_known = value in self.graph.constants or _size(self.graph, value) == 1
            self._reads[value] = _NONE if is_known else frozenset([value])
        return self._reads[value]

    def is_sent(self, node: Node) -> bool:
        """Whether a collective makes the result of a sharding constraint."""
        if constraint_of(node.equation) is None:
            return False
        was_whole = self._sharded.isdisjoint(node.inputs)
        return was_whole != self._sharded.isdisjoint(node.outputs)

    def is_alone(self, node: Node) -> bool:
        """Whether a node is in no chain of others."""
        return node.name in _OF_THEIR_OWN or self.is_sent(node) or grouped_of(node) is not None

    def add(self, node: Node) -> None:
        if node.name == "gather":  # reads the rows that it needs, in the chain that begins with it
            self._looked_up.update(node.outputs)
        elif node.name in _ADDED:  # a sum into rows reads and writes those
            rows = node.inputs[-1:] if node.name == "scatter-add" else node.outputs
            self._count([*node.inputs[1:], *rows, *rows])
        elif not self.is_alone(node):
            self._extend_chain(node)

    def _extend_chain(self, node: Node) -> None:
        reads = _NONE.union(*map(self.reads, node.inputs))
        if node.name in VIEWS and all(map(self._is_no_chain, node.inputs)):
            self._is_view.update(node.outputs)
        if node.name == "reduce_max" and _size(self.graph, node.outputs[0]) == 1:
            self._count(reads)  # before what is scaled by it
            reads = _NONE
        self._reads.update(dict.fromkeys(node.outputs, reads))

    def _is_no_chain(self, value: int) -> bool:
        """Whether a value is in memory, or known, or a view of one that is."""
        return value in self._is_view or self.reads(value) <= {value}

    def write(self, value: int) -> None:
        if value in self._looked_up:
            self._count([value, value])
        if self._is_no_chain(value):
            return
        self._count([value, *self.reads(value)])
        self._reads[value] = frozenset([value])

    def _count(self, values: Iterable[int]) -> None:
        for value in values:
            num_bytes = self.graph.num_bytes(value)
            self.num_bytes += num_bytes
            if value not in self._sharded:
                self.replicated_bytes += num_bytes
            if _size(self.graph, value) in self._scores:
                self.score_bytes += num_bytes
        self.num_others += 1


def _score_sizes(graph: Graph) -> frozenset[int]:
    """Returns the numbers of attention scores: results of a batch of products that has more of them than operands."""
    sizes = set()
    for node in graph.nodes:
        if node.name != "dot_general":
            continue
        _, (batched, _) = node.equation.params["dimension_numbers"]
        result, *operands = (_size(graph, i) for i in (*node.outputs, *node.inputs))
        if batched and result > max(operands):
            sizes.add(result)
    return frozenset(sizes)


def peak_of_kernels(
    graph: Graph,
    nodes: Sequence[Node],
    inputs: Collection[int],
    outputs: Collection[int],
) -> int:
    """Returns the peak bytes of live values while kernels run. Values inside a fused chain take no memory.

    Unlike ``peak_bytes`` of ``backward/min_cut.py`` it has reductions in fused chains too, as XLA for GPUs does: a softmax
    reads logits and writes their gradient in their place, and nothing of their size in between.

    Args:
        graph: A graph with the shapes on one device.
        nodes: Those to run, in order.
        inputs: The values that are in memory at first and not needed afterwards.
        outputs: The values that must be in memory afterwards.
    """
    nodes, outputs = _without_barriers(nodes, outputs)
    sources, last_read = _stored(nodes, inputs, outputs)
    live, peak = set(inputs), 0
    for at, node in enumerate(nodes):
        written = {i for i in node.outputs if sources[i] == {i}}
        read_last = {i for i in live if last_read.get(i, -1) <= at}
        replaced = 0
        if node.name not in _OF_THEIR_OWN:  # it may write in the place of what it reads last
            sizes = set(map(graph.num_bytes, written))
            freed = map(graph.num_bytes, read_last)
            replaced = sum(size for size in freed if size in sizes)
        live |= written
        total = sum(map(graph.num_bytes, live))
        peak = max(peak, total - replaced + bytes_inside(graph, node))
        live -= read_last
        live -= written.difference(last_read)
    return peak


def _stored(
    nodes: Sequence[Node],
    inputs: Collection[int],
    outputs: Collection[int],
) -> tuple[dict[int, Values], dict[int, int]]:
    """Returns, for each value, the stored values from which it is computed, and the node that last reads each.

    A stored value is computed from itself alone; a node is given by its index.
    """
    stored = {*inputs, *outputs}
    for node in nodes:
        if node.name in _OF_THEIR_OWN:
            stored.update(node.inputs, node.outputs)
    sources: dict[int, Values] = {i: frozenset([i]) for i in inputs}
    last_read = dict.fromkeys(outputs, len(nodes))
    for at, node in enumerate(nodes):
        read = _NONE.union(*(sources.get(i, _NONE) for i in node.inputs))
        # What a scatter adds to is in memory too.
        is_written = node.name not in _NEVER_WRITTEN and not stored.isdisjoint(node.outputs)
        for output in node.outputs:
            sources[output] = frozenset([output]) if is_written and output in stored else read
        if is_written:
            for value in read:
                last_read[value] = max(at, last_read.get(value, at))
    return sources, last_read
