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
    """What a loop or a branch runs: ``part``, a Partition, and its ``trips``, None where they are not known."""

    part: Any
    trips: int | None

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
    slices = [_inside(cut) for cut in cuts[start:]]
    part, carry = _settled(body, cuts[:num_constants], cuts[num_constants:start], slices, run)
    slices = [part.cuts.get(value) for value in body.outputs[num_carry:]]
    stacked = [None if cut is None else cut + 1 for cut in slices]
    return [*carry, *stacked], [Body(part, num_trips(node.equation))]


def _inside(cut: Cut) -> Cut:
    """The sharded dim of a slice along the leading dim; slices of one that is sharded along it are whole."""
    return cut - 1 if cut else None


def _while(node: Node, cuts: list[Cut], run: Run) -> Found:
    params = node.equation.params
    of_condition = params["cond_nconsts"]
    start = of_condition + params["body_nconsts"]
    body = graph_of(params["body_jaxpr"])
    part, carry = _settled(body, cuts[of_condition:start], cuts[start:], [], run)
    condition = graph_of(params["cond_jaxpr"])
    given = [*cuts[:of_condition], *carry]
    tests = run(condition, dict(zip(condition.inputs, given, strict=True)))
    trips = num_trips(node.equation)
    return carry, [Body(part, trips), Body(tests, trips)]


def _settled(
    body: Graph,
    constants: list[Cut],
    carry: list[Cut],
    slices: list[Cut],
    run: Run,
) -> tuple[Any, list[Cut]]:
    """Returns the body of a loop, and the sharded dims of what it carries from trip to trip."""
    while True:
        given = [*constants, *carry, *slices]
        part = run(body, dict(zip(body.inputs, given, strict=True)))
        made = [part.cuts.get(value) for value in body.outputs[: len(carry)]]
        after = [_either(*each) for each in zip(carry, made, strict=True)]
        if after == carry:
            return part, carry
        carry = after


def _either(first: Cut, second: Cut) -> Cut:
    return second if first is None else first


def _branches(node: Node, cuts: list[Cut], run: Run) -> Found:
    found: list[Cut] = [None] * len(node.outputs)
    bodies = []
    for branch in node.equation.params["branches"]:
        body = graph_of(branch)
        part = run(body, dict(zip(body.inputs, cuts[1:], strict=True)))
        made = [part.cuts.get(value) for value in body.outputs]
        found = [_either(*each) for each in zip(found, made, strict=True)]
        bodies.append(Body(part, 1))
    work = lambda body: (body.part.flops_of(body.part.graph.nodes), len(body.part.graph.nodes))
    return found, [max(bodies, key=work)]


_RULES: dict[str, Callable[[Node, list[Cut], Run], Found]] = {
    "scan": _scan,
    "while": _while,
    "cond": _branches,
}
BODIES = frozenset(_RULES)
