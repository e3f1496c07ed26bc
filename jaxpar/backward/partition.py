"""How a sharding over ``tensor`` propagates through a traced function: the shapes on a device, and the collectives needed.

XLA's partitioner does the same when it compiles (Xu et al. 2021, arXiv 2105.04663). This module predicts it for column, row
and vocabulary splits, by the rules of ``cut_rules.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar._compat import constraint_of
from jaxpar.backward.bodies import Body, bodies_of
from jaxpar.backward.cut_rules import (
    RULES,
    Cut,
    Operation,
    Rule,
    constraint,
    elementwise,
    shard_map,
)
from jaxpar.backward.graph import Graph, Node
from jaxpar.backward.products import product_flops
from jaxpar.mesh import TENSOR, cut_of


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
        guessed: The operations of which it is not known how XLA partitions them: what follows is one possibility. Outputs of a
            primitive without a rule are assumed to be replicated.
        bodies: What loops and branches run, by the number of their first output.
    """

    graph: Graph
    cuts: Mapping[int, Cut]
    collectives: Mapping[int, Collective]
    guessed: tuple[Node, ...]
    bodies: Mapping[int, Sequence[Body]]

    def collectives_of(self, nodes: Iterable[Node]) -> list[Collective]:
        """Returns the collectives that the nodes need."""
        found = []
        for node in nodes:
            if node.first in self.collectives:
                found.append(self.collectives[node.first])
            for body in self.bodies.get(node.first, ()):
                found += body.part.collectives_of(body.part.graph.nodes) * body.times
        return found

    def flops_of(self, nodes: Iterable[Node]) -> int:
        """Returns the FLOPs of the matrix products and convolutions on one device."""
        total = 0
        for node in nodes:
            total += product_flops(self.graph, node)
            for body in self.bodies.get(node.first, ()):
                total += body.part.flops_of(body.part.graph.nodes) * body.times
        return total

    def shapes(self, values: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of values on one device."""
        avals = [self.graph.avals[i] for i in values]
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def partition(
    graph: Graph,
    given: Mapping[int, Cut],
    num_shards: int,
    rules: Mapping[str, Rule] | None = None,
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
    bodies: dict[int, Sequence[Body]] = {}
    run = partial(partition, num_shards=num_shards, rules=rules)
    collectives: dict[int, Collective] = {}
    guessed: list[Node] = []
    for node in graph.nodes:
        before = [cuts.get(i) for i in node.inputs]
        if node.outputs and (inside := bodies_of(node, before, run)):
            made, bodies[node.first] = inside
            cuts.update(zip(node.outputs, made, strict=True))
            for body in bodies[node.first]:
                guessed += [*body.part.guessed, *([node] if body.is_guess else [])]
            continue
        if num_shards == 1 or not node.outputs:
            continue
        rule = _rule_of(node, rules)
        says_itself = rule in (constraint, shard_map)  # whatever its inputs are
        if not says_itself and all(cut is None for cut in before):
            continue
        op = Operation.of(graph, node, before)
        found = rule(op)
        if found is None:
            guessed.append(node)
            continue
        is_guess = found.is_guess
        for output, cut in zip(node.outputs, found.cuts, strict=True):
            shape = graph.avals[output].shape
            divides = cut is not None and shape[cut] % num_shards == 0
            cuts[output] = cut if divides else None
            is_guess |= cut is not None and not divides
        if is_guess:
            guessed.append(node)
        if found.collective:
            collectives[node.first] = _collective(graph, op, found.collective)
    local = {}
    for value, aval in graph.avals.items():
        local[value] = shard_shape(aval, cuts.get(value), num_shards)
    inner = {first: [body.part.graph for body in each] for first, each in bodies.items()}
    on_device = replace(graph, avals=local, bodies=inner)
    return Partition(on_device, cuts, collectives, tuple(guessed), bodies)


def _rule_of(node: Node, rules: Mapping[str, Rule]) -> Rule:
    if constraint_of(node.equation) is not None:
        return constraint
    return rules.get(node.name, elementwise)


def _collective(graph: Graph, op: Operation, kind: str) -> Collective:
    """Returns an all-reduce of what an operation returns, or an all-gather of its first input that is sharded."""
    if kind == "all-gather":
        is_sharded = [cut is not None for cut in op.cuts]
        gathered = op.node.inputs[is_sharded.index(True)]
        return Collective(kind, graph.num_bytes(gathered))
    results = map(graph.num_bytes, op.node.outputs)
    return Collective(kind, sum(results))


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
        of_one = [tuple(spec)[1:] for spec in specs]
        cuts = tuple(cut_of(spec, TENSOR) for spec in of_one)
        return cls(cuts, num_shards)

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
        cuts = dict(zip(params, self.cuts, strict=True))
        cuts.update(given or {})
        return partition(graph, cuts, self.num_shards, rules)


def shard_shape(aval: Any, cut: Cut, num_shards: int) -> Any:
    """Returns the shape of one of ``num_shards`` shards of an array that is sharded along a dim; None: replicated."""
    if cut is None:
        return aval
    shape = list(aval.shape)
    shape[cut] //= num_shards
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)
