"""How each primitive propagates a sharding over ``tensor``: the rules of `partition.py`, a function for each kind."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from jaxpar._compat import constraint_of, equations
from jaxpar.backward.graph import Graph, Node
from jaxpar.mesh import TENSOR

Cut = int | None


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
    kept = [dim for dim in range(len(_shape(graph, node.inputs[0]))) if dim not in numbers.collapsed_slice_dims]
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


def _custom_vjp(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Found | None:
    """The rule for a param gathered over ``data`` (ZeRO 3): its ``shard_map`` over ``tensor`` gives the sharding."""
    called = equations(node.equation.params["call_jaxpr"])
    manual = [equation for equation in called if equation.primitive.name == "shard_map"]
    if not manual:
        return elementwise(graph, node, cuts)
    return Found([cut_of(spec, TENSOR) for spec in manual[-1].params["out_specs"]])


Rule = Callable[[Graph, Node, Sequence[Cut]], Found | None]

RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "gather": _gather,
    "shard_map": _shard_map,
    "custom_vjp_call": _custom_vjp,
    "scatter-add": _scatter,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax"), _reduce
    ),
    **dict.fromkeys(
        ("slice", "split", "pad", "concatenate", "dynamic_slice", "dynamic_update_slice", "cumsum"), _same_dim
    ),
}
