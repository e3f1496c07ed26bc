"""Loops and branches of a graph: what they run, how often, and how a sharding over ``tensor`` passes through them.

A loop carries a value sharded if it starts sharded, or if the body returns it sharded: sums of gradients start as zeros that
every device has, and XLA makes them as the body returns them. Of a branch that with the most work is counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpar._compat import num_trips, scan_counts
from jaxpar.backward.cut_rules import Cut
from jaxpar.backward.graph import Graph, Node, graph_of

Run = Callable[[Graph, Mapping[int, Cut]], Any]  # the Partition of a body whose inputs are cut so


class Body(NamedTuple):
    """What a loop or a branch runs.

    Attributes:
        part: A Partition.
        trips: Its trips, None where they are not known.
        is_guess: Whether it returns a value that is sharded in another way than the loop carries it, or another branch returns.
    """

    part: Any
    trips: int | None
    is_guess: bool = False

    @property
    def times(self) -> int:
        """Its trips, one where they are not known."""
        return 1 if self.trips is None else self.trips


Found = tuple[list[Cut], list[Body]]  # the sharded dim of each output, and what runs


def bodies_of(node: Node, cuts: Sequence[Cut], run: Run) -> Found | None:
    """Returns what a loop or a branch runs, and the sharded dims of its outputs; None for other nodes."""
    rule = _RULES.get(node.name)
    return rule(node, list(cuts), run) if rule else None


def _scan(node: Node, cuts: list[Cut], run: Run) -> Found:
    num_constants, num_carry = scan_counts(node.equation)
    start = num_constants + num_carry
    body = graph_of(node.equation.params["jaxpr"])
    part, carry, agrees = _settled(
        body,
        constants=cuts[:num_constants],
        carry=cuts[num_constants:start],
        slices=[_inside(cut) for cut in cuts[start:]],
        run=run,
    )
    slices = _cuts_of(part, body.outputs[num_carry:])
    stacked = [None if cut is None else cut + 1 for cut in slices]
    agrees &= 0 not in cuts[start:]
    return [*carry, *stacked], [Body(part, num_trips(node.equation), not agrees)]


def _inside(cut: Cut) -> Cut:
    """The sharded dim of a slice along the leading dim; slices of one that is sharded along it are whole."""
    return cut - 1 if cut else None


def _while(node: Node, cuts: list[Cut], run: Run) -> Found:
    params = node.equation.params
    of_condition = params["cond_nconsts"]
    start = of_condition + params["body_nconsts"]
    body = graph_of(params["body_jaxpr"])
    part, carry, agrees = _settled(
        body,
        constants=cuts[of_condition:start],
        carry=cuts[start:],
        slices=[],
        run=run,
    )
    condition = graph_of(params["cond_jaxpr"])
    tests = _run_on(run, condition, [*cuts[:of_condition], *carry])
    trips = num_trips(node.equation)
    return carry, [Body(part, trips, not agrees), Body(tests, trips)]


def _settled(
    body: Graph,
    constants: list[Cut],
    carry: list[Cut],
    slices: list[Cut],
    run: Run,
) -> tuple[Any, list[Cut], bool]:
    """Returns the body of a loop, the sharded dims of what it carries, and whether it returns them so too."""
    while True:
        part = _run_on(run, body, [*constants, *carry, *slices])
        made = _cuts_of(part, body.outputs[: len(carry)])
        after = _either(carry, made)
        if after == carry:
            return part, carry, made == carry
        carry = after


def _run_on(run: Run, body: Graph, cuts: list[Cut]) -> Any:
    """Returns the Partition of a body whose inputs are cut so, in their order."""
    return run(body, dict(zip(body.inputs, cuts, strict=True)))


def _cuts_of(part: Any, values: Sequence[int]) -> list[Cut]:
    return [part.cuts.get(value) for value in values]


def _either(first: list[Cut], second: list[Cut]) -> list[Cut]:
    """Returns for each value the first of its two sharded dims that is known."""
    pairs = zip(first, second, strict=True)
    return [b if a is None else a for a, b in pairs]


def _branches(node: Node, cuts: list[Cut], run: Run) -> Found:
    found: list[Cut] = [None] * len(node.outputs)
    bodies, ways = [], []
    for branch in node.equation.params["branches"]:
        body = graph_of(branch)
        part = _run_on(run, body, cuts[1:])
        ways.append(_cuts_of(part, body.outputs))
        found = _either(found, ways[-1])
        bodies.append(Body(part, 1))
    # Zeros of a branch are made as the other returns its value.
    differs = lambda way: _either(way, found) != found
    most = max(bodies, key=_work_of)
    return found, [most._replace(is_guess=any(map(differs, ways)))]


def _work_of(body: Body) -> tuple[float, int]:
    nodes = body.part.graph.nodes
    return body.part.flops_of(nodes), len(nodes)


_RULES: dict[str, Callable[[Node, list[Cut], Run], Found]] = {
    "scan": _scan,
    "while": _while,
    "cond": _branches,
}
BODIES = frozenset(_RULES)
