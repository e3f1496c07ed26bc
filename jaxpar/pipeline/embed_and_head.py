"""The two ends of a model, embedding and head with loss, as functions of the outer params that they read.

Outer params are given, and their gradients returned, by the number of their leaf:

    outer      {"norm": a, "tokens": b, "head": c}     its leaves in order: 0 head, 1 norm, 2 tokens
    embedding  {2: b}
    head       {0: c, 1: a}

One that an end does not read is not sent to its stage and has no gradient there; a frozen one has none anywhere.

Only the first and the last stage use outer params, but all stages run one program. At rest they and their optimizer state are
therefore sharded over ``stage`` (by ``shardings_from_paths``). A step gathers them once, and reduce-scatters their gradients
over the stages (``stage_specs``, ``sum_over_stages``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import opened, row_major, with_inner
from jaxpar.backward.add_grads import nodes_of_grads
from jaxpar.backward.graph import ELEMENTWISE, Graph, Node, fold_transposes, trace
from jaxpar.backward.padded_dims import keep_padding
from jaxpar.dtypes import by_parts, float_indices, is_float, merge
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, outer_stage_dim
from jaxpar.loss_sums import gradient_of_sum, sums_of
from jaxpar.mesh import STAGE
from jaxpar.pipeline.control_flow import is_maskable, permutes
from jaxpar.pipeline.head_parts import HeadParts, find_parts
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import Program
from jaxpar.shard_map import on_tensor_shards, tensor_part
from jaxpar.trainable import trained_indices

Arrays = Sequence[Any]
Outer = dict[int, Any]  # outer params, or their gradients, by the number of their leaf

_IN_LOOKUPS = ELEMENTWISE | {
    "add_any",
    "gather",
    "pad",
    "reduce_sum",
    "reshard",
    "scatter-add",
    "sharding_constraint",
}
_CALLS = {"custom_jvp_call", "jit"}  # whose operations count


class Ends:
    """The functions of embedding and head.

    Attributes:
        embed_reads: The numbers of the outer params that the embedding reads.
        head_reads: Those that the head and the loss read.
        head_dtypes: In which dtype the head takes each of them: a smaller one than its own if it only casts it to that.
        embed_trains: Those of embed_reads that are trained.
        head_trains: Those of head_reads that are trained.
        embed_is_lookup: Whether the backward pass of the embedding has only lookups, sums and elementwise operations, so that
            computing it costs less than a wait of the host that decides whether to.
        loss_sums: The shapes and dtypes of ``(loss_sum, further sums of the loss)``.
        skips: Which of "embed", "head" and "embed_back" an idle stage must skip (``control_flow.is_maskable``).
        permutes: Which of them send to other devices by a permutation.
        parts: The parts of a microbatch of which head and loss are a sum, one for each stage; None: unknown.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with further sums after the two.
        outer: The outer params, or ShapeDtypeStructs.
        y: The output of the last layer, likewise.
        microbatch: A microbatch, likewise.
        num_stages: The number of stages that may share the head.
        num_shards: The number of shards over ``tensor`` of the positions of y, as under sequence parallelism.
        is_forward: Whether no backward pass follows, so that the head returns no ct; all of outer is frozen then.
    """

    def __init__(
        self,
        model: LayeredModel,
        loss: Callable,
        outer: PyTree,
        y: PyTree,
        microbatch: PyTree,
        *,
        num_stages: int = 1,
        num_shards: int = 1,
        is_forward: bool = False,
    ) -> None:
        self._model = model
        self._loss = loss
        self._is_forward = is_forward
        self._shapes, self._outer_tree = jax.tree.flatten(outer)
        y_leaves, self._y_tree = jax.tree.flatten(y)
        shapes, trained = self._shapes, trained_indices(outer)

        self._embed_graph = trace(self._embed, shapes, microbatch)
        self.embed_reads = _inputs_read(self._embed_graph, len(shapes))
        self.embed_trains = [i for i in self.embed_reads if i in trained]
        self._head_graph = trace(self._head, shapes, y_leaves, microbatch)
        self.head_reads = _inputs_read(self._head_graph, len(shapes))
        self.head_trains = [i for i in self.head_reads if i in trained]
        self.head_dtypes = self._find_head_dtypes()
        self.loss_sums = jax.eval_shape(self._head, shapes, y_leaves, microbatch)

        embed_back = self._embed_back_nodes(microbatch)
        inner = [each for node in embed_back for each in with_inner(node.equation)]
        names = {equation.primitive.name for equation in inner}
        self.embed_is_lookup = names <= _IN_LOOKUPS | _CALLS
        head = jax.make_jaxpr(self.head)
        of_head = head(self.read_by_head(shapes), y_leaves, microbatch, self.loss_sums[0])
        operations = {
            "embed": [node.equation for node in self._embed_graph.nodes],
            "embed_back": [node.equation for node in embed_back],
            "head": opened(of_head).eqns,
        }
        ends_where = lambda holds: frozenset(end for end in operations if holds(operations[end]))
        self.permutes = ends_where(permutes)
        self.skips = frozenset(operations) - ends_where(is_maskable)
        self.parts = None
        if num_stages > 1:
            self.parts = self.parts_for(y, microbatch, num_stages, num_shards)

    def _find_head_dtypes(self) -> Outer:
        graph, num_outer = self._head_graph, len(self._shapes)
        inputs = graph.inputs
        avals = graph.narrow(inputs[:num_outer]).avals
        return {i: avals[inputs[i]].dtype for i in self.head_reads}

    def _embed_back_nodes(self, microbatch: PyTree) -> list[Node]:
        """The operations of the embedding's backward pass."""
        graph = self._embed_graph
        x = [graph.avals[number] for number in graph.outputs]
        dx = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in x if is_float(leaf)]
        backward = trace(self.embed_backward, self.read_by_embed(self._shapes), microbatch, dx)
        return nodes_of_grads(backward, len(dx))

    # -- what the ends read --------------------------------------------------------------------------------------------

    def read_by_embed(self, outer: Arrays) -> Outer:
        """Returns what the embedding reads of the leaves of outer."""
        return {i: outer[i] for i in self.embed_reads}

    def read_by_head(self, outer: Arrays) -> Outer:
        """Returns what the head reads of them."""
        return {i: outer[i] for i in self.head_reads}

    def _whole(self, read: Outer) -> list:
        """Returns the leaves of outer, with zeros in place of those that are not read."""
        zeros = [jnp.zeros(like.shape, like.dtype) for like in self._shapes]
        return _replaced(zeros, read)

    # -- where idle stages run them ------------------------------------------------------------------------------------

    def parts_for(
        self,
        y: PyTree,
        microbatch: PyTree,
        num_stages: int,
        num_shards: int,
    ) -> HeadParts | None:
        """Returns ``parts`` for another number of stages."""
        args = self._shapes, jax.tree.leaves(y), microbatch
        return find_parts(self._head, self._head_graph, *args, num_stages, num_shards)

    def is_masked(self, end: str, program: Program, layout: LayerLayout) -> bool:
        """Whether all stages run "embed", "head" or "embed_back" in a masked tick, and the others discard what it returns.

        With several chunks (few ticks run it) or unequal layers (a stage with fewer has time for it) it is skipped, but for an
        embedding that only looks rows up. One that the program skips always is.
        """
        if end in program.skips:
            return False
        is_in_each_tick = program.schedule.num_chunks == 1 and layout.is_even
        return is_in_each_tick or (end != "head" and self.embed_is_lookup)

    # -- embedding -----------------------------------------------------------------------------------------------------

    def embed(self, read: Outer, microbatch: PyTree) -> list:
        """Returns x."""
        return self._embed(self._whole(read), microbatch)

    def embed_again(self, read: Outer, microbatch: PyTree) -> list:
        """Returns x likewise, without side effects that x does not depend on."""
        graph = self._embed_graph
        given = [*self._whole(read), *jax.tree.leaves(microbatch)]
        values = dict(zip(graph.inputs, given, strict=True))
        nodes = graph.needed(graph.outputs, ())
        return [jnp.asarray(leaf) for leaf in graph.run(nodes, values, graph.outputs)]

    def embed_backward(self, read: Outer, microbatch: PyTree, dx: Arrays) -> Outer:
        """Returns the gradients of ``embed_trains`` from dx, which has the float leaves of x."""

        def of_floats(trained: Outer) -> list:
            x = self.embed(read | trained, microbatch)
            return [leaf for leaf in x if is_float(leaf)]

        trained = {i: read[i] for i in self.embed_trains}
        _, vjp = jax.vjp(of_floats, trained)
        (grads,) = vjp(list(dx))
        return grads

    def _embed(self, outer: Arrays, microbatch: PyTree) -> list:
        x = self._model.embed(self._outer_tree.unflatten(outer), microbatch)
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(x)]

    # -- head ----------------------------------------------------------------------------------------------------------

    def head(
        self,
        read: Outer,
        y: Arrays,
        microbatch: PyTree,
        total_weight: Any,
    ) -> tuple[PyTree, Outer, list]:
        """Returns (loss_sums, gradients of head_trains, ct).

        ct is that of the float leaves of y; the cotangent of loss_sum is 1 / total_weight.
        """
        run = fold_transposes(self._head_and_backward, keep_padding)
        return run(read, y, microbatch, total_weight)

    def _head_and_backward(
        self,
        read: Outer,
        y: Arrays,
        microbatch: PyTree,
        total_weight: Any,
    ) -> tuple[PyTree, Outer, list]:
        floats = [] if self._is_forward else float_indices(y)
        wide = {i: leaf.astype(self._shapes[i].dtype) for i, leaf in read.items()}
        outer = self._whole(wide)

        def of_floats(trained: Outer, y_floats: Arrays) -> tuple[jax.Array, PyTree]:
            whole_y = merge(y, floats, y_floats)
            return self._head(_replaced(outer, trained), whole_y, microbatch)

        trained = {i: outer[i] for i in self.head_trains}
        y_floats = [y[i] for i in floats]
        loss_sum, vjp, further = jax.vjp(of_floats, trained, y_floats, has_aux=True)
        grads, ct = vjp(gradient_of_sum(loss_sum, total_weight))
        return (loss_sum, further), grads, ct

    def _head(self, outer: Arrays, y: Arrays, microbatch: PyTree) -> tuple[jax.Array, PyTree]:
        of_outer = self._outer_tree.unflatten(outer)
        outputs = self._model.head(of_outer, self._y_tree.unflatten(y))
        return sums_of(self._loss, outputs, microbatch)


