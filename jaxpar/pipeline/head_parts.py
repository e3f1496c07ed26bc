"""The head over the stages: which part of a microbatch each stage takes, where head and loss are a sum over its parts.

In lock-step all stages wait while the last one runs the head. If the loss is a sum over rows, or over the positions of a
sequence, each stage can take a part of them:

    last stage  y ---reduce-scatter over stage--->  a part of y on each stage
    all stages  head and loss, forward and backward, of their part
                a part of dy  ---all-gather over stage--->  dy

Whether they are such a sum is proven by tracing both for all positions and for those of one part. A dim that differs between
the two graphs holds positions. Then every operation must treat positions alike, each on its own, up to the sums; what is not
known to do so, or knows how many positions there are, ends the proof, and the last stage runs the head alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import Tracer, constraint_of
from jaxpar.backward.cut_rules import RULES, Operation
from jaxpar.backward.graph import ELEMENTWISE, Graph, Node, trace
from jaxpar.devices import on_gpus
from jaxpar.dtypes import is_float, is_key, wide_dtype
from jaxpar.mesh import STAGE, TENSOR
from jaxpar.shard_map import on_tensor_shards

_REDUCTIONS = {f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")} | {
    "argmax",
    "argmin",
}
# Where positions are in what these make of them is where a sharded dim would be.
_BY_RULE = {"dot_general", "reshape", "slice", "squeeze", "transpose"} | _REDUCTIONS
_OF_EACH = (ELEMENTWISE - _BY_RULE - {"broadcast_in_dim", "expand_dims", "iota"}) | {"reshard"}
_LINEAR = {
    "add",
    "add_any",
    "convert_element_type",
    "copy",
    "neg",
    "reshape",
    "squeeze",
    "stop_gradient",
    "sub",
}


@dataclass(frozen=True)
class HeadParts:
    """A dim of a microbatch and of y, of which each stage takes a part.

    Attributes:
        dim: The dim: 0 for rows, 1 for positions of a sequence.
        size: Its size. Leaves of another size there are the same for all parts.
        num_stages: The number of parts.
        num_blocks: The dim is divided into as many blocks, of each of which a part has its share. With the shards of a sequence
            over ``tensor`` as blocks no shard moves.
    """

    dim: int
    size: int
    num_stages: int
    num_blocks: int

    def is_split(self, leaf: Any) -> bool:
        """Returns whether a leaf of y or of a microbatch has the dim."""
        return leaf.ndim > self.dim and leaf.shape[self.dim] == self.size

    def of_stage(self, a: jax.Array, stage: jax.Array) -> jax.Array:
        """Returns a stage's part of an array that every stage has."""
        if not self.is_split(a):
            return a
        part = jax.lax.dynamic_index_in_dim(self._in_blocks(a), stage, self.dim + 1, keepdims=False)
        return self._joined(part)

    def scatter(self, a: jax.Array) -> jax.Array:
        """Returns this stage's part of the sum of an array over the stages."""
        reduce = lambda a: jax.lax.psum_scatter(a, STAGE, scatter_dimension=self.dim + 1)
        # XLA's CPU backend aborts at such sums of 16-bit floats. That of one stage with zeros loses no bit.
        widens = is_float(a) and not on_gpus()
        summed = a.astype(wide_dtype(a.dtype)) if widens else a
        part = on_tensor_shards(reduce, self._in_blocks(summed), self._spec)
        return self._joined(part).astype(a.dtype)

    def gather(self, part: jax.Array) -> jax.Array:
        """Returns the whole array from the parts of all stages."""
        blocks = (self.num_blocks, part.shape[self.dim] // self.num_blocks)
        part = part.reshape(*part.shape[: self.dim], *blocks, *part.shape[self.dim + 1 :])
        whole = on_tensor_shards(
            lambda a: jax.lax.all_gather(a, STAGE, axis=self.dim + 1), part, self._spec
        )
        return whole.reshape(*part.shape[: self.dim], self.size, *part.shape[self.dim + 2 :])

    @property
    def _spec(self) -> PartitionSpec:
        """Blocks are sharded over ``tensor``: else every shard would send all of them to the other stages."""
        return (
            PartitionSpec(*(None,) * self.dim, TENSOR) if self.num_blocks > 1 else PartitionSpec()
        )

    def _in_blocks(self, a: jax.Array) -> jax.Array:
        each = self.size // (self.num_blocks * self.num_stages)
        return a.reshape(
            *a.shape[: self.dim], self.num_blocks, self.num_stages, each, *a.shape[self.dim + 1 :]
        )

    def _joined(self, part: jax.Array) -> jax.Array:
        blocks, each = part.shape[self.dim : self.dim + 2]
        return part.reshape(*part.shape[: self.dim], blocks * each, *part.shape[self.dim + 2 :])


def find_parts(
    head: Callable[..., PyTree],
    graph: Graph,
    outer: Sequence[Any],
    y: Sequence[Any],
    microbatch: PyTree,
    num_stages: int,
    num_shards: int,
) -> HeadParts | None:
    """Returns a dim over which head and loss are proven to be a sum, rows before positions; None if there is none.

    Args:
        head: ``(outer, y, microbatch) -> sums``, of flat lists of outer and y.
        graph: ``head`` traced for the shapes below.
        outer: The shapes of the outer params.
        y: The shapes of the outputs of the last layer.
        microbatch: The shapes of a microbatch.
        num_stages: The number of stages, which must divide the dim.
        num_shards: The number of shards over ``tensor`` of the positions of y, 1 if they are not sharded. Blocks for shards
            that are not there would shard them, and XLA then all the layers.
    """
    for dim, num_blocks in ((0, 1), (1, num_shards)):
        sizes = {leaf.shape[dim] if leaf.ndim > dim else 0 for leaf in y if is_float(leaf)}
        size = sizes.pop() if len(sizes) == 1 else 0
        if size == 0 or size % (num_stages * num_blocks):
            continue
        parts = HeadParts(dim, size, num_stages, num_blocks)
        has_keys = any(
            is_key(leaf) for leaf in jax.tree.leaves((y, microbatch)) if parts.is_split(leaf)
        )
        if not has_keys and _is_sum(head, graph, outer, y, microbatch, parts):
            return parts
    return None


def _is_sum(
    head: Callable[..., PyTree],
    whole: Graph,
    outer: Sequence[Any],
    y: Sequence[Any],
    microbatch: PyTree,
    parts: HeadParts,
) -> bool:
    def of_part(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        if parts.is_split(leaf):
            shape[parts.dim] //= parts.num_stages
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    try:
        part = trace(head, outer, *jax.tree.map(of_part, (list(y), microbatch)))
    except (TypeError, ValueError):  # a shape is written into the head or the loss
        return False
    # A leaf of y without the dim belongs to another microbatch on the other stages.
    not_split = {
        i
        for i, leaf in zip(whole.inputs[len(outer) :], y, strict=False)
        if not parts.is_split(leaf)
    }
    nodes = whole.needed(whole.outputs, ())
    read = {i for node in nodes for i in node.inputs}
    if (
        not _are_alike(whole, part)
        or not not_split.isdisjoint(read)
        or any(node.has_effects for node in whole.nodes)
    ):
        return False
    dims, sums = {i: _dim_that_differs(whole, part, i) for i in whole.avals}, set()
    for node in nodes:
        has_positions = any(dims[i] is not None for i in node.inputs)
        makes_positions = [dims[i] is not None for i in node.outputs]
        if not sums.isdisjoint(node.inputs):
            if has_positions or any(makes_positions) or not _is_linear(node, sums):
                return False
            sums.update(node.outputs)
        elif node.name == "reduce_sum" and has_positions and not any(makes_positions):
            sums.update(node.outputs)
        elif (any(makes_positions) or has_positions) and not (
            all(makes_positions) and _is_of_each(whole, node, dims)
        ):
            return False
    return sums.issuperset(whole.outputs)


def _are_alike(whole: Graph, part: Graph) -> bool:
    """Whether two graphs have the same operations and constants."""
    shape_of = lambda node: (node.name, node.inputs, node.outputs)
    return (
        [shape_of(node) for node in whole.nodes] == [shape_of(node) for node in part.nodes]
        and whole.outputs == part.outputs
        and whole.constants.keys() == part.constants.keys()
        and all(_is_same(value, part.constants[i]) for i, value in whole.constants.items())
    )


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    known = not any(isinstance(value, Tracer) for value in (a, b))
    return (
        known
        and np.shape(a) == np.shape(b)
        and np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    )


def _dim_that_differs(whole: Graph, part: Graph, number: int) -> int | None:
    """The dim of a value that holds positions; -1 if there are several."""
    shapes = whole.avals[number].shape, part.avals[number].shape
    if len(shapes[0]) != len(shapes[1]):
        return -1
    dims = [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
    return None if not dims else dims[0] if len(dims) == 1 else -1


def _is_linear(node: Node, sums: set[int]) -> bool:
    """Whether what an operation makes of sums over positions is one: the sum of what it would make of their terms."""
    are_sums = [i in sums for i in node.inputs]
    if node.name in ("mul", "div"):
        return are_sums.count(True) == 1 and (node.name == "mul" or are_sums[0])
    return node.name in _LINEAR and all(are_sums)


def _is_of_each(graph: Graph, node: Node, dims: dict[int, int | None]) -> bool:
    """Whether the operation treats positions alike, each on its own, where its outputs have positions."""
    out, name, params = dims[node.outputs[0]], node.name, node.equation.params
    given = [dims[i] for i in node.inputs]
    if -1 in given or any(dims[i] != out for i in node.outputs) or out is None or out < 0:
        return False
    if name in _OF_EACH or constraint_of(node.equation) is not None:
        return True  # operands without positions are scalars
    if name == "iota":
        return params["dimension"] != out
    if name == "broadcast_in_dim":
        source = graph.avals[node.inputs[0]].shape
        of = dict(enumerate(params["broadcast_dimensions"]))
        return all(source[i] == 1 or given[0] == i for i, to in of.items() if to == out)
    sizes = {
        graph.avals[i].shape[dim]
        for i, dim in zip(node.inputs, given, strict=True)
        if dim is not None
    }
    if name not in _BY_RULE or sizes != {graph.avals[node.outputs[0]].shape[out]}:
        return False
    found = RULES[name](Operation.of(graph, node, given))
    return found is not None and found.collective is None and set(found.cuts) == {out}
