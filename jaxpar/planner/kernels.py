"""The kernels of one op on one device and their seconds: matrix products by shape, fused attention, and the bytes of the rest.

Products and fused attention write their results to memory. Chains of other operations are fused into one kernel, which reads
the values with which the chain begins and writes those that leave it: operands of products, results of the op, and sums over
``tensor``. A normalization or a softmax is such a chain, with its reductions. Reshapes and transposes of a value cost nothing,
and an optimization barrier is left out: what it returns is what it was given.

A product is computed in tiles, of which each multiprocessor computes one at a time:

    waves    ceil(tiles / multiprocessors), so that the last wave may leave most of them idle
    a wave   2 * tile rows * tile columns * (depth + FILL) operations; FILL is spent on filling the pipeline and on the result

The fastest of the usual tiles is taken, also with the depth divided over several multiprocessors. A product takes at least as
long as its bytes take to read and write (roofline: Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785), and
each kernel has a cost of launching. NVIDIA's "Matrix Multiplication Background User's Guide" describes tiles and waves.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from jaxpar._compat import constraint_of
from jaxpar.backward.graph import Graph, Node
from jaxpar.backward.partition import dot_flops
from jaxpar.planner.cluster import Cluster, Measured
from jaxpar.planner.fused import BACKWARD, FORWARD, Grouped, attention_flops, grouped_of
from jaxpar.planner.job import JAXPAR, Software

VIEWS = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "copy", "broadcast_in_dim", "split", "slice"})
_ADDED = frozenset({"scatter-add", "sort", "cumsum", "conv_general_dilated"})  # kernels that are counted by their bytes
_OF_THEIR_OWN = _ADDED | {"dot_general", "gather", FORWARD, BACKWARD}
# Rows and columns of a tile, and its share of the rate of the largest.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75), (64, 64, 0.6))
_PARTS = (1, 2, 4, 8)
FILL = 256
# Bytes that kernels of single operations read and write, relative to those of fused chains: calibrated on the steps of
# `docs/published.md`.
UNFUSED = 2.5
# Scores in 16 bits, with a kernel for scale, mask and softmax and one for dropout, which together read and write 20 bytes a
# score forward and backward; XLA's, in float32, 34.
FUSED_SOFTMAX = 20 / 34


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


def kernels_of(graph: Graph, nodes: Iterable[Node], results: Collection[int], sharded: Collection[int]) -> Kernels:
    """Returns the kernels that run nodes of a graph.

    Args:
        graph: A graph with the shapes on one device.
        nodes: Those to run, in order.
        results: The values that must be in memory afterwards.
        sharded: The values that are sharded over ``tensor``.
    """
    nodes, results = _without_barriers(nodes, results)
    counted = _Counted(graph, frozenset(sharded))
    wanted = {i for node in nodes if counted.is_alone(node) for i in node.inputs} | results
    for node in nodes:
        counted.add(node)
        for output in node.outputs:
            if output in wanted:
                counted.write(output)
    fused = [node for node in nodes if node.name in (FORWARD, BACKWARD)]
    flops = lambda name: sum(attention_flops(graph, node) for node in fused if node.name == name)
    products = Counter(product_of(graph, node) for node in nodes if node.name == "dot_general")
    return Kernels(
        products=tuple(sorted(products.items())),
        grouped=tuple(each for node in nodes if (each := grouped_of(node))),
        attention=(flops(FORWARD), flops(BACKWARD)),
        head_dim=max((graph.avals[node.inputs[0]].shape[-1] for node in fused), default=0),
        attention_bytes=sum(graph.num_bytes(i) for node in fused for i in (*node.inputs, *node.outputs)),
        num_bytes=counted.num_bytes,
        replicated_bytes=counted.replicated_bytes,
        score_bytes=counted.score_bytes,
        num_others=counted.num_others,
    )


def _without_barriers(nodes: Iterable[Node], results: Collection[int]) -> tuple[list[Node], set[int]]:
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
    """Returns the shape of the matrix product that a ``dot_general`` is."""
    (contracted, _), (batched, _) = node.equation.params["dimension_numbers"]
    left, size = graph.avals[node.inputs[0]].shape, math.prod(graph.avals[node.outputs[0]].shape)
    batch = math.prod(left[i] for i in batched)
    rows = math.prod(size for i, size in enumerate(left) if i not in (*contracted, *batched))
    depth = dot_flops(graph, node) // max(1, 2 * size)
    num_bytes = sum(map(graph.num_bytes, (*node.inputs, *node.outputs)))
    in_fp8 = all(graph.avals[i].dtype.itemsize == 1 for i in node.inputs)
    return Product(batch, rows, size // max(1, batch * rows), depth, num_bytes, in_fp8)


class _Counted:
    """Bytes of fused chains. ``_reads`` maps a value to the values in memory from which its chain computes it."""

    def __init__(self, graph: Graph, sharded: frozenset[int]) -> None:
        self.graph, self._sharded, self._scores = graph, sharded, _score_sizes(graph)
        self.num_bytes = self.replicated_bytes = self.score_bytes = self.num_others = 0
        self._reads: dict[int, frozenset[int]] = {}
        self._is_view: set[int] = set()
        self._looked_up: set[int] = set()

    def reads(self, value: int) -> frozenset[int]:
        if value not in self._reads:
            is_scalar = math.prod(self.graph.avals[value].shape) == 1
            self._reads[value] = frozenset() if value in self.graph.constants or is_scalar else frozenset([value])
        return self._reads[value]

    def is_sent(self, node: Node) -> bool:
        """Whether a collective makes the result of a sharding constraint."""
        sides = [not self._sharded.isdisjoint(values) for values in (node.inputs, node.outputs)]
        return constraint_of(node.equation) is not None and sides[0] != sides[1]

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
            reads = frozenset().union(*map(self.reads, node.inputs))
            inputs = [i for i in node.inputs if self.reads(i)]
            is_view = node.name in VIEWS and all(i in self._is_view or self.reads(i) == {i} for i in inputs)
            self._reads |= dict.fromkeys(node.outputs, reads)
            self._is_view.update(node.outputs if is_view else ())
            if node.name == "reduce_max" and self.graph.avals[node.outputs[0]].size == 1:  # before what is scaled by it
                self._count(reads)
                self._reads[node.outputs[0]] = frozenset()

    def write(self, value: int) -> None:
        reads = self.reads(value)
        if value in self._looked_up:
            self._count([value, value])
        if value in self._is_view or reads == {value} or not reads:
            return
        self._count([value, *reads])
        self._reads[value] = frozenset([value])

    def _count(self, values: Iterable[int]) -> None:
        for value in values:
            size = self.graph.num_bytes(value)
            self.num_bytes += size
            self.replicated_bytes += 0 if value in self._sharded else size
            self.score_bytes += size if math.prod(self.graph.avals[value].shape) in self._scores else 0
        self.num_others += 1


def _score_sizes(graph: Graph) -> frozenset[int]:
    """Returns the numbers of attention scores: results of a batch of products that has more of them than operands."""
    is_batch = lambda node: node.name == "dot_general" and node.equation.params["dimension_numbers"][1][0]
    size = lambda value: math.prod(graph.avals[value].shape)
    batches = [node for node in graph.nodes if is_batch(node)]
    return frozenset(size(each.outputs[0]) for each in batches if size(each.outputs[0]) > max(map(size, each.inputs)))


def peak_of_kernels(graph: Graph, nodes: Sequence[Node], inputs: Collection[int], outputs: Collection[int]) -> int:
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
        sizes = [] if node.name in _OF_THEIR_OWN else list(map(graph.num_bytes, written))
        replaced = sum(size for size in map(graph.num_bytes, read_last) if size in sizes)
        live |= written
        peak = max(peak, sum(map(graph.num_bytes, live)) - replaced)
        live -= read_last | {i for i in written if i not in last_read}
    return peak


def _stored(
    nodes: Sequence[Node], inputs: Collection[int], outputs: Collection[int]
) -> tuple[dict[int, frozenset[int]], dict[int, int]]:
    """Returns, for each value, the stored values from which it is computed, and the node that last reads each.

    A stored value is computed from itself alone; a node is given by its index.
    """
    alone = [node for node in nodes if node.name in _OF_THEIR_OWN]
    stored = {i for node in alone for i in (*node.inputs, *node.outputs)} | set(inputs) | set(outputs)
    sources = {i: frozenset([i]) for i in inputs}
    last_read = dict.fromkeys(outputs, len(nodes))
    for at, node in enumerate(nodes):
        read = frozenset().union(*(sources.get(i, frozenset()) for i in node.inputs))
        # What a scatter adds to is in memory too.
        is_written = not stored.isdisjoint(node.outputs) and node.name not in VIEWS - {"broadcast_in_dim"}
        sources |= {i: frozenset([i]) if is_written and i in stored else read for i in node.outputs}
        if is_written:
            last_read |= {i: at for i in read if last_read.get(i, -1) < at}
    return sources, last_read


def seconds_of(
    kernels: Kernels, cluster: Cluster, tensor: int = 1, software: Software = JAXPAR, own_share: float = 1.0
) -> float:
    """Returns the seconds of the kernels of an op.

    Args:
        kernels: The kernels.
        cluster: The machines.
        tensor: Size of the ``tensor`` axis.
        software: What runs them.
        own_share: The share of the slots for rows of experts that a device's own experts fill.
    """
    measured = cluster.measured if software.measured_kernels else None
    of_scores = kernels.score_bytes * (FUSED_SOFTMAX if software.fused_softmax else 1.0)
    others = kernels.num_bytes - kernels.score_bytes
    others -= kernels.replicated_bytes * (tensor - 1) / tensor if software.sequence_parallel else 0
    chain_bytes = 1.0 if measured is None else measured.chain_bytes
    num_bytes = of_scores + others * (chain_bytes if software.fused else UNFUSED)
    rate = software.product_rate * (measured.product_share / cluster.product_share if measured else 1.0)
    in_fp8 = cluster.fp8_rate if measured is None else measured.fp8_rate
    rate_of = lambda product: rate * in_fp8 if product.in_fp8 else rate
    of_products = sum(count * product_seconds(each, cluster, rate_of(each)) for each, count in kernels.products)
    return (
        of_products
        + _of_experts(kernels, cluster, software, own_share, rate)
        + _of_attention(kernels, cluster, measured)
        + num_bytes / memory_rate(cluster)
        + kernels.num_others * cluster.launch_seconds
    )


def _of_experts(kernels: Kernels, cluster: Cluster, software: Software, own_share: float, rate: float) -> float:
    """Returns the seconds of products of rows with the weights of their experts."""
    measured = cluster.measured if software.measured_kernels else None
    of_rows, of_weights = measured.grouped_shares if measured else (1.0, 1.0)
    seconds = 0.0
    for each in kernels.grouped:
        product = Product(*each.as_batch(software.expert_imbalance, own_share))
        seconds += product_seconds(product, cluster, rate * (of_weights if each.is_gradient else of_rows))
    return seconds


def _of_attention(kernels: Kernels, cluster: Cluster, measured: Measured | None) -> float:
    """Returns the seconds of fused attention."""
    forward, backward = kernels.attention
    shares = (cluster.attention_share,) * 2 if measured is None else measured.attention(kernels.head_dim)
    # Backward recomputes the scores: five products for the four that count.
    arithmetic = (forward / shares[0] + 1.25 * backward / shares[1]) / cluster.peak_flops
    launches = bool(forward) + bool(backward)
    return max(arithmetic, kernels.attention_bytes / memory_rate(cluster)) + launches * cluster.launch_seconds


def memory_rate(cluster: Cluster) -> float:
    """Returns the bytes per second that kernels read and write."""
    return cluster.memory_bandwidth * cluster.memory_share


@lru_cache(maxsize=65536)
def product_seconds(product: Product, cluster: Cluster, product_rate: float = 1.0) -> float:
    """Returns the seconds of a matrix product."""
    rate = cluster.peak_flops * cluster.product_share * product_rate
    arithmetic = min(_tiled(product, cluster, *tile) for tile in _TILES) / rate
    return max(arithmetic, product.num_bytes / memory_rate(cluster)) + cluster.launch_seconds


def _tiled(product: Product, cluster: Cluster, rows: int, columns: int, share: float) -> float:
    """Returns the operations that all multiprocessors together could do in the time of the product, with tiles of one size."""
    tiles = product.batch * -(-product.rows // rows) * -(-product.columns // columns)
    at_once = cluster.multiprocessors * (256 * 128 // (rows * columns))  # smaller tiles share a multiprocessor
    of_one_wave = 2 * rows * columns * at_once / share
    return min(-(-tiles * parts // at_once) * of_one_wave * (product.depth / parts + FILL) for parts in _PARTS)