def _replaced(leaves: Arrays, read: Outer) -> list:
    return merge(leaves, read.keys(), read.values())


def _inputs_read(graph: Graph, num_outer: int) -> list[int]:
    """The numbers of the outer params, the first inputs of a graph, that it reads."""
    read = set(graph.outputs)
    for node in graph.needed(graph.outputs, ()):
        read.update(node.inputs)
    outer = graph.inputs[:num_outer]
    return [i for i, number in enumerate(outer) if number in read]


def stage_specs(params: PyTree, num_stages: int, *, spread: bool = True) -> tuple[PyTree, PyTree]:
    """Returns the specs over ``stage`` of the params that enter a pipeline and of the gradients that it returns.

    Args:
        params: The params of a LayeredModel.
        num_stages: The number of stages.
        spread: Whether the gradients of outer are sharded over the stages; if not, they are replicated.
    """

    def of_grad(leaf: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec:
        is_spread = spread and num_stages > 1
        dim = outer_stage_dim(leaf.shape, num_stages) if is_spread else None
        if dim is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * dim, STAGE)

    outer, layers = params[OUTER], params[LAYERS]
    whole = jax.tree.map(lambda _: PartitionSpec(), outer)
    of_layer = PartitionSpec(STAGE) if is_stacked(params) else PartitionSpec()
    of_layers = jax.tree.map(lambda _: of_layer, layers)
    of_grads = {OUTER: jax.tree.map(of_grad, outer), LAYERS: of_layers}
    return {OUTER: whole, LAYERS: of_layers}, of_grads


