"""The ops of a layer, and of the head, for one microbatch on one device: their work, traced once, and their seconds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar.backward.graph import Node, trace
from jaxpar.backward.min_cut import peak_bytes
from jaxpar.backward.partition import Collective, ParamShards, Partition, cut_of, partition
from jaxpar.backward.remat import keep_products
from jaxpar.backward.split import SplitLayer, TracedLayer, trace_layer
from jaxpar.dtypes import num_bytes, wide_dtype
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.mesh import TENSOR, abstract_mesh
from jaxpar.pipeline.embed_and_head import Ends, split_ends
from jaxpar.planner.cluster import Links, collective_seconds
from jaxpar.planner.job import Assumptions, Choice, ModelShape, Software
from jaxpar.planner.kernels import NO_KERNELS, RULES, Kernels, kernels_of, memory_rate, peak_of_kernels, seconds_of
from jaxpar.sharding import shardings_from_paths
from jaxpar.trainable import trained_indices

# Collectives take multiprocessors and memory bandwidth from the computation beside which they run: by this share of their time
# they lengthen it.
INTERFERENCE = 0.25


@dataclass(frozen=True)
class Work:
    """The work of one device in one op of one microbatch.

    Attributes:
        flops: Floating-point operations of matrix products.
        collectives: Collectives over ``tensor``.
        reads: Indices of the params of one layer that the op reads.
        kernels: What runs on the device.
    """

    flops: int = 0
    collectives: tuple[Collective, ...] = ()
    reads: frozenset[int] = frozenset()
    kernels: Kernels = NO_KERNELS

    def payload_bytes(self) -> int:
        """Returns the payload bytes of all its collectives together."""
        return sum(each.payload_bytes for each in self.collectives)


class Analysis:
    """The work of a model's ops, for microbatches of ``num_rows`` rows and ``tensor`` shards.

    Args:
        shape: The model.
        num_rows: Rows of one replica's microbatch.
        tensor: Size of the ``tensor`` axis.
        remat: As in ``Choice``.
    """

    def __init__(self, shape: ModelShape, num_rows: int, tensor: int, remat: bool | str = False) -> None:
        self.shape, self.num_rows, self.tensor = shape, num_rows, tensor
        self.times: dict[Any, Any] = {}  # of `op_times`
        shardings = shardings_from_paths(shape.params, abstract_mesh(tensor=tensor), shape.rules)
        cuts = jax.tree.map(lambda s: cut_of(s.spec, TENSOR), shardings)
        self._outer_cuts = jax.tree.leaves(cuts[OUTER], is_leaf=lambda cut: cut is None)
        specs = [sharding.spec for sharding in jax.tree.leaves(shardings[LAYERS])]
        shards = ParamShards.of_layers(specs, tensor)
        traced: _Ends = _cached(shape, ("ends", num_rows), lambda: _trace_ends(shape, num_rows))
        self.x: list[Any] = jax.tree.leaves(traced.x)
        self.ends, self._end_graphs = traced.ends, traced.graphs
        self.split = _split(shape, num_rows, remat == "dots", traced.x, shards)
        self.layer: Partition = shards.partition(self.split.graph, self.split.values["params"], rules=RULES)

    @property
    def trained_params(self) -> list[Any]:
        """The shapes of the params of one layer on a device that are trained."""
        in_use, shape = self.layer.shapes(self.split.values["params"]), self.shape
        return [in_use[i] for i in trained_indices(shape.frozen(shape.params)[LAYERS])]

    def work(self, plan: str) -> Work:
        """Returns the work of one layer in one of ``SplitLayer.plans``."""
        return self._works[plan]

    @cached_property
    def _works(self) -> dict[str, Work]:
        return {name: self._work(self.layer, plan.nodes, plan.makes) for name, plan in self.split.plans.items()}

    @cached_property
    def one_layer_bytes(self) -> int:
        """Peak bytes of live values while an op of a pipeline runs one layer."""
        plans = (self.split.plans[name] for name in ("forward_and_store", "backward_input", "backward_weights"))
        return max(peak_bytes(self.layer.graph, *plan) for plan in plans)

    @cached_property
    def forward_bytes(self) -> int:
        """The same while F runs one layer."""
        return peak_bytes(self.layer.graph, *self.split.plans["forward_and_store"])

    @cached_property
    def again_bytes(self) -> int:
        """The same while one layer runs forward again and then backward, and stores nothing between the two."""
        return peak_of_kernels(self.layer.graph, *self.split.plans["again"])

    @cached_property
    def kept_by_jax(self) -> list[int]:
        """Numbers of the forward values that the backward pass reads where JAX splits the two passes."""
        plan = self.split.plans["again"]
        num_x = len(jax.tree.leaves(self.x))
        params = set(self.split.values["params"])
        graph = self.split.graph
        ct = [i for i in plan.known if i not in params][num_x:]
        backward = graph.reached(ct)
        reads = {i for node in plan.nodes if not backward.isdisjoint(node.outputs) for i in node.inputs}
        return sorted(reads - backward - params - set(graph.constants))

    def _work(self, part: Partition, nodes: Iterable[Node], makes: Iterable[int]) -> Work:
        work = _work_of(part, list(nodes), makes)
        read = {i for node in nodes for i in node.inputs}
        return replace(work, reads=frozenset(n for n, i in enumerate(self.split.values["params"]) if i in read))

    @cached_property
    def end_works(self) -> dict[str, Work]:
        """The work of "embed", "embed_back" and "head"; that of the head includes the loss, forward and backward."""
        return {name: _work_of(part, nodes, part.graph.outputs) for name, (part, nodes) in self._ends.items()}

    @cached_property
    def _ends(self) -> dict[str, tuple[Partition, list[Node]]]:
        ends = {}
        for name, (graph, reads) in self._end_graphs.items():
            given = {graph.inputs[n]: self._outer_cuts[i] for n, i in enumerate(reads)}
            ends[name] = partition(graph, given, self.tensor, RULES), graph.needed(graph.outputs, graph.inputs)
        return ends

    @cached_property
    def head_bytes(self) -> int:
        """Peak bytes of live values while the head and the loss run; mostly logits, or in their place their gradient."""
        part, nodes = self._ends["head"]
        return self._head_bytes(nodes, part.graph.outputs)

    @cached_property
    def head_bytes_of_op(self) -> int:
        """The same in an op of a pipeline: gradients of params come last, and are widened only as they are added to sums."""
        part, _ = self._ends["head"]
        own, outputs = self._added_in_op
        first = part.graph.needed([i for i in outputs if i not in own], part.graph.inputs)
        last = [node for node in part.graph.needed(outputs, part.graph.inputs) if node not in first]
        return self._head_bytes([*first, *last], outputs)

    @cached_property
    def head_bytes_of_branch(self) -> int:
        """The same where a branch skips the op, in which XLA keeps the order of the trace: params are read to the end."""
        _, outputs = self._added_in_op
        graph = self._ends["head"][0].graph
        return self._head_bytes(graph.needed(outputs, graph.inputs), outputs)

    def shares_head(self, choice: Choice) -> bool:
        """Whether the stages of a choice share the head, since it is a sum over rows or positions (``head_parts.py``)."""
        if not choice.may_share_head:
            return False
        is_split = any(self.layer.cuts.get(value) == 1 for value in self.split.values["y"])
        sizes = self.num_rows, choice.stage, self.tensor if is_split else 1
        return _cached(self.shape, ("shares head", *sizes), lambda: _shares_head(self.shape, *sizes))

    @property
    def _added_in_op(self) -> tuple[list[int], list[int]]:
        """The gradients of the head's params before they are widened, and all values that the op writes, these among them."""
        part, nodes = self._ends["head"]
        loss, *grads = part.graph.outputs
        widened = {n.outputs[0]: n.inputs[0] for n in nodes if n.name == "convert_element_type"}
        own = [widened.get(grad, grad) for grad in grads[: len(self.ends.head_trains)]]
        return own, [loss, *own, *grads[len(own) :]]

    def _head_bytes(self, nodes: list[Node], outputs: Sequence[int]) -> int:
        graph = self._ends["head"][0].graph
        return peak_of_kernels(graph, nodes, graph.inputs[len(self.ends.head_reads) :], outputs)

    @property
    def activation_bytes(self) -> int:
        """Bytes sent from stage to stage for one microbatch."""
        return num_bytes(self.x)

    @property
    def unknown(self) -> frozenset[str]:
        """Primitives of a layer whose sharding over ``tensor`` is not known."""
        return self.layer.unknown


