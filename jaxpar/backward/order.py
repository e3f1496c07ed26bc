"""The order in which the passes of a layer run on GPUs, so that collectives over ``tensor`` have products beside them.

Sequence parallelism constrains activations and cotangents, which XLA gathers before the products that need all positions and
scatters after them. In a loop over layers its scheduler leaves the gradients of weights, for which nothing waits, to the end
of a trip, and gathers what is needed next when nothing is left to run. Barriers make another order, here of a block of two
parts:

    products of B      dx of part 2               dx of part 1
            of F                        part 1                   part 2
            of W                        part 2                   part 1
    collectives        of F             of B      of F           of B

- What follows the scatter and the gather of a cotangent also waits for the gradients of weights that can be computed before.
- What follows a product to dx waits for what F gathers at that time, and F for this product.
- What the backward pass gathers of ct before any product is an input (``gathers``): the trip before gathers it.

By the roofline of Llama 3.1 8B on tensor=8 (H100), collectives are alone for 251 ms of a step without these barriers, and for
72 with them; the step takes 1,249 ms, where it took 1,421. This module orders the nodes of a graph and computes nothing;
``passes.py`` runs them.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import jax

from jaxpar._compat import constraint_of
from jaxpar.backward.graph import Graph, Node
from jaxpar.backward.split import SplitLayer
from jaxpar.mesh import TENSOR


class Barrier(NamedTuple):
    """What follows reads none of these values before all of them are there."""

    values: list[int]


Share = tuple[Node, list[Node]]  # a constraint, and the products that what follows it waits for


class Part(NamedTuple):
    """A part of a pass.

    Attributes:
        steps: Nodes and barriers, in order.
        meets: The value that waits for the other pass, which runs beside this one, as the other waits for this value; None at
            the end of a pass.
    """

    steps: list[Node | Barrier]
    meets: int | None = None


class BackwardOrder(NamedTuple):
    """The order of a complete backward pass.

    Attributes:
        gathers: What it gathers of ct before any product.
        parts: The rest up to dx, and the products for dp.
        before_dp: The values of which ``rest`` makes dp: it reads no others that depend on what is stored.
        rest: The nodes that are left.
        has_waits: Whether a constraint is on the way to dx, as under sequence parallelism.
    """

    gathers: list[Node]
    parts: list[Part]
    before_dp: list[int]
    rest: list[Node]
    has_waits: bool


def forward_order(
    graph: Graph,
    nodes: Iterable[Node],
    x: Sequence[int],
) -> list[Part]:
    """Returns the order of a forward pass, which meets the other at what it gathers of ``x``."""
    of_x = graph.reached(x)
    parts, steps = [], []
    for node in nodes:
        steps.append(node)
        if is_gather(node) and not of_x.isdisjoint(node.inputs):
            parts.append(Part(steps, meets=node.outputs[0]))
            steps = []
    return [*parts, Part(steps)]


def backward_order(layer: SplitLayer) -> BackwardOrder:
    """Returns the order of the backward pass of a layer, which meets the other before it scatters."""
    graph, plan = layer.graph, layer.plans["backward"]
    ways = _Ways(layer)
    meets, waits, before_dp = ways.meets(), ways.waits(), ways.before_dp()
    gathered = [node.outputs[0] for node in ways.gathers]
    known = {*plan.known, *graph.constants, *gathered}
    done = {id(node) for node in ways.gathers}
    parts, steps = [], []

    def run(nodes: Iterable[Node]) -> None:
        for node in nodes:
            if id(node) not in done:
                done.add(id(node))
                known.update(node.outputs)
                steps.append(node)

    for node in ways.to_dx:
        if node.outputs in meets:  # before a product that is followed by a scatter
            parts.append(Part(steps, meets[node.outputs]))
            steps = []
        run([node])
        if values := waits.get(node.outputs):
            run(graph.needed(values, known))
            steps.append(Barrier([*node.outputs, *values]))
    run(graph.needed(before_dp, known))
    parts.append(Part(steps))
    rest = [node for node in plan.nodes if id(node) not in done]
    return BackwardOrder(ways.gathers, parts, before_dp, rest, has_waits=bool(waits))


class _Ways:
    """The nodes of a backward pass by what they lead to.

    Attributes:
        to_dx: The nodes that dx needs.
        gathers: The gathers of what is made of ct alone.
        on_the_way: Products and constraints of cotangents on the way from ct to dx.
        for_weights: The products that dx does not need.
    """

    def __init__(self, layer: SplitLayer) -> None:
        self.graph, self.values = layer.graph, layer.values
        self.plan = layer.plans["backward"]
        self.cotangents = self.graph.reached(self.values["ct"])
        self.to_dx = self.graph.needed(self.values["dx"], self.plan.known)
        self.gathers = self._gathers_of_ct()
        self.on_the_way = list(filter(self._is_on_the_way, self.to_dx))
        products = filter(is_product, self.plan.nodes)
        self.for_weights = [node for node in products if node not in self.to_dx]

    def _depends(self, node: Node) -> bool:
        return not self.cotangents.isdisjoint(node.inputs)

    def _is_on_the_way(self, node: Node) -> bool:
        if node in self.gathers or not self._depends(node):
            return False
        return is_product(node) or constraint_of(node.equation) is not None

    def _gathers_of_ct(self) -> list[Node]:
        known, found = {*self.values["ct"], *self.graph.constants}, []
        for node in self.to_dx:
            if node.inputs and known.issuperset(node.inputs):
                known.update(node.outputs)
                if is_gather(node):
                    found.append(node)
        return found

    def meets(self) -> dict[tuple[int, ...], int]:
        """The input made of ct of the last product before each scatter, by the product's outputs."""
        meets = {}
        for node, following in pairwise(self.on_the_way):
            if is_product(node) and not is_product(following):
                of_ct = (value for value in node.inputs if value in self.cotangents)
                meets[node.outputs] = next(of_ct)
        return meets

    def waits(self) -> dict[tuple[int, ...], list[int]]:
        """For each constraint of a cotangent, by its outputs, what the rest waits for.

        These are gradients of weights that do not depend on it, which constraints with no product to dx between them share
        out, and what the gradients after the next constraint gather. After the last product to dx nothing waits for gradients.
        """
        shares, products = self._shares()
        waits = {}
        later = products
        for node, own in reversed(shares):
            gathers = self._gathers_for(later)
            waits[node.outputs] = _outputs([*own, *gathers])
            later = own or products
        return waits

    def _shares(self) -> tuple[list[Share], list[Node]]:
        """Returns the gradients of weights that each constraint waits for, and those for which none does."""
        products = self.for_weights
        shares: list[Share] = []
        for is_of_products, nodes in groupby(self.on_the_way, is_product):
            if is_of_products:
                continue
            constraints = list(nodes)
            ready: list[Node] = []
            if constraints[-1] is not self.on_the_way[-1]:
                after = self.graph.reached(_outputs(constraints))
                ready = [each for each in products if after.isdisjoint(each.inputs)]
            products = [each for each in products if each not in ready]
            size = -(-len(ready) // len(constraints))
            for place, constraint in enumerate(constraints):
                own = ready[place * size : (place + 1) * size]
                shares.append((constraint, own))
        return shares, products

    def before_dp(self) -> list[int]:
        """The products that only dp needs, and what else is made of residuals of what dp is made of."""
        after = self.graph.reached(_outputs(self.for_weights))
        last = [node for node in self.plan.nodes if not after.isdisjoint(node.inputs)]
        reads = {*self.values["dp"], *_inputs(last)}
        reads -= {*self.values["params"], *self.graph.constants}
        return sorted(reads.difference(_outputs(last)))

    def _gathers_for(self, products: Iterable[Node]) -> list[Node]:
        """The gathers of stored values for products."""
        nodes = self.graph.needed(_inputs(products), self.plan.known)
        gathers = filter(is_gather, nodes)
        return [node for node in gathers if not self._depends(node)]


def _outputs(nodes: Iterable[Node]) -> list[int]:
    outputs = []
    for node in nodes:
        outputs += node.outputs
    return outputs


def _inputs(nodes: Iterable[Node]) -> list[int]:
    inputs = []
    for node in nodes:
        inputs += node.inputs
    return inputs


def is_gather(node: Node) -> bool:
    """Whether it is a constraint that leaves nothing sharded over ``tensor``."""
    sharding = constraint_of(node.equation)
    if sharding is None:
        return False
    spec = tuple(getattr(sharding, "spec", ()))
    return TENSOR not in jax.tree.leaves(spec)


def is_product(node: Node) -> bool:
    """Whether it is a matrix product."""
    return node.name == "dot_general"
