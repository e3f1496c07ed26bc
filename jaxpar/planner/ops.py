"""The ops of a layer, and of the head, for one microbatch on one device: their work."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jaxpar.backward.graph import Graph, Node
from jaxpar.backward.min_cut import peak_bytes
from jaxpar.backward.partition import ParamShards, Partition, partition, shard_shape
from jaxpar.dtypes import is_float, num_bytes
from jaxpar.fields import arg
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.mesh import TENSOR, abstract_mesh, cut_of
from jaxpar.pipeline.executor import plans_of_ops
from jaxpar.planner.fused import FORWARD, RULES, Grouped, grouped_of
from jaxpar.planner.job import Choice
from jaxpar.planner.kernels import VIEWS, Kernels, kernels_of, peak_of_kernels
from jaxpar.planner.model_shape import ModelShape, Traced
from jaxpar.planner.op_traffic import Sent, over_context, over_data, over_tensor
from jaxpar.planner.shape_checks import check_trips
from jaxpar.schedule import PLACEMENT
from jaxpar.sharding import shardings_from_paths
from jaxpar.trainable import trained_indices


@dataclass(frozen=True)
class Work:
    """The work of one device in one op of one microbatch.

    Attributes:
        flops: Floating-point operations of matrix products.
        sent: Its collectives.
        kernels: What runs on the device.
        reads: Indices of the params of one layer that the op reads.
    """

    flops: int
    sent: tuple[Sent, ...]
    kernels: Kernels
    reads: frozenset[int] = frozenset()


class Analysis:
    """The work of a model's ops, for microbatches of ``num_rows`` rows and ``tensor`` shards.

    Args:
        shape: The model.
        num_rows: Rows of one replica's microbatch.
        tensor: Size of the ``tensor`` axis.
        remat: As in ``Choice``.
        data: Size of the ``data`` axis, where experts are over it.
        context: Size of the ``context`` axis. The model is traced for one part of the sequences; what attention to all of
            them adds is computed from shapes (``over_context``).

    Raises:
        ValueError: An axis does not divide the model, attention over ``context`` is not fused, or it is not known how often a
            loop runs.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_rows: int,
        tensor: int,
        remat: bool | str = False,
        *,
        data: int = 1,
        context: int = 1,
    ) -> None:
        self.shape = shape
        self.num_rows = num_rows
        self.tensor = tensor
        self.context = context
        self.data = data if shape.over_data else 1
        if (shape.experts or 1) % self.data:
            raise ValueError(
                f"{arg('data')} must divide the experts; got {arg(data=data)} and {shape.experts} experts. Choose another."
            )
        self._parts: dict[int, Work | None] = {}  # of the head, by the number of stages
        shardings = shardings_from_paths(shape.params, abstract_mesh(tensor=tensor), shape.rules)
        cuts = jax.tree.map(lambda s: cut_of(s.spec, TENSOR), shardings)
        self.outer_cuts = jax.tree.leaves(cuts[OUTER], is_leaf=lambda cut: cut is None)
        specs = [sharding.spec for sharding in jax.tree.leaves(shardings[LAYERS])]
        shards = self.shards = ParamShards.of_layers(specs, tensor)
        mesh = abstract_mesh(data=self.data, context=context, tensor=tensor)
        self._traced = Traced(shape, num_rows, mesh)
        ends = self._traced.ends
        self.ends = ends.ends
        self._end_graphs = ends.graphs
        split = self.split = self._traced.split(remat == "dots", shards)
        params = split.values["params"]
        self.layer: Partition = shards.partition(split.graph, params, rules=RULES)
        check_trips(self.layer)
        self.x: list[Any] = []  # an activation between two layers, on a device
        pairs = zip(jax.tree.leaves(ends.x), split.values["y"], strict=True)
        for leaf, value in pairs:
            cut = self.layer.cuts.get(value)
            self.x.append(shard_shape(leaf, cut, tensor))
        if context > 1 and not any(node.name == FORWARD for node in self.layer.graph.nodes):
            raise ValueError(
                f"sequences over context are planned with fused attention; got {arg(context=context)} and "
                f"{_without_fused(shape)}"
            )

    @cached_property
    def in_use(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the params of one layer on a device, in the dtypes of the computation."""
        return self.layer.shapes(self.split.values["params"])

    @property
    def cast_bytes(self) -> tuple[int, int]:
        """The bytes that are read, and written, to cast the params of a layer to the dtype of the computation."""
        given = jax.tree.leaves(self.shape.params[LAYERS])
        pairs = zip(self.in_use, given, strict=True)
        cast = [(new, own) for new, own in pairs if new.dtype != own.dtype]
        read = sum(new.size * own.dtype.itemsize for new, own in cast)
        return read, num_bytes(new for new, _ in cast)

    @property
    def shards_nothing(self) -> bool:
        """Whether no param is sharded over ``tensor``."""
        return all(cut is None for cut in (*self.shards.cuts, *self.outer_cuts))

    @property
    def trained_params(self) -> list[Any]:
        """The shapes of the params of one layer on a device that are trained."""
        frozen = self.shape.frozen(self.shape.params)
        return [self.in_use[i] for i in trained_indices(frozen[LAYERS])]

    @property
    def head_grads(self) -> list[Any]:
        """The shapes of the gradients of the head's params on a device."""
        part, _ = self._head
        _, *grads = part.graph.outputs
        return part.shapes(grads[: len(self.ends.head_trains)])

    @cached_property
    def works(self) -> dict[str, Work]:
        """The work of one layer in each of ``SplitLayer.plans``."""
        return {
            name: self._work(self.layer, plan.nodes, plan.makes)
            for name, plan in self.split.plans.items()
        }

    @cached_property
    def one_layer_bytes(self) -> int:
        """Peak bytes of live values while an op of a pipeline runs one layer."""
        names = ("forward_and_store", "backward_input", "backward_weights")
        return max(map(self._peak_of_plan, names)) + self._gathered_bytes

    @cached_property
    def forward_bytes(self) -> int:
        """The same while F runs one layer."""
        return self._peak_of_plan("forward_and_store") + self._gathered_bytes

    def _peak_of_plan(self, name: str) -> int:
        return peak_bytes(self.layer.graph, *self.split.plans[name])

    @cached_property
    def again_bytes(self) -> int:
        """The same while one layer runs forward again and then backward, and stores nothing between the two."""
        again = self.split.plans["again"]
        return peak_of_kernels(self.layer.graph, *again) + self._gathered_bytes

    @cached_property
    def backward_bytes(self) -> int:
        """Peak bytes of live values while one layer runs backward: its params too, but not their gradients."""
        plan, graph = self.split.plans["backward"], self.layer.graph
        dx = self.split.values["dx"]
        backward = peak_bytes(graph, graph.needed(dx, plan.known), plan.known, dx)
        return max(self._peak_of_plan("forward_and_store"), backward)

    @cached_property
    def remat_bytes(self) -> int:
        """The same where it first runs forward again, as JAX splits the two: what backward reads of that is in memory."""
        plan = self.split.plans["again"]
        graph, values = self.layer.graph, self.split.values
        params = set(values["params"])
        ct = [i for i in plan.known if i not in params][len(self.x) :]
        backward = graph.reached(ct)
        reads: set[int] = set()
        for node in plan.nodes:
            if not backward.isdisjoint(node.outputs):
                reads.update(node.inputs)
        kept = {_viewed(graph, i) for i in reads - backward} - params - set(graph.constants)
        nodes = graph.needed(values["dx"], [*kept, *ct, *params])
        return num_bytes(self.in_use) + peak_of_kernels(graph, nodes, [*kept, *ct], values["dx"])

    @property
    def _gathered_bytes(self) -> int:
        """Bytes of the keys and values of complete sequences, or of all that an all-to-all receives, while a layer runs."""
        graph = self.layer.graph
        forward = [node for node in graph.nodes if node.name == FORWARD]
        sent = over_context(graph, forward, self.context)
        return sum(each.payload_bytes for each in sent)

    @cached_property
    def _grouped(self) -> Grouped | None:
        found = map(grouped_of, self.layer.graph.nodes)
        return next(filter(None, found), None)

    @property
    def own_share(self) -> float:
        """The share of the pairs of tokens and experts that a device's own experts have, of those that it has room for.

        Over ``tensor`` every device has room for all pairs; over ``data`` it receives as many as it sends.
        """
        if self._grouped is None:
            return 1.0
        shape = self.shape
        tokens = self.num_rows * shape.tokens_per_row // self.context * self.data
        pairs = tokens * shape.experts_per_token * self._grouped.experts / (shape.experts or 1)
        return pairs / self._grouped.pairs

    def _work(self, part: Partition, nodes: Iterable[Node], makes: Iterable[int]) -> Work:
        nodes = list(nodes)
        work = _work_of(part, nodes, makes)
        kernels = work.kernels
        flops = work.flops
        sent = list(work.sent)
        if self.num_rows > 1:
            # Parts of the positions of several rows are not contiguous, and XLA transposes them.
            moved = sum(each.payload_bytes for each in sent if each.kind != "all-reduce")
            kernels = replace(kernels, num_bytes=kernels.num_bytes + 2 * moved)
        if kernels.grouped:
            sizes = ((each.pairs, each.depth, each.columns) for each in kernels.grouped)
            of_rows = 2 * sum(map(math.prod, sizes))
            flops += round(of_rows * self.own_share)
        if self.data > 1:
            # Larger than the activations that layers read and write.
            leaves = jax.tree.leaves(self._traced.ends.x)
            stream = max(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            sent = [each._replace(of_rows=each.payload_bytes > stream) for each in sent]
            sent += over_data(nodes)
        if self.context > 1:  # to the keys of complete sequences
            forward, backward = kernels.attention
            of_whole = self.context * forward, self.context * backward
            kernels = replace(kernels, attention=of_whole)
            flops += 2 * (self.context - 1) * (forward + backward)
            sent += over_context(self.layer.graph, nodes, self.context)
        read = {i for node in nodes for i in node.inputs}
        params = enumerate(self.split.values["params"])
        reads = frozenset(number for number, i in params if i in read)
        return Work(flops, tuple(sent), kernels, reads)

    @cached_property
    def end_works(self) -> dict[str, Work]:
        """The work of "embed", "embed_back" and "head"; that of the head includes the loss, forward and backward."""
        return {name: self._work_of_end(*each) for name, each in self._end_graphs.items()}

    def sent_by_embed_back(self, remat: bool | str) -> tuple[Sent, ...]:
        """Returns the collectives of the embedding's backward pass on one stage, where the forward pass has stored its values.

        Under ``remat`` a checkpoint is around the embedding, which runs again but for what the policy stores, its products.
        """
        graph, reads = self._end_graphs["embed_back"]
        part, nodes = self._end(graph, reads)
        num_cts = sum(map(is_float, jax.tree.leaves(self._traced.ends.x)))
        back = graph.reached(graph.inputs[len(graph.inputs) - num_cts :])
        is_again = lambda node: back.isdisjoint(node.outputs)
        is_stored = lambda node: remat is False or (remat == "dots" and node.name == "dot_general")
        run = [node for node in nodes if not (is_again(node) and is_stored(node))]
        return tuple(over_tensor(part, run))

    def end_part(self, name: str) -> Partition:
        """Returns "embed", "embed_back" or "head" as one device of ``tensor`` runs it."""
        part, _ = self._end(*self._end_graphs[name])
        return part

    def _work_of_end(self, graph: Graph, reads: Sequence[int]) -> Work:
        part, nodes = self._end(graph, reads)
        return _work_of(part, nodes, graph.outputs)

    def _end(self, graph: Graph, reads: Sequence[int]) -> tuple[Partition, list[Node]]:
        given = {graph.inputs[n]: self.outer_cuts[i] for n, i in enumerate(reads)}
        part = partition(graph, given, self.tensor, RULES)
        check_trips(part)
        return part, graph.needed(graph.outputs, graph.inputs)

    @cached_property
    def _head(self) -> tuple[Partition, list[Node]]:
        return self._end(*self._end_graphs["head"])

    @cached_property
    def head_bytes(self) -> int:
        """Peak bytes of live values while the head and the loss run; mostly logits, or in their place their gradient."""
        part, nodes = self._head
        return self._head_bytes(nodes, part.graph.outputs)

    @cached_property
    def head_waits_bytes(self) -> int:
        """Bytes that wait during the backward pass of layers for the reduction of the gradients of the head's params.

        XLA computes gradients that are a product when the layers have run, from what is stored for them, even if that is more.
        """
        graph = self._head[0].graph
        own, _ = self._added_in_op
        products = {node.outputs[0]: node for node in graph.nodes if node.name == "dot_general"}
        pairs = zip(own, self.head_grads, strict=True)
        total = 0
        for grad, like in pairs:
            product = products.get(_viewed(graph, grad))
            total += sum(map(graph.num_bytes, product.inputs)) if product else num_bytes([like])
        return total

    @cached_property
    def head_bytes_of_op(self) -> int:
        """The same in an op of a pipeline: gradients of params come last, and are widened only as they are added to sums."""
        graph = self._head[0].graph
        own, outputs = self._added_in_op
        first = graph.needed([i for i in outputs if i not in own], graph.inputs)
        last = [node for node in graph.needed(outputs, graph.inputs) if node not in first]
        return self._head_bytes([*first, *last], outputs)

    @cached_property
    def head_bytes_of_branch(self) -> int:
        """The same where a branch skips the op, in which XLA keeps the order of the trace: params are read to the end."""
        graph = self._head[0].graph
        _, outputs = self._added_in_op
        nodes = graph.needed(outputs, graph.inputs)
        return self._head_bytes(nodes, outputs)

    def part_of_head(self, choice: Choice) -> Work | None:
        """The work of a stage that shares the head, if it is a sum over rows or positions (``executor.py``); else None."""
        if choice.num_chunks >= choice.stage or PLACEMENT[choice.schedule] != "loop":
            return None
        cuts = [self.layer.cuts.get(value) for value in self.split.values["y"]]
        shards = self.tensor if 1 in cuts else 1
        part = self._traced.part_of_head(choice.stage, shards)
        if choice.stage not in self._parts:
            self._parts[choice.stage] = self._work_of_end(*part) if part else None
        return self._parts[choice.stage]

    @cached_property
    def embed_bytes(self) -> int:
        """Peak bytes of live values while an embedding with layers runs backward; 0 for one that only looks rows up."""
        if self.ends.embed_is_lookup:
            return 0
        graph, reads = self._end_graphs["embed_back"]
        part, nodes = self._end(graph, reads)
        # Rows are added to sums, without a table of zeros.
        rows = {node.outputs[0] for node in nodes if node.name == "scatter-add"}
        outputs = [number for number in part.graph.outputs if number not in rows]
        nodes = part.graph.needed(outputs, part.graph.inputs)
        return peak_of_kernels(part.graph, nodes, part.graph.inputs[len(reads) :], outputs)

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


def _viewed(graph: Graph, value: int) -> int:
    """Returns the value in memory of which a value is a view."""
    made_by = {}
    for node in graph.nodes:
        if node.name in VIEWS and node.inputs:
            made_by |= dict.fromkeys(node.outputs, node)
    while value in made_by:
        value = made_by[value].inputs[0]
    return value


def _work_of(part: Partition, nodes: list[Node], makes: Iterable[int]) -> Work:
    kernels = _kernels_of(part, nodes, makes)
    # Rates are published as if the scores above the diagonal were computed.
    flops = part.flops_of(nodes) + 2 * sum(kernels.attention)
    return Work(flops, tuple(over_tensor(part, nodes)), kernels)


def _kernels_of(part: Partition, nodes: Sequence[Node], makes: Iterable[int]) -> Kernels:
    sharded = {value for value, cut in part.cuts.items() if cut is not None}
    summed = {i for node in nodes if node.first in part.collectives for i in node.outputs}
    kernels = kernels_of(part.graph, nodes, {*makes, *summed}, sharded)
    for node in nodes:
        for body in part.bodies.get(node.first, ()):
            graph = body.part.graph
            inside = _kernels_of(body.part, graph.nodes, graph.outputs)
            kernels = kernels.and_of_body(inside, body.times)
    return kernels


def layer_works(choice: Choice, analysis: Analysis) -> dict[str, Work]:
    """Returns the work of a layer in each op."""
    again = choice.remat is True
    if choice.stage == 1:
        plans = {"F": "forward", "B": "again" if again else "backward"}
    else:
        has_next = choice.layout(analysis.shape.num_layers).positions_per_chunk > 1
        plans = plans_of_ops(
            recomputes=again, splits_backward=choice.splits_backward, has_next=has_next
        )
    return {op: analysis.works[plan] for op, plan in plans.items()}


def _without_fused(shape: ModelShape) -> str:
    """Returns what a model has that no fused attention is in, and the remedy."""
    if shape.remake is not None:
        return "attention that stores scores. Choose planned_attention, by flag --attention flash."
    return (
        "a layer without it. Call jaxpar.planner.fused.planned_attention in the layer of the ModelShape where it attends, or "
        f"choose {arg(context=1)}."
    )