@dataclass(frozen=True)
class _Ends:
    x: PyTree
    ends: Ends
    graphs: Mapping[str, tuple[Any, list[int]]]


def _work_of(part: Partition, nodes: list[Node], makes: Iterable[int]) -> Work:
    sharded = {value for value, cut in part.cuts.items() if cut is not None}
    summed = {i for node in nodes if node.outputs[0] in part.collectives for i in node.outputs}
    kernels = kernels_of(part.graph, nodes, {*makes, *summed}, sharded)
    # Rates are published as if the scores above the diagonal were computed.
    return Work(part.flops_of(nodes) + 2 * sum(kernels.attention), tuple(part.collectives_of(nodes)), kernels=kernels)


def _cached(shape: ModelShape, key: tuple, make: Callable[[], Any]) -> Any:
    """Returns the result of ``make``, cached in the model."""
    if key not in shape.cache:
        shape.cache[key] = make()
    return shape.cache[key]


def _split(shape: ModelShape, num_rows: int, keeps_products: bool, x: PyTree, shards: ParamShards) -> SplitLayer:
    of_layer = num_rows, keeps_products
    traced: TracedLayer = _cached(shape, ("layer", *of_layer), lambda: _trace_layer(shape, keeps_products, x))
    return _cached(shape, ("split", *of_layer, shards), lambda: traced.split(shards))


def _trace_layer(shape: ModelShape, keeps_products: bool, x: PyTree) -> TracedLayer:
    params = shape.frozen(shape.params)[LAYERS]
    one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params)
    layer = shape.model_of_frozen.layers(1)[0]
    return trace_layer(jax.checkpoint(layer, policy=keep_products) if keeps_products else layer, one_layer, x)


