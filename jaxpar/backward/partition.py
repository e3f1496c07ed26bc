"""How a sharding over ``tensor`` propagates through a traced function: the shapes on a device, and the collectives needed.

XLA's partitioner does the same when it compiles (Xu et al. 2021, arXiv 2105.04663). This module predicts it for column, row
and vocabulary splits: at most one dim of a value is sharded, and a sum over a sharded dim is reduced immediately.

    x [b, t, d] . w_up [d, f/2] -> [b, t, f/2]        no collective
    h [b, t, f/2] . w_down [f/2, d] -> [b, t, d]      an all-reduce of the result
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar._compat import constraint_of
from jaxpar.backward.graph import Graph, Node
from jaxpar.backward.partition_rules import RULES, Cut, Rule, constraint, cut_of, elementwise
from jaxpar.mesh import TENSOR


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
        return sum(_dot_flops(self.graph, node) for node in nodes if node.name == "dot_general")

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
        if rule is not constraint and all(cuts.get(i) is None for i in node.inputs):
            continue
        found = rule(graph, node, [cuts.get(i) for i in node.inputs])
        if found is None:
            unknown.add(node.name)
            continue
        for output, cut in zip(node.outputs, found.cuts, strict=True):
            cuts[output] = cut if _divides(graph.avals[output].shape, cut, num_shards) else None
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


def _divides(shape: Sequence[int], cut: Cut, num_shards: int) -> bool:
    return cut is not None and shape[cut] % num_shards == 0


def shard_shape(aval: Any, cut: Cut, num_shards: int) -> Any:
    """Returns the shape of one of ``num_shards`` shards of an array that is sharded along a dim; None: replicated."""
    if cut is None:
        return aval
    shape = tuple(size // num_shards if dim == cut else size for dim, size in enumerate(aval.shape))
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _dot_flops(graph: Graph, node: Node) -> int:
    (contract_l, contract_r), _ = node.equation.params["dimension_numbers"]
    left, right = (graph.avals[i].shape for i in node.inputs)
    # The sharding of a contracted dim may be known for one side only.
    depth = math.prod(min(left[i], right[j]) for i, j in zip(contract_l, contract_r, strict=True))
    return 2 * depth * math.prod(graph.avals[node.outputs[0]].shape)