def sum_over_stages(loss_sums: PyTree, grads: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the loss and the gradients of outer summed over the stages, each gradient sharded according to ``specs``.

    Args:
        loss_sums: This stage's loss_sum and further sums.
        grads: This stage's gradients, in float32 or wider; those of layers are returned unchanged.
        specs: For each gradient its PartitionSpec over ``stage`` and ``tensor``.

    **Collectives**: over ``stage`` an all-reduce of the loss and the replicated gradients, and a reduce-scatter for each
    sharded gradient; none with one stage.
    """
    outer = jax.tree.map(_in_rows, grads[OUTER], specs[OUTER])
    if jax.lax.axis_size(STAGE) == 1:
        return loss_sums, grads | {OUTER: outer}

    def spread(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        if STAGE not in spec:
            return by_parts(lambda parts: jax.lax.psum(parts, STAGE), grad)
        dim = tuple(spec).index(STAGE)
        reduce = lambda g: jax.lax.psum_scatter(g, STAGE, scatter_dimension=dim, tiled=True)
        shards = tensor_part(spec)
        each = lambda parts: [on_tensor_shards(reduce, part, shards) for part in parts]
        return by_parts(each, grad)

    outer = jax.tree.map(spread, outer, specs[OUTER])
    return jax.lax.psum(loss_sums, STAGE), grads | {OUTER: outer}


def _in_rows(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns a gradient that is row-major in memory.

    A reduce-scatter along another dim than the first wants another order. XLA for GPUs would keep it for the
    sums in the loop over ticks too, and turn a table of embeddings round and back for each scatter-add.
    """
    return on_tensor_shards(row_major, grad, tensor_part(spec))
