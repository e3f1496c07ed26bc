"""The ops of a layer, and of the head, for one microbatch on one device: their work, traced once, and their seconds."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from jaxpar._compat import constraint_of
from jaxpar.backward.graph import Graph, Node, trace
from jaxpar.backward.min_cut import peak_bytes
from jaxpar.backward.partition import ParamShards, Partition, cut_of, partition, shard_shape
from jaxpar.backward.remat import keep_products
from jaxpar.backward.split import SplitLayer, TracedLayer, trace_layer
from jaxpar.dtypes import num_bytes, wide_dtype
from jaxpar.fields import arg
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.mesh import CONTEXT, MANUAL, TENSOR, abstract_mesh
from jaxpar.pipeline.embed_and_head import Ends, split_ends
from jaxpar.planner.cluster import Links, collective_seconds
from jaxpar.planner.job import Assumptions, Choice, ModelShape, Software
from jaxpar.planner.kernels import (
    BACKWARD,
    FORWARD,
    NO_KERNELS,
    RULES,
    Kernels,
    kernels_of,
    memory_rate,
    peak_of_kernels,
    seconds_of,
)
from jaxpar.shard_map import as_manual_over
from jaxpar.sharding import shardings_from_paths
from jaxpar.trainable import trained_indices

# Collectives take multiprocessors and memory bandwidth from the computation beside which they run: by this share of their time
# they lengthen it.
INTERFERENCE = 0.25


class Sent(NamedTuple):
    """A collective of an op over an axis, as ``Collective``."""

    axis: str
    kind: str
    payload_bytes: int


@dataclass(frozen=True)
class Work:
    """The work of one device in one op of one microbatch.

    Attributes:
        flops: Floating-point operations of matrix products.
        sent: Its collectives.
        reads: Indices of the params of one layer that the op reads.
        kernels: What runs on the device.
    """

    flops: int = 0
    sent: tuple[Sent, ...] = ()
    reads: frozenset[int] = frozenset()
    kernels: Kernels = NO_KERNELS


class Analysis:
    """The work of a model's ops, for microbatches of ``num_rows`` rows and ``tensor`` shards.

    Args:
        shape: The model.
        num_rows: Rows of one replica's microbatch.
        tensor: Size of the ``tensor`` axis.
        remat: As in ``Choice``.
        context: Size of the ``context`` axis. The model is traced for one part of the sequences; what attention to all of
            them adds is computed from shapes (``_over_context``).

    Raises:
        ValueError: An axis does not divide the model, or attention over ``context`` is not fused.
    """

    def __init__(
        self, shape: ModelShape, num_rows: int, tensor: int, remat: bool | str = False, context: int = 1
    ) -> None:
        self.shape, self.num_rows, self.tensor, self.context = shape, num_rows, tensor, context
        self.times: dict[Any, Any] = {}  # of `op_times`
        self._parts: dict[int, Work] = {}  # of the head, by the number of stages
        shardings = shardings_from_paths(shape.params, abstract_mesh(tensor=tensor), shape.rules)
        cuts = jax.tree.map(lambda s: cut_of(s.spec, TENSOR), shardings)
        self._outer_cuts = jax.tree.leaves(cuts[OUTER], is_leaf=lambda cut: cut is None)
        specs = [sharding.spec for sharding in jax.tree.leaves(shardings[LAYERS])]
        shards = ParamShards.of_layers(specs, tensor)
        self._traced = _Traced(shape, num_rows, context, abstract_mesh(tensor=tensor))
        self.ends, self._end_graphs = self._traced.ends.ends, self._traced.ends.graphs
        self.split = self._traced.split(remat == "dots", shards)
        self.layer: Partition = shards.partition(self.split.graph, self.split.values["params"], rules=RULES)
        # An activation between two layers, on a device.
        cuts, y = self.layer.cuts, zip(jax.tree.leaves(self._traced.ends.x), self.split.values["y"], strict=True)
        self.x: list[Any] = [shard_shape(leaf, cuts.get(value), tensor) for leaf, value in y]
        if context > 1 and not any(node.name == FORWARD for node in self.layer.graph.nodes):
            raise ValueError(
                f"sequences over context are planned with fused attention; got {arg(context=context)} and attention that "
                "stores scores. Choose planned_attention, by flag --attention flash."
            )

    @property
    def trained_params(self) -> list[Any]:
        """The shapes of the params of one layer on a device that are trained."""
        in_use, shape = self.layer.shapes(self.split.values["params"]), self.shape
        return [in_use[i] for i in trained_indices(shape.frozen(shape.params)[LAYERS])]

    @property
    def head_grads(self) -> list[Any]:
        """The shapes of the gradients of the head's params on a device."""
        part, _ = self._head
        return part.shapes(part.graph.outputs[1 : len(self.ends.head_trains) + 1])

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
        return max(peak_bytes(self.layer.graph, *plan) for plan in plans) + self._gathered_bytes

    @cached_property
    def forward_bytes(self) -> int:
        """The same while F runs one layer."""
        return peak_bytes(self.layer.graph, *self.split.plans["forward_and_store"]) + self._gathered_bytes

    @cached_property
    def again_bytes(self) -> int:
        """The same while one layer runs forward again and then backward, and stores nothing between the two."""
        return peak_of_kernels(self.layer.graph, *self.split.plans["again"]) + self._gathered_bytes

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

    @property
    def _gathered_bytes(self) -> int:
        """Bytes of the keys and values of complete sequences, or of all that an all-to-all receives, while a layer runs."""
        sent = self._over_context([node for node in self.layer.graph.nodes if node.name == FORWARD])
        return sum(each.payload_bytes for each in sent)

    def _over_context(self, nodes: Iterable[Node]) -> Iterator[Sent]:
        """Yields the collectives over ``context`` of attention, in the form that sends fewer bytes.

        Either keys and values are gathered in F and again in B, and their gradients scattered; or queries, keys, values and the
        result are exchanged for those of fewer heads and complete sequences.
        """
        kernels = [node for node in nodes if node.name in (FORWARD, BACKWARD)]
        for at, node in enumerate(kernels if self.context > 1 else ()):
            of_q, of_kv = (sum(map(self.layer.graph.num_bytes, node.inputs[a:b])) for a, b in ((0, 1), (1, 3)))
            heads, kv_heads = (self.layer.graph.avals[i].shape[2] for i in node.inputs[:2])
            exchanged = 2 * of_q + of_kv * (self.context // math.gcd(self.context, kv_heads))  # with copies of kv heads
            if heads % self.context == 0 and 2 * exchanged <= 3 * self.context * of_kv:
                yield Sent(CONTEXT, "all-to-all", exchanged)
                continue
            if at == 0:  # what is gathered for a recomputed F is there for B
                yield Sent(CONTEXT, "all-gather", self.context * of_kv)
            if node.name == BACKWARD:
                yield Sent(CONTEXT, "reduce-scatter", self.context * of_kv)

    def _work(self, part: Partition, nodes: Iterable[Node], makes: Iterable[int]) -> Work:
        nodes = list(nodes)
        work = _work_of(part, nodes, makes)
        if self.context > 1:  # to the keys of complete sequences
            forward, backward = work.kernels.attention
            kernels = replace(work.kernels, attention=(self.context * forward, self.context * backward))
            flops = work.flops + 2 * (self.context - 1) * (forward + backward)
            work = replace(work, flops=flops, sent=(*work.sent, *self._over_context(nodes)), kernels=kernels)
        read = {i for node in nodes for i in node.inputs}
        return replace(work, reads=frozenset(n for n, i in enumerate(self.split.values["params"]) if i in read))

    @cached_property
    def end_works(self) -> dict[str, Work]:
        """The work of "embed", "embed_back" and "head"; that of the head includes the loss, forward and backward."""
        return {name: self._work_of_end(*each) for name, each in self._end_graphs.items()}

    def _work_of_end(self, graph: Graph, reads: Sequence[int]) -> Work:
        part, nodes = self._end(graph, reads)
        return _work_of(part, nodes, graph.outputs)

    def _end(self, graph: Graph, reads: Sequence[int]) -> tuple[Partition, list[Node]]:
        given = {graph.inputs[n]: self._outer_cuts[i] for n, i in enumerate(reads)}
        return partition(graph, given, self.tensor, RULES), graph.needed(graph.outputs, graph.inputs)

    @cached_property
    def _head(self) -> tuple[Partition, list[Node]]:
        return self._end(*self._end_graphs["head"])

    @cached_property
    def head_bytes(self) -> int:
        """Peak bytes of live values while the head and the loss run; mostly logits, or in their place their gradient."""
        part, nodes = self._head
        return self._head_bytes(nodes, part.graph.outputs)

    @cached_property
    def head_bytes_of_op(self) -> int:
        """The same in an op of a pipeline: gradients of params come last, and are widened only as they are added to sums."""
        part, _ = self._head
        own, outputs = self._added_in_op
        first = part.graph.needed([i for i in outputs if i not in own], part.graph.inputs)
        last = [node for node in part.graph.needed(outputs, part.graph.inputs) if node not in first]
        return self._head_bytes([*first, *last], outputs)

    @cached_property
    def head_bytes_of_branch(self) -> int:
        """The same where a branch skips the op, in which XLA keeps the order of the trace: params are read to the end."""
        _, outputs = self._added_in_op
        graph = self._head[0].graph
        return self._head_bytes(graph.needed(outputs, graph.inputs), outputs)

    def part_of_head(self, choice: Choice) -> Work | None:
        """The work of a stage that shares the head, if it is a sum over rows or positions (``head_parts.py``); else None."""
        if not choice.may_share_head:
            return None
        is_split = any(self.layer.cuts.get(value) == 1 for value in self.split.values["y"])
        part = self._traced.part_of_head(choice.stage, self.tensor if is_split else 1)
        if part and choice.stage not in self._parts:
            self._parts[choice.stage] = self._work_of_end(*part)
        return self._parts[choice.stage] if part else None

    @property
    def _added_in_op(self) -> tuple[list[int], list[int]]:
        """The gradients of the head's params before they are widened, and all values that the op writes, these among them."""
        part, nodes = self._head
        loss, *grads = part.graph.outputs
        widened = {n.outputs[0]: n.inputs[0] for n in nodes if n.name == "convert_element_type"}
        own = [widened.get(grad, grad) for grad in grads[: len(self.ends.head_trains)]]
        return own, [loss, *own, *grads[len(own) :]]

    def _head_bytes(self, nodes: list[Node], outputs: Sequence[int]) -> int:
        graph = self._head[0].graph
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
    return Work(part.flops_of(nodes) + 2 * sum(kernels.attention), tuple(_over_tensor(part, nodes)), kernels=kernels)


def _over_tensor(part: Partition, nodes: Iterable[Node]) -> Iterator[Sent]:
    """Yields the collectives over ``tensor`` of some nodes; a sum that is read only to be sharded is scattered at once."""
    sharded = {
        i
        for node in part.graph.nodes
        if constraint_of(node.equation) and part.cuts.get(node.outputs[0]) is not None
        for i in node.inputs
    }
    for node in nodes:
        if each := part.collectives.get(node.outputs[0]):
            is_scattered = each.kind == "all-reduce" and node.outputs[0] in sharded
            yield Sent(TENSOR, "reduce-scatter" if is_scattered else each.kind, each.payload_bytes)


class _Traced:
    """The functions of a model, traced for microbatches of ``num_rows`` rows on one device of a mesh; cached in the model."""

    def __init__(self, shape: ModelShape, num_rows: int, context: int, mesh: AbstractMesh) -> None:
        self._shape, self._mesh = shape, mesh
        self._batch, self._model = shape.batch(num_rows, context), shape.model_of_frozen
        self._params = shape.frozen(shape.params)
        self._key = num_rows, context, *(mesh.shape[axis] for axis in shape.depends_on)

    @property
    def ends(self) -> _Ends:
        return self._cached("ends", self._trace_ends)

    def split(self, keeps_products: bool, shards: ParamShards) -> SplitLayer:
        traced: TracedLayer = self._cached(("layer", keeps_products), lambda: self._trace_layer(keeps_products))
        return self._cached(("split", keeps_products, shards), lambda: traced.split(shards))

    def part_of_head(self, num_stages: int, num_shards: int) -> tuple[Graph, list[int]] | None:
        """The graph of a stage's part of the head and the outer params that it reads; None if the stages do not share it."""
        parts = {"num_stages": num_stages, "num_shards": num_shards}
        return self._cached(("part of head", *parts.values()), lambda: self._trace_part_of_head(**parts))

    def _cached(self, what: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of ``make``, which is called where a step calls the model: over the shards of all axes."""
        cache, key = self._shape.cache, (what, self._key)
        if key not in cache:
            with as_manual_over(frozenset(MANUAL), self._mesh) if self._shape.depends_on else nullcontext():
                cache[key] = make()
        return cache[key]

    def _x(self) -> PyTree:
        return jax.eval_shape(self._model.embed, self._params[OUTER], self._batch)

    def _split_ends(self, **parts: int) -> Ends:
        return split_ends(self._model, self._shape.loss, self._params[OUTER], self._x(), self._batch, **parts)

    def _trace_layer(self, keeps_products: bool) -> TracedLayer:
        one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), self._params[LAYERS])
        layer = self._model.layers(1)[0]
        layer = jax.checkpoint(layer, policy=keep_products) if keeps_products else layer
        return trace_layer(layer, one_layer, self.ends.x)

    def _trace_ends(self) -> _Ends:
        ends, x, batch = self._split_ends(), self._x(), self._batch
        embed = self._outer(ends.embed_reads)
        floats = [leaf for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        graphs = {
            "embed": (trace(ends.embed, embed, batch), ends.embed_reads),
            "embed_back": (trace(ends.embed_backward, embed, batch, floats), ends.embed_reads),
            "head": self._trace_head(ends, x, batch),
        }
        return _Ends(x, ends, graphs)

    def _trace_part_of_head(self, **sizes: int) -> tuple[Graph, list[int]] | None:
        ends = self._split_ends(**sizes)
        if (parts := ends.parts) is None:
            return None
        of_stage = lambda a: jax.eval_shape(partial(parts.of_stage, stage=jnp.int32(0)), a)
        return self._trace_head(ends, *jax.tree.map(of_stage, (self._x(), self._batch)))

    def _trace_head(self, ends: Ends, x: PyTree, batch: PyTree) -> tuple[Graph, list[int]]:
        weight = jax.ShapeDtypeStruct((), jnp.float32)
        return trace(ends.head, self._outer(ends.head_reads), jax.tree.leaves(x), batch, weight), ends.head_reads

    def _outer(self, indices: Sequence[int]) -> list[Any]:
        leaves = jax.tree.leaves(self._params[OUTER])
        return [leaves[i] for i in indices]


def layer_works(choice: Choice, analysis: Analysis) -> dict[str, Work]:
    """Returns the work of a layer in each op."""
    recomputes, one_stage = choice.remat is True, choice.stage == 1
    works = {"F": analysis.work("forward" if recomputes or one_stage else "forward_and_store")}
    if recomputes and not one_stage:
        works["R"] = analysis.work("forward_and_store")
    if not choice.splits_backward:
        return works | {"B": analysis.work("again" if recomputes and one_stage else "backward")}
    return works | {"B": analysis.work("backward_input"), "W": analysis.work("backward_weights")}


@dataclass(frozen=True)
class OpTimes:
    """Seconds for one microbatch.

    Attributes:
        computing: Those of the kernels of each op of one layer. The last op of the backward pass adds its gradients to those of
            earlier microbatches.
        sending: Those of the collectives over ``tensor`` of each op.
        beside: The part of ``sending`` that runs beside computation where F of a layer runs beside B of another (``merges``).
        again: The part of ``computing`` that is recomputed.
        head_computing: Those of the kernels of the head and the loss, forward and backward, and of the sums of its gradients.
        head_sending: Those of their collectives.
        embed: Those of the embedding.
        embed_back: Those of its backward pass.
    """

    computing: dict[str, float]
    sending: dict[str, float]
    beside: float
    again: float
    head_computing: float
    head_sending: float
    embed: float
    embed_back: float


def op_times(
    choice: Choice, analysis: Analysis, links: Links, assumed: Assumptions, software: Software, *, ideal: bool
) -> OpTimes:
    """Returns the seconds of the ops of a choice, ``ideal`` for stages that run freely; cached in its analysis."""
    part, joins = (None if ideal else analysis.part_of_head(choice)), not choice.splits_backward
    kind = choice.stage > 1, choice.num_microbatches > 1, joins, choice.remat, choice.runs_pipeline and not ideal
    key = kind, part, links.cluster, assumed, software
    if key not in analysis.times:
        analysis.times[key] = _op_times(choice, analysis, links, assumed, software, part, slices=kind[-1])
    return analysis.times[key]


def _op_times(
    choice: Choice,
    analysis: Analysis,
    links: Links,
    assumed: Assumptions,
    software: Software,
    part: Work | None,
    *,
    slices: bool,
) -> OpTimes:
    computes = lambda work: _compute(work, choice, links, assumed, software)
    sends = lambda work: _send(work, links, software.overlaps, computes(work))
    head = part or analysis.end_works["head"]
    works = layer_works(choice, analysis)
    computing = {op: computes(work) for op, work in works.items()}
    if "W" in works and software.products_alone_in_w:
        alone = computes(replace(works["W"], kernels=Kernels(works["W"].kernels.products)))
        computing |= {"B": computing["B"] + computing["W"] - alone, "W": alone}
    forward = computes(analysis.work("forward"))
    again = computing.get("R", forward if choice.remat is True else 0.0) + software.recompute * forward
    computing["B"] += software.recompute * forward
    if slices and assumed.compute is None:  # the params of a layer are copied out of their stacks
        params = analysis.layer.shapes(analysis.split.values["params"])
        copied = lambda work: 2 * num_bytes(params[i] for i in work.reads) / memory_rate(links.cluster)
        computing = {op: seconds + copied(works[op]) for op, seconds in computing.items()}
    of_head = computes(head)
    if choice.num_microbatches > 1 and assumed.compute is None and not software.fused_accumulation:
        sums = lambda grads: sum(2 * each.size * wide_dtype(each.dtype).itemsize for each in grads)
        computing["W" if "W" in works else "B"] += sums(analysis.trained_params) / memory_rate(links.cluster)
        of_head += sums(analysis.head_grads) / memory_rate(links.cluster)
    embed, embed_back = (computes(each) + sends(each) for each in map(analysis.end_works.get, ("embed", "embed_back")))
    sending = {op: sends(work) for op, work in works.items()}
    # The collectives of F run beside the kernels of the backward pass, and the other way around.
    of_backward = lambda seconds: sum(each for op, each in seconds.items() if op != "F")
    beside = min(sending["F"], of_backward(computing)) + min(of_backward(sending), computing["F"])
    beside *= 1 - INTERFERENCE
    return OpTimes(computing, sending, beside, again, of_head, sends(head), embed, embed_back)


def _compute(work: Work, choice: Choice, links: Links, assumed: Assumptions, software: Software) -> float:
    """Returns the seconds of the kernels of ``work``."""
    if assumed.compute is not None:
        return work.flops / (links.cluster.peak_flops * assumed.compute)
    return seconds_of(work.kernels, links.cluster, choice.tensor, software)


def _send(work: Work, links: Links, overlaps: Collection[str], beside: float) -> float:
    """Returns the seconds of the collectives of ``work``, of which those over some axes run beside computation."""
    seconds = [(each.axis, collective_seconds(links, *each)) for each in work.sent]
    hidden = min(sum(each for axis, each in seconds if axis in overlaps), beside)
    return sum(each for _, each in seconds) - (1 - INTERFERENCE) * hidden