def _trace_ends(shape: ModelShape, num_rows: int) -> _Ends:
    outer, batch = shape.frozen(shape.params)[OUTER], shape.batch(num_rows)
    model = shape.model_of_frozen
    x: PyTree = jax.eval_shape(model.embed, outer, batch)
    ends = split_ends(model, shape.loss, outer, x, batch)
    leaves, x_leaves = jax.tree.leaves(outer), jax.tree.leaves(x)
    embed, head = ([leaves[i] for i in indices] for indices in (ends.embed_reads, ends.head_reads))
    floats = [leaf for leaf in x_leaves if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)]
    graphs = {
        "embed": (trace(ends.embed, embed, batch), ends.embed_reads),
        "embed_back": (trace(ends.embed_backward, embed, batch, floats), ends.embed_reads),
        "head": (trace(ends.head, head, x_leaves, batch, jax.ShapeDtypeStruct((), jax.numpy.float32)), ends.head_reads),
    }
    return _Ends(x, ends, graphs)


def _shares_head(shape: ModelShape, num_rows: int, num_stages: int, num_shards: int) -> bool:
    outer, batch, model = shape.frozen(shape.params)[OUTER], shape.batch(num_rows), shape.model_of_frozen
    x: PyTree = jax.eval_shape(model.embed, outer, batch)
    ends = split_ends(model, shape.loss, outer, x, batch, num_stages=num_stages, num_shards=num_shards)
    return ends.parts is not None


def layer_works(choice: Choice, analysis: Analysis) -> dict[str, Work]:
    """Returns the work of a layer in each op."""
    if choice.stage == 1:
        return {"F": analysis.work("forward"), "B": analysis.work("again" if choice.remat is True else "backward")}
    works = {"F": analysis.work("forward" if choice.remat is True else "forward_and_store")}
    if choice.remat is True:
        works["R"] = analysis.work("forward_and_store")
    return works | {"B": analysis.work("backward_input"), "W": analysis.work("backward_weights")}


@dataclass(frozen=True)
class OpTimes:
    """Seconds for one microbatch.

    Attributes:
        computing: Those of the kernels of each op of one layer. The last op of the backward pass adds its gradients to those of
            earlier microbatches.
        sending: Those of the collectives over ``tensor`` of each op.
        again: The part of ``computing`` that is recomputed.
        head_computing: Those of the kernels of the head and the loss, forward and backward.
        head_sending: Those of their collectives.
    """

    computing: dict[str, float]
    sending: dict[str, float]
    again: float
    head_computing: float
    head_sending: float


def op_times(choice: Choice, analysis: Analysis, links: Links, assumed: Assumptions, software: Software) -> OpTimes:
    """Returns the seconds of the ops of a choice, cached in its analysis."""
    pipelined, accumulates = choice.stage > 1, choice.num_microbatches > 1
    key = pipelined, accumulates, choice.remat, links.cluster, assumed, software
    if key not in analysis.times:
        analysis.times[key] = _op_times(choice, analysis, links, assumed, software)
    return analysis.times[key]


def _op_times(choice: Choice, analysis: Analysis, links: Links, assumed: Assumptions, software: Software) -> OpTimes:
    computes = lambda work: _compute(work, choice, links, assumed, software)
    sends = lambda work: _send(work, links, computes(work) if TENSOR in software.overlaps else 0.0)
    works, head = layer_works(choice, analysis), analysis.end_works["head"]
    computing = {op: computes(work) for op, work in works.items()}
    if "W" in works and software.products_alone_in_w:
        alone = computes(replace(works["W"], kernels=Kernels(works["W"].kernels.products)))
        computing |= {"B": computing["B"] + computing["W"] - alone, "W": alone}
    forward = computes(analysis.work("forward"))
    again = computing.get("R", forward if choice.remat is True else 0.0) + software.recompute * forward
    computing["B"] += software.recompute * forward
    if choice.num_microbatches > 1 and assumed.compute is None and not software.fused_accumulation:
        params = analysis.trained_params
        sums = sum(2 * each.size * wide_dtype(each.dtype).itemsize for each in params)
        computing["W" if "W" in works else "B"] += sums / memory_rate(links.cluster)
    sending = {op: sends(work) for op, work in works.items()}
    return OpTimes(computing, sending, again, computes(head), sends(head))


def _compute(work: Work, choice: Choice, links: Links, assumed: Assumptions, software: Software) -> float:
    """Returns the seconds of the kernels of ``work``."""
    if assumed.compute is not None:
        return work.flops / (links.cluster.peak_flops * assumed.compute)
    return seconds_of(work.kernels, links.cluster, choice.tensor, software)


def _send(work: Work, links: Links, beside: float) -> float:
    """Returns the seconds of the collectives of ``work`` over ``tensor`` that ``beside`` seconds of computation do not hide."""
    seconds = sum(collective_seconds(links, TENSOR, each.kind, each.payload_bytes) for each in work.collectives)
    hidden = min(seconds, beside)
    return seconds - hidden + INTERFERENCE * hidden
