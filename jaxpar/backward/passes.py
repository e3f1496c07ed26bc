"""The passes of a layer in an order in which their collectives over ``tensor`` run beside products.

Sequence parallelism constrains activations and cotangents, which XLA gathers before the products that need all positions and
scatters after them. In a loop over layers its scheduler leaves the gradients of weights, for which nothing waits, to the end
of a trip, and gathers what is needed next when nothing is left to run. Barriers make another order, here of a block of two
parts:

    products of B      dx of part 2               dx of part 1
            of F                        part 1                   part 2
            of W                        part 2                   part 1
    collectives        of F             of B      of F           of B

- What follows the scatter and the gather of a cotangent also waits for the gradients of weights that can be computed before.
- What follows a product to dx waits for what F gathers at that time, and F for this product (``run_passes``).
- What the backward pass gathers of ct before any product is an input (``gathered``): the trip before gathers it.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import jax

from jaxpar._compat import bind, constraint_of
from jaxpar.backward.graph import Node
from jaxpar.backward.split import SplitLayer
from jaxpar.mesh import TENSOR

Arrays = Sequence[Any]
Steps = Generator[Any, Any, tuple]  # yields values at which it may wait for another pass, and is sent them back


def run_passes(*passes: Steps) -> list[tuple]:
    """Returns what the passes return. At the values that they yield, the first with the first, each waits for the others."""
    values: list[Any] = [None] * len(passes)
    returned: dict[int, tuple] = {}
    while len(returned) < len(passes):
        running = [i for i in range(len(passes)) if i not in returned]
        for i in running:
            try:
                values[i] = passes[i].send(values[i])
            except StopIteration as end:
                returned[i] = end.value
        if len(passes) > 1 and not returned:
            values = list(jax.lax.optimization_barrier(values))
    return [returned[i] for i in range(len(passes))]


@dataclass(frozen=True)
class LayerPasses:
    """The passes of a layer, for a loop over layers.

    Attributes:
        layer: The layer.
        orders: Whether to order them; otherwise they are those of ``layer``.
    """

    layer: SplitLayer
    orders: bool

    def forward(self, params: Arrays, x: Arrays, *, store: bool) -> Steps:
        """Returns (y, residuals_b, residuals_w), or (y,) alone if it does not ``store``; it yields what it gathers."""
        layer = self.layer
        if not self.orders:
            return layer.forward_and_store(params, x) if store else (layer.forward(params, x),)
        plan = layer.plans["forward_and_store" if store else "forward"]
        known = layer.graph.constants | dict(zip(plan.known, [*params, *x], strict=True))
        of_x = layer.graph.reached(layer.values["x"])
        for node in plan.nodes:
            _run(node, known)
            if _gathers(node) and not of_x.isdisjoint(node.inputs):
                known[node.outputs[0]] = yield known[node.outputs[0]]
        names = ("y", "residuals_b", "residuals_w") if store else ("y",)
        return tuple([known[i] for i in layer.values[name]] for name in names)

    def gathered(self, ct: Arrays) -> list:
        """Returns what the backward pass gathers of ct before any product, which it takes beside ct."""
        graph, makes = self.layer.graph, [node.outputs[0] for node in self._of_ct]
        nodes = graph.needed(makes, self.layer.values["ct"])
        return graph.run(nodes, dict(zip(self.layer.values["ct"], ct, strict=True)), makes)

    def backward(self, params: Arrays, residuals_b: Arrays, residuals_w: Arrays, ct: Arrays, gathered: Arrays) -> Steps:
        """Returns (dx, values, finish) of which ``finish(values)`` makes dp of the products for it, and reads no residuals.

        dx and dp are those of ``SplitLayer.backward``. It yields a value before it scatters.
        """
        layer = self.layer
        if not self.orders:
            dx, dp = layer.backward(params, residuals_b, residuals_w, ct)
            return dx, dp, lambda dp: dp
        plan = layer.plans["backward"]
        given = zip(plan.known, [*params, *residuals_b, *residuals_w, *ct], strict=True)
        known = layer.graph.constants | dict(given)
        known |= {node.outputs[0]: array for node, array in zip(self._of_ct, gathered, strict=True)}
        done = {id(node) for node in self._of_ct}

        def run(nodes: Iterable[Node]) -> None:
            for node in nodes:
                if id(node) not in done:
                    _run(node, known)
                    done.add(id(node))

        for node in self._for_dx:
            if (met := self._met.get(node.outputs)) is not None:
                known[met] = yield known[met]
            run([node])
            if values := self._waits.get(node.outputs):
                run(layer.graph.needed(values, known))
                together = [*node.outputs, *values]
                known |= zip(together, jax.lax.optimization_barrier([known[i] for i in together]), strict=True)
        made = self._before_dp
        run(layer.graph.needed(made, known))

        def finish(values: Arrays) -> list:
            known.update(zip(made, values, strict=True))
            run(plan.nodes)
            return [known[i] for i in layer.values["dp"]]

        return [known[i] for i in layer.values["dx"]], [known[i] for i in made], finish

    def backward_weights(self, params: Arrays, residuals_w: Arrays, cotangents_w: Arrays) -> list:
        """Returns dp, as ``SplitLayer.backward_weights``."""
        dp = self.layer.backward_weights(params, residuals_w, cotangents_w)
        if not self.orders:
            return dp
        # XLA would merge a sum with the leading dim that it gets where it is added, then want the summed dims of what is stored
        # to be the minor ones in memory, and transpose all slots for that.
        made = zip(self.layer.values["dp"], dp, strict=True)
        return [jax.lax.optimization_barrier(a) if number in self._sums else a for number, a in made]

    @cached_property
    def _sums(self) -> set[int]:
        """What W makes by a sum and unary operations on it, as the gradients of scales and biases."""
        sums: set[int] = set()
        for node in self.layer.plans["backward_weights"].nodes:
            if node.name == "reduce_sum" or (len(node.inputs) == 1 and node.inputs[0] in sums):
                sums.update(node.outputs)
        return sums

    @property
    def has_waits(self) -> bool:
        """Whether anything in the backward pass waits for an order, as under sequence parallelism."""
        return self.orders and bool(self._waits)

    @cached_property
    def _for_dx(self) -> list[Node]:
        return self.layer.graph.needed(self.layer.values["dx"], self.layer.plans["backward"].known)

    @cached_property
    def _cotangents(self) -> set[int]:
        """The values that depend on ct."""
        return self.layer.graph.reached(self.layer.values["ct"])

    @cached_property
    def _of_ct(self) -> list[Node]:
        """The gathers of what is made of ct alone."""
        known, found = {*self.layer.values["ct"], *self.layer.graph.constants}, []
        for node in self._for_dx if self.orders else []:
            if node.inputs and known.issuperset(node.inputs):
                known.update(node.outputs)
                found += [node] if _gathers(node) else []
        return found

    @cached_property
    def _on_the_way(self) -> list[Node]:
        """Products and constraints of cotangents on the way from ct to dx."""
        depends = lambda node: not self._cotangents.isdisjoint(node.inputs)
        nodes = (node for node in self._for_dx if node not in self._of_ct and depends(node))
        return [node for node in nodes if _is_product(node) or constraint_of(node.equation)]

    @cached_property
    def _met(self) -> dict[tuple[int, ...], int]:
        """The input made of ct of the last product before each scatter, by the product's outputs."""
        last = [a for a, b in pairwise(self._on_the_way) if _is_product(a) and not _is_product(b)]
        return {node.outputs: next(i for i in node.inputs if i in self._cotangents) for node in last}

    @cached_property
    def _waits(self) -> dict[tuple[int, ...], list[int]]:
        """For each constraint of a cotangent, by its outputs, what the rest waits for.

        These are gradients of weights that do not depend on it, which constraints with no product to dx between them share
        out, and what the gradients after the next constraint gather. After the last product to dx nothing waits for gradients.
        """
        graph, backward = self.layer.graph, self.layer.plans["backward"]
        products = [node for node in backward.nodes if _is_product(node) and node not in self._for_dx]
        shares: list[tuple[Node, list[Node]]] = []
        groups = [list(nodes) for is_product, nodes in groupby(self._on_the_way, _is_product) if not is_product]
        for constraints in groups:
            after = graph.reached(i for each in constraints for i in each.outputs)
            is_last = constraints[-1] is self._on_the_way[-1]
            ready = [] if is_last else [each for each in products if after.isdisjoint(each.inputs)]
            products = [each for each in products if each not in ready]
            share = -(-len(ready) // len(constraints))
            shares += [(each, ready[i * share :][:share]) for i, each in enumerate(constraints)]
        made = lambda nodes: [i for each in nodes for i in each.outputs]
        nexts = [*(own for _, own in shares[1:]), []]
        return {
            node.outputs: made(own) + made(self._gathers_for(following or products))
            for (node, own), following in zip(shares, nexts, strict=False)
        }

    @cached_property
    def _before_dp(self) -> list[int]:
        """The products that only dp needs, and what else is made of residuals of what dp is made of."""
        nodes, dp = self.layer.plans["backward"].nodes, self.layer.values["dp"]
        products = [node for node in nodes if _is_product(node) and node not in self._for_dx]
        after = self.layer.graph.reached(i for each in products for i in each.outputs)
        last = [node for node in nodes if not after.isdisjoint(node.inputs)]
        given = {*self.layer.values["params"], *self.layer.graph.constants, *(i for each in last for i in each.outputs)}
        return sorted({*dp, *(i for each in last for i in each.inputs)} - given)

    def _gathers_for(self, products: list[Node]) -> list[Node]:
        """The gathers of stored values for products."""
        inputs = [i for each in products for i in each.inputs]
        nodes = self.layer.graph.needed(inputs, self.layer.plans["backward"].known)
        return [each for each in nodes if _gathers(each) and self._cotangents.isdisjoint(each.inputs)]


def _run(node: Node, known: dict[int, Any]) -> None:
    known.update(zip(node.outputs, bind(node.equation, [known[i] for i in node.inputs]), strict=True))


def _gathers(node: Node) -> bool:
    """Whether it is a constraint that leaves nothing sharded over ``tensor``."""
    sharding = constraint_of(node.equation)
    return sharding is not None and TENSOR not in jax.tree.leaves(tuple(getattr(sharding, "spec", ())))


def _is_product(node: Node) -> bool:
    return node.name == "dot_general"
