"""How a sharding over ``tensor`` propagates through a traced function: the shapes on a device, and the collectives needed.

XLA's partitioner does the same when it compiles (Xu et al. 2021, arXiv 2105.04663). This module predicts it for column, row
and vocabulary splits: at most one dim of a value is sharded, and a sum over a sharded dim is reduced immediately.

    x [b, t, d] . w_up [d, f/2] -> [b, t, f/2]        no collective
    h [b, t, f/2] . w_down [f/2, d] -> [b, t, d]      an all-reduce of the result

The second half of the module has the rules, a function for each kind of primitive.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar._compat import constraint_of, equations
from jaxpar.backward.graph import Graph, Node
from jaxpar.mesh import TENSOR

Cut = int | None  # the dim of an array that is sharded


def cut_of(spec: PartitionSpec | tuple, axis: str) -> Cut:
    """Returns the dim of an array that a PartitionSpec shards over an axis; None if there is none."""
    return next(
        (dim for dim, names in enumerate(spec) if names == axis or (isinstance(names, tuple) and axis in names)), None
    )


@dataclass(frozen=True)
class Found:
    """What a rule finds of a node: the sharded dim of each output, and the kind of collective that it needs."""

    cuts: Sequence[Cut]
    collective: str | None = None


Rule = Callable[[Graph, Node, Sequence[Cut]], Found | None]


@dataclass(frozen=True)
class Collective:
    """A collective over ``tensor`` that a node needs.

    Attributes:
        kind: "all-reduce" or "all-gather".
        payload_bytes: The bytes of the complete array: the result of an all-reduce, or the array that is gathered.
    """

    kind: str
    payload_bytes: int


@dataclass(frozen=True)
class Partition:
    """A graph as one device of ``tensor`` runs it.

    Attributes:
        graph: The graph with the shapes on one device; its nodes are those of the unsharded graph.
        cuts: For each value the dim that is sharded, None for a value that is replicated.
        collectives: For each node that needs a collective, that collective, by the number of its first output.
        unknown: Names of primitives whose output shardings are not known; their outputs are assumed to be replicated.
    """

    graph: Graph
    cuts: Mapping[int, Cut]
    collectives: Mapping[int, Collective]
    unknown: frozenset[str]

    def collectives_of(self, nodes: Iterable[Node]) -> list[Collective]:
        """Returns the collectives that the nodes need."""
        return [self.collectives[node.outputs[0]] for node in nodes if node.outputs[0] in self.collectives]

    def flops_of(self, nodes: Iterable[Node]) -> int:
        """Returns the FLOPs of the matrix products on one device, 2 for a multiplication and an addition."""
        return sum(dot_flops(self.graph, node) for node in nodes if node.name == "dot_general")

    def shapes(self, values: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of values on one device."""
        avals = self.graph.avals
        return [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype) for i in values]


def partition(
    graph: Graph, given: Mapping[int, Cut], num_shards: int, rules: Mapping[str, Rule] | None = None
) -> Partition:
    """Returns a graph as one of ``num_shards`` devices runs it.

    Args:
        graph: A traced function.
        given: The sharded dim of each input; inputs that are left out are replicated.
        num_shards: The size of the ``tensor`` axis.
        rules: For primitives that have none here.
    """
    rules = RULES | dict(rules or {})
    cuts: dict[int, Cut] = dict(given) if num_shards > 1 else {}
    collectives: dict[int, Collective] = {}
    unknown: set[str] = set()
    for node in graph.nodes if num_shards > 1 else ():
        rule = rules.get(node.name, elementwise) if constraint_of(node.equation) is None else constraint
        says_itself = rule in (constraint, _shard_map)  # whatever its inputs are
        if not says_itself and all(cuts.get(i) is None for i in node.inputs):
            continue
        found = rule(graph, node, [cuts.get(i) for i in node.inputs])
        if found is None:
            unknown.add(node.name)
            continue
        for output, cut in zip(node.outputs, found.cuts, strict=True):
            divides = cut is not None and graph.avals[output].shape[cut] % num_shards == 0
            cuts[output] = cut if divides else None
        if found.collective:
            of = {"all-reduce": node.outputs, "all-gather": [i for i in node.inputs if cuts.get(i) is not None][:1]}
            collectives[node.outputs[0]] = Collective(
                found.collective, sum(graph.num_bytes(i) for i in of[found.collective])
            )
    local = {i: shard_shape(aval, cuts.get(i), num_shards) for i, aval in graph.avals.items()}
    return Partition(replace(graph, avals=local), cuts, collectives, frozenset(unknown))


