"""How a sharding over ``tensor`` passes an operation: a rule for each kind of primitive.

At most one dim of a value is sharded, its cut, and a sum over a sharded dim is reduced immediately:

    x [b, t, d] . w_up [d, f/2] -> [b, t, f/2]        no collective
    h [b, t, f/2] . w_down [f/2, d] -> [b, t, d]      an all-reduce of the result

Where the inputs of an operation do not fit one another so, XLA chooses which of them is sent, and may shard what was computed
before in another way: the rule then gives one possibility, as a guess.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar._compat import constraint_of, equations
from jaxpar.backward.graph import Graph, Node
from jaxpar.mesh import TENSOR, cut_of

Cut = int | None  # the dim of an array that is sharded
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """An operation of which an input is sharded.

    Attributes:
        node: Its node in the graph.
        inputs: The shapes of its inputs.
        outputs: The shapes of its outputs.
        cuts: The sharded dim of each input.
    """

    node: Node
    inputs: list[Shape]
    outputs: list[Shape]
    cuts: Sequence[Cut]

    @classmethod
    def of(cls, graph: Graph, node: Node, cuts: Sequence[Cut]) -> "Operation":
        """Returns that of a node."""
        shapes = lambda values: [graph.avals[i].shape for i in values]
        return cls(node, shapes(node.inputs), shapes(node.outputs), cuts)

    @property
    def params(self) -> dict[str, Any]:
        """The params of its equation."""
        return self.node.equation.params

    @property
    def cut(self) -> int:
        """The sharded dim of the first input that has one."""
        return next(cut for cut in self.cuts if cut is not None)

    @property
    def num_cut(self) -> int:
        """How many of its inputs are sharded."""
        return sum(cut is not None for cut in self.cuts)

    def gives(self, cut: Cut, collective: str | None = None, *, is_guess: bool = False) -> "Found":
        """Returns that all outputs are sharded along a dim."""
        return Found([cut] * len(self.outputs), collective, is_guess)


@dataclass(frozen=True)
class Found:
    """What a rule finds: the sharded dim of each output, the kind of collective, and whether XLA has a choice."""

    cuts: Sequence[Cut]
    collective: str | None = None
    is_guess: bool = False


Rule = Callable[[Operation], Found | None]  # None: unknown


def elementwise(op: Operation) -> Found | None:
    """The outputs are sharded like an input that has their size along its sharded dim; None for a primitive without one."""
    shape, *others = op.outputs
    if any(other != shape for other in others):
        return None
    found = []
    for given, cut in zip(op.inputs, op.cuts, strict=True):
        if cut is None or not _broadcasts(given, shape):
            continue
        if given[cut] == shape[cut]:
            found.append(cut)
    return op.gives(found[0], is_guess=len(set(found)) > 1) if found else None


def _broadcasts(given: Shape, to: Shape) -> bool:
    if len(given) != len(to):
        return False
    sizes = zip(given, to, strict=True)
    return all(size in (1, other) for size, other in sizes)


def _broadcast_in_dim(op: Operation) -> Found:
    dims = op.params["broadcast_dimensions"]
    return op.gives(int(dims[op.cut]))


def _transpose(op: Operation) -> Found:
    order = list(op.params["permutation"])
    return op.gives(order.index(op.cut))


def _without(dims: Collection[int], cut: int) -> int:
    """Where a dim is once others are gone."""
    return cut - sum(dim < cut for dim in dims)


def _squeeze(op: Operation) -> Found:
    return op.gives(_without(op.params["dimensions"], op.cut))


def _reduce(op: Operation) -> Found:
    axes = op.params["axes"]
    if op.cut in axes:
        return op.gives(None, "all-reduce")
    return op.gives(_without(axes, op.cut))


def _reshape(op: Operation) -> Found:
    """The most significant dim of a group that is split or joined stays sharded; otherwise the value is gathered.

    It is the dim with as many elements outside it as before.
    """
    before, after = op.inputs[0], op.outputs[0]
    outside = math.prod(before[: op.cut])
    for dim, size in enumerate(after):
        if size > 1 and math.prod(after[:dim]) == outside:
            return op.gives(dim)
    return op.gives(None, "all-gather", is_guess=True)


def _same_dim(op: Operation) -> Found:
    """Slicing, padding or joining other dims keeps the sharding; along the sharded dim the value is gathered."""
    size = op.inputs[0][op.cut]
    if all(output[op.cut] == size for output in op.outputs):
        return op.gives(op.cut, is_guess=len({*op.cuts} - {None}) > 1)
    return op.gives(None, "all-gather", is_guess=True)


def _dot_general(op: Operation) -> Found:
    """The result has the dims of the batch, then the others of the left operand, then those of the right one.

    It is known what XLA does if one operand alone is sharded, along a dim that stays, or both along two that belong together.
    """
    contracted, batched = op.params["dimension_numbers"]
    left, right = op.cuts
    in_pairs = (left, right) in (*zip(*contracted, strict=True), *zip(*batched, strict=True))
    if left in contracted[0] or right in contracted[1]:
        return op.gives(None, "all-reduce", is_guess=not in_pairs)
    is_guess = op.num_cut > 1 and not in_pairs
    start = len(batched[0])
    for side, cut in enumerate(op.cuts):
        gone = {*contracted[side], *batched[side]}
        dims = range(len(op.inputs[side]))
        free = [dim for dim in dims if dim not in gone]
        if cut in batched[side]:
            return op.gives(batched[side].index(cut), is_guess=is_guess)
        if cut is not None:
            return op.gives(start + free.index(cut), is_guess=is_guess)
        start += len(free)
    return op.gives(None)


def _convolution(op: Operation) -> Found | None:
    """As a product: features of the image and of the kernel, which are summed over, or one of those that stay."""
    numbers = op.params["dimension_numbers"]
    if op.params["feature_group_count"] > 1 or op.params["batch_group_count"] > 1:
        return None
    image, kernel = op.cuts
    if (image, kernel) == (numbers.lhs_spec[1], numbers.rhs_spec[1]):
        return op.gives(None, "all-reduce")
    if kernel is None and image == numbers.lhs_spec[0]:
        return op.gives(numbers.out_spec[0])
    if image is None and kernel == numbers.rhs_spec[0]:
        return op.gives(numbers.out_spec[1])
    return None


def _gather(op: Operation) -> Found | None:
    """A lookup in sharded rows is summed over the shards, since only one of them has the row."""
    numbers, cut = op.params["dimension_numbers"], op.cuts[0]
    if cut is None:
        return None
    if cut in numbers.collapsed_slice_dims:
        return op.gives(None, "all-reduce")
    batching = list(numbers.operand_batching_dims)
    if cut in batching:  # each slice at indices of its own, as by take_along_axis
        dims = range(len(op.outputs[0]))
        of_indices = [dim for dim in dims if dim not in numbers.offset_dims]
        place = numbers.start_indices_batching_dims[batching.index(cut)]
        return op.gives(of_indices[place])
    gone = {*numbers.collapsed_slice_dims, *batching}
    dims = range(len(op.inputs[0]))
    kept = [dim for dim in dims if dim not in gone]
    return op.gives(int(numbers.offset_dims[kept.index(cut)]))


def _scatter(op: Operation) -> Found:
    """A sum into rows keeps the sharding of the rows."""
    return op.gives(op.cuts[0], is_guess=op.cuts[0] is None)


def _barrier(op: Operation) -> Found:
    """Each result is one of the operands."""
    return Found(list(op.cuts))


def _custom_vjp(op: Operation) -> Found | None:
    """The rule for a param that is gathered (ZeRO 3): its ``shard_map`` over ``tensor`` gives the sharding."""
    called = equations(op.params["call_jaxpr"])
    manual = [equation for equation in called if equation.primitive.name == "shard_map"]
    if not manual:
        return elementwise(op)
    specs = manual[-1].params["out_specs"]
    return Found([cut_of(spec, TENSOR) for spec in specs])


# -- rules that hold whatever the inputs are ---------------------------------------------------------------------------


def constraint(op: Operation) -> Found:
    """A sharding constraint says how its output is sharded."""
    sharding = constraint_of(op.node.equation)
    cut = cut_of(getattr(sharding, "spec", ()), TENSOR)
    gathers = cut is None and op.cuts[0] is not None
    return op.gives(cut, "all-gather" if gathers else None)


def shard_map(op: Operation) -> Found:
    """A part of the function that is manual over ``tensor`` says how its results are sharded."""
    return Found([cut_of(spec, TENSOR) for spec in op.params["out_specs"]])


_REDUCTIONS = ("sum", "max", "min", "prod", "and", "or")
_REDUCED = ("argmax", "argmin", *(f"reduce_{name}" for name in _REDUCTIONS))
_IN_PLACE = (
    "slice",
    "split",
    "pad",
    "concatenate",
    "dynamic_slice",
    "dynamic_update_slice",
    "cumsum",
)

RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "shard_map": shard_map,
    "custom_vjp_call": _custom_vjp,
    "optimization_barrier": _barrier,
    "scatter-add": _scatter,
    **dict.fromkeys(_REDUCED, _reduce),
    **dict.fromkeys(_IN_PLACE, _same_dim),
}
