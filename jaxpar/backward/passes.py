"""The passes of a layer as a loop over layers runs them: in the order of ``order.py``, alone or one beside the other."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import jax

from jaxpar._compat import bind
from jaxpar.backward.graph import Node
from jaxpar.backward.order import BackwardOrder, Barrier, Part, backward_order, forward_order
from jaxpar.backward.split import Plan, SplitLayer

Arrays = Sequence[Any]
Known = dict[int, Any]  # the values that were computed, by their numbers in the graph


@dataclass(frozen=True)
class Pass:
    """A pass of a layer that is to be run.

    Attributes:
        parts: What it runs, in order.
        known: What it is given, to which it adds what it computes.
        result: Returns its result from all that is known.
    """

    parts: Sequence[Part]
    known: Known
    result: Callable[[Known], tuple]


def run_passes(*passes: Pass) -> list[tuple]:
    """Returns the results of the passes, of which two run in turns. Where the parts of both end, each waits for the other."""
    for parts in zip_longest(*(each.parts for each in passes)):
        for each, part in zip(passes, parts, strict=True):
            if part is not None:
                _run(part.steps, each.known)
        ends = [part and part.meets for part in parts]
        if len(passes) > 1 and None not in ends:
            _wait_for_each_other([each.known for each in passes], ends)
    return [each.result(each.known) for each in passes]


def _wait_for_each_other(knowns: Sequence[Known], ends: Sequence[Any]) -> None:
    pairs = list(zip(knowns, ends, strict=True))
    waited = jax.lax.optimization_barrier([known[end] for known, end in pairs])
    for (known, end), value in zip(pairs, waited, strict=True):
        known[end] = value


def _run(steps: Iterable[Node | Barrier], known: Known) -> None:
    for step in steps:
        if isinstance(step, Barrier):
            numbers = step.values
            made = jax.lax.optimization_barrier(_read(known, numbers))
        else:
            numbers = step.outputs
            made = bind(step.equation, _read(known, step.inputs))
        _write(known, numbers, made)


def _read(known: Known, numbers: Iterable[int]) -> list:
    return [known[number] for number in numbers]


def _write(known: Known, numbers: Iterable[int], arrays: Arrays) -> None:
    known.update(zip(numbers, arrays, strict=True))


@dataclass(frozen=True)
class LayerPasses:
    """The passes of a layer, for a loop over layers.

    Attributes:
        layer: The layer.
        orders: Whether to order them; otherwise they are those of ``layer``.
    """

    layer: SplitLayer
    orders: bool

    @cached_property
    def order(self) -> BackwardOrder:
        """The order of the backward pass."""
        return backward_order(self.layer)

    @property
    def has_waits(self) -> bool:
        """Whether anything in the backward pass waits for an order, as under sequence parallelism."""
        return self.orders and self.order.has_waits

    def _given(self, plan: Plan, arrays: Arrays) -> Known:
        known: Known = dict(self.layer.graph.constants)
        _write(known, plan.known, arrays)
        return known

    def forward(self, params: Arrays, x: Arrays, *, store: bool) -> Pass:
        """Returns the pass whose result is (y, residuals_b, residuals_w), or (y,) alone if it does not ``store``."""
        layer = self.layer
        if not self.orders:
            whole = lambda _: (
                layer.forward_and_store(params, x) if store else (layer.forward(params, x),)
            )
            return Pass([], {}, whole)
        plan = layer.plans["forward_and_store" if store else "forward"]
        parts = forward_order(layer.graph, plan.nodes, layer.values["x"])
        names = ("y", "residuals_b", "residuals_w") if store else ("y",)

        def result(known: Known) -> tuple:
            return tuple(_read(known, layer.values[name]) for name in names)

        return Pass(parts, self._given(plan, [*params, *x]), result)

    def gathered(self, ct: Arrays) -> list:
        """Returns what the backward pass gathers of ct before any product, which it takes beside ct."""
        if not self.orders:
            return []
        graph, of_ct = self.layer.graph, self.layer.values["ct"]
        makes = [node.outputs[0] for node in self.order.gathers]
        nodes = graph.needed(makes, of_ct)
        given = dict(zip(of_ct, ct, strict=True))
        return graph.run(nodes, given, makes)

    def backward(
        self,
        params: Arrays,
        residuals_b: Arrays,
        residuals_w: Arrays,
        ct: Arrays,
        gathered: Arrays,
    ) -> Pass:
        """Returns the pass whose result is (dx, values, finish), of which ``finish(values)`` makes dp and reads no residuals.

        dx and dp are those of ``SplitLayer.backward``.
        """
        layer = self.layer
        if not self.orders:

            def whole(_: Known) -> tuple:
                dx, dp = layer.backward(params, residuals_b, residuals_w, ct)
                return dx, dp, lambda dp: dp

            return Pass([], {}, whole)
        order, stored = self.order, (*residuals_b, *residuals_w)
        known = self._given(layer.plans["backward"], [*params, *stored, *ct])
        _write(known, [node.outputs[0] for node in order.gathers], gathered)

        def result(known: Known) -> tuple:
            def finish(values: Arrays) -> list:
                _write(known, order.before_dp, values)
                _run(order.rest, known)
                return _read(known, layer.values["dp"])

            dx = _read(known, layer.values["dx"])
            return dx, _read(known, order.before_dp), finish

        return Pass(order.parts, known, result)

    def backward_weights(
        self,
        params: Arrays,
        residuals_w: Arrays,
        cotangents_w: Arrays,
    ) -> list:
        """Returns dp, as ``SplitLayer.backward_weights``."""
        dp = self.layer.backward_weights(params, residuals_w, cotangents_w)
        if not self.orders:
            return dp
        # XLA would merge a sum with the leading dim that it gets where it is added, then want the summed dims of what is stored
        # to be the minor ones in memory, and transpose all slots for that.
        waited = []
        for number, grad in zip(self.layer.values["dp"], dp, strict=True):
            is_sum = number in self._sums
            waited.append(jax.lax.optimization_barrier(grad) if is_sum else grad)
        return waited

    @cached_property
    def _sums(self) -> set[int]:
        """What W makes by a sum and unary operations on it, as the gradients of scales and biases."""
        sums: set[int] = set()
        for node in self.layer.plans["backward_weights"].nodes:
            is_of_sum = len(node.inputs) == 1 and node.inputs[0] in sums
            if node.name == "reduce_sum" or is_of_sum:
                sums.update(node.outputs)
        return sums