@dataclass(frozen=True)
class ParamShards:
    """How the params of a function are sharded over ``tensor``.

    Attributes:
        cuts: For each param, in the order of its leaves, the dim that is sharded; None for a param that is replicated.
        num_shards: The size of the ``tensor`` axis.
    """

    cuts: tuple[Cut, ...]
    num_shards: int

    @classmethod
    def of_layers(cls, specs: Iterable[PartitionSpec], num_shards: int) -> "ParamShards":
        """Returns those of one layer, from the PartitionSpecs of stacked layers."""
        return cls(tuple(cut_of(tuple(spec)[1:], TENSOR) for spec in specs), num_shards)

    def partition(
        self,
        graph: Graph,
        params: Sequence[int],
        given: Mapping[int, Cut] | None = None,
        rules: Mapping[str, Rule] | None = None,
    ) -> Partition:
        """Returns a graph as one of the shards runs it.

        Args:
            graph: A traced function.
            params: The numbers of its params.
            given: The sharded dim of other inputs; those that are left out are replicated.
            rules: For primitives that have none here.
        """
        cuts = dict(zip(params, self.cuts, strict=True)) | dict(given or {})
        return partition(graph, cuts, self.num_shards, rules)


def shard_shape(aval: Any, cut: Cut, num_shards: int) -> Any:
    """Returns the shape of one of ``num_shards`` shards of an array that is sharded along a dim; None: replicated."""
    if cut is None:
        return aval
    shape = tuple(size // num_shards if dim == cut else size for dim, size in enumerate(aval.shape))
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def dot_flops(graph: Graph, node: Node) -> int:
    """Returns the FLOPs of a matrix product with the shapes of a graph."""
    (contract_l, contract_r), _ = node.equation.params["dimension_numbers"]
    left, right = (graph.avals[i].shape for i in node.inputs)
    # The sharding of a contracted dim may be known for one side only.
    depth = math.prod(min(left[i], right[j]) for i, j in zip(contract_l, contract_r, strict=True))
    return 2 * depth * math.prod(graph.avals[node.outputs[0]].shape)


def _shape(graph: Graph, value: int) -> tuple[int, ...]:
    return graph.avals[value].shape


def _sharded_dim(cuts: Sequence[Cut]) -> int:
    """The one dim that is sharded; rules are called only if there is one."""
    return next(cut for cut in cuts if cut is not None)


def elementwise(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found | None:
    """The outputs are sharded like an input that has their size along its sharded dim; None for a primitive without one."""
    shape = _shape(graph, node.outputs[0])
    if any(_shape(graph, i) != shape for i in node.outputs):
        return None
    given = [(_shape(graph, i), cut) for i, cut in zip(node.inputs, cuts, strict=True) if cut is not None]
    broadcasts = lambda own: (
        len(own) == len(shape) and all(size in (1, to) for size, to in zip(own, shape, strict=True))
    )
    alike = [cut for own, cut in given if broadcasts(own) and own[cut] == shape[cut]]
    return Found([alike[0]] * len(node.outputs)) if alike else None


def _broadcast_in_dim(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    return Found([int(node.equation.params["broadcast_dimensions"][_sharded_dim(cuts)])])


def _transpose(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    return Found([list(node.equation.params["permutation"]).index(_sharded_dim(cuts))])


def _squeeze(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    gone, cut = node.equation.params["dimensions"], _sharded_dim(cuts)
    return Found([cut - len([dim for dim in gone if dim < cut])])


def _reduce(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    axes, cut = node.equation.params["axes"], _sharded_dim(cuts)
    if cut in axes:
        return Found([None] * len(node.outputs), "all-reduce")
    return Found([cut - len([dim for dim in axes if dim < cut])] * len(node.outputs))


def _reshape(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    """The most significant dim of a group that is split or joined stays sharded; otherwise the value is gathered."""
    before, after, cut = _shape(graph, node.inputs[0]), _shape(graph, node.outputs[0]), _sharded_dim(cuts)
    outside = math.prod(before[:cut])
    products = [math.prod(after[:dim]) for dim in range(len(after))]
    fitting = [dim for dim, product in enumerate(products) if product == outside and after[dim] > 1]
    return Found([fitting[0]]) if fitting else Found([None], "all-gather")


def _same_dim(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    """Slicing, padding or joining other dims keeps the sharding; along the sharded dim the value is gathered."""
    cut = _sharded_dim(cuts)
    changed = any(_shape(graph, i)[cut] != _shape(graph, o)[cut] for i in node.inputs[:1] for o in node.outputs)
    return Found([None] * len(node.outputs), "all-gather") if changed else Found([cut] * len(node.outputs))


def _dot_general(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    (contract_l, contract_r), (batch_l, batch_r) = node.equation.params["dimension_numbers"]
    left, right = cuts
    if left in contract_l or right in contract_r:
        return Found([None], "all-reduce")
    ranks = [len(_shape(graph, i)) for i in node.inputs]
    free_l = [dim for dim in range(ranks[0]) if dim not in (*contract_l, *batch_l)]
    free_r = [dim for dim in range(ranks[1]) if dim not in (*contract_r, *batch_r)]
    if left is not None:
        return Found([batch_l.index(left) if left in batch_l else len(batch_l) + free_l.index(left)])
    right = _sharded_dim([right])
    dim = batch_r.index(right) if right in batch_r else len(batch_r) + len(free_l) + free_r.index(right)
    return Found([dim])


def _gather(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found | None:
    """A lookup in sharded rows is summed over the shards, since only one of them has the row."""
    numbers, cut = node.equation.params["dimension_numbers"], cuts[0]
    if cut is None:
        return None
    if cut in numbers.collapsed_slice_dims:
        return Found([None], "all-reduce")
    batching = list(numbers.operand_batching_dims)
    if cut in batching:  # each slice at indices of its own, as by take_along_axis
        of_indices = [d for d in range(len(_shape(graph, node.outputs[0]))) if d not in numbers.offset_dims]
        return Found([of_indices[numbers.start_indices_batching_dims[batching.index(cut)]]])
    gone = (*numbers.collapsed_slice_dims, *batching)
    kept = [dim for dim in range(len(_shape(graph, node.inputs[0]))) if dim not in gone]
    return Found([int(numbers.offset_dims[kept.index(cut)])])


def _scatter(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    """A sum into rows keeps the sharding of the rows."""
    return Found([cuts[0]])


def constraint(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    """A sharding constraint says how its output is sharded."""
    del graph
    cut = cut_of(getattr(constraint_of(node.equation), "spec", ()), TENSOR)
    return Found([cut], "all-gather" if cut is None and cuts[0] is not None else None)


def _shard_map(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    """A part of the function that is manual over ``tensor`` says how its results are sharded."""
    del graph, cuts
    return Found([cut_of(spec, TENSOR) for spec in node.equation.params["out_specs"]])


def _barrier(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found:
    """Each result is one of the operands."""
    del graph, node
    return Found(list(cuts))


def _custom_vjp(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found | None:
    """The rule for a param that is gathered (ZeRO 3): its ``shard_map`` over ``tensor`` gives the sharding."""
    called = equations(node.equation.params["call_jaxpr"])
    manual = [equation for equation in called if equation.primitive.name == "shard_map"]
    if not manual:
        return elementwise(graph, node, cuts)
    return Found([cut_of(spec, TENSOR) for spec in manual[-1].params["out_specs"]])


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "gather": _gather,
    "shard_map": _shard_map,
    "custom_vjp_call": _custom_vjp,
    "optimization_barrier": _barrier,
    "scatter-add": _scatter,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _reduce,
    ),
    **dict.fromkeys(
        ("slice", "split", "pad", "concatenate", "dynamic_slice", "dynamic_update_slice", "cumsum"), _same_dim
    ),
}
