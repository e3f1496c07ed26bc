"""The ops of a stage over the layers of a chunk, on what the stage keeps in its buffers: F, R, B, W, and F beside B.

Rings are the buffers of values of layers, in which each trip of a loop writes or reads what belongs to its layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpar.backward.passes import run_passes
from jaxpar.pipeline import buffers
from jaxpar.pipeline.layer import COTANGENTS, RESIDUALS, Arrays, Backward
from jaxpar.pipeline.layer_loop import LayerLoop
from jaxpar.pipeline.program import OpRow

Rings = Sequence[Arrays]  # the buffers of RESIDUALS


class LayerOps(LayerLoop):
    """The layers of a stage, and its ops on them."""

    def forward(
        self,
        row: OpRow,
        x: Arrays,
        rings: Rings,
        *,
        store: bool,
    ) -> tuple[Arrays, Rings]:
        """F and R: runs the layers of a chunk; returns y and the rings, with their residuals if it is to ``store`` them."""
        one = self._forward_one(row, store=store)
        y, *rings = self.over_layers(one, row.chunk, (x, *rings))
        return y, rings

    def _forward_one(self, row: OpRow, *, store: bool) -> Callable[[tuple, Any, Arrays], tuple]:
        def one(carry: tuple, position: Any, params: Arrays) -> tuple:
            x, *rings = carry
            y, stored = self.layer.forward(params, x, store=store)
            return y, *self._put_residuals(rings, stored, row, position)

        return one

    def backward(
        self,
        row: OpRow,
        ct: Arrays,
        rings: Rings,
        sums: Arrays,
    ) -> tuple[Arrays, Arrays]:
        """B and W at once: returns dx, and the sums with the gradients added."""

        def one(ct: Backward, position: Any, params: Arrays) -> tuple[Backward, Arrays]:
            residuals = self._residuals(rings, row, position)
            return self.layer.backward(params, residuals, ct)

        first = self.layer.with_gathered(ct)
        (dx, _), sums = self.add_over_layers(one, row, first, sums, back=True)
        return dx, sums

    def backward_input(
        self,
        row: OpRow,
        ct: Arrays,
        rings: Rings,
        cotangents_w: Arrays,
    ) -> tuple[Arrays, Arrays]:
        """B alone: returns dx, and the buffer of what W reads."""

        def one(carry: tuple, position: Any, params: Arrays) -> tuple:
            ct, ring = carry
            residuals = self._residuals(rings, row, position)
            dx, stored = self.layer.backward_input(params, residuals, ct)
            return dx, self._put(COTANGENTS, ring, stored, row, position)

        carry = ct, cotangents_w
        return self.over_layers(one, row.chunk, carry, back=True)

    def weights(
        self,
        row: OpRow,
        residuals_w: Arrays,
        cotangents_w: Arrays,
        sums: Arrays,
    ) -> Arrays:
        """W alone: returns the sums with the gradients added."""
        rings = {"residuals_w": residuals_w, COTANGENTS: cotangents_w}

        def one(nothing: tuple, position: Any, params: Arrays) -> tuple[tuple, Arrays]:
            stored = [self._get(name, ring, row, position) for name, ring in rings.items()]
            return nothing, self.layer.weights(params, *stored)

        _, sums = self.add_over_layers(one, row, (), sums)
        return sums

    def forward_and_backward(
        self,
        forward: OpRow,
        backward: OpRow,
        x: Arrays,
        ct: Arrays,
        rings: Rings,
        sums: Arrays,
        *,
        store: bool,
    ) -> tuple[Arrays, Arrays, Rings, Arrays]:
        """F of one microbatch and the complete B of another in one loop: returns y, dx, the rings and the sums.

            trip      0            1            ...    L-1
            F         layer 0      layer 1             layer L-1
            B         layer L-1    layer L-2           layer 0

        Neither reads what the other writes, so XLA can run the collectives over ``tensor`` of one beside the products of the
        other (``backward/order.py``). An op that is off runs on what its slots hold. Positions that do not hold a layer in
        every chunk have loops of their own: those of B before, those of F after.
        """
        layer, passes = self.layer, self.layer.passes
        is_ordered = passes.has_waits

        def one_backward(carry: tuple, position: Any, params: Arrays) -> tuple[tuple, Arrays]:
            ct, x, *rings = carry
            residuals = self._residuals(rings, backward, position)
            ct, grads = layer.backward(params, residuals, ct)
            return (ct, x, *rings), grads

        def one_of_each(carry: tuple, position: Any, params: Arrays) -> tuple[tuple, Arrays]:
            ct, x, *rings = carry
            ahead = self.layout.min_layers - 1 - position
            # B's reads come before F's writes, or XLA copies the rings: here, or after B's products if they are in order.
            residuals = self._residuals(rings, backward, position)
            if not is_ordered:
                rings, residuals = jax.lax.optimization_barrier((rings, residuals))
            params_ahead = self.params_at(forward.chunk, ahead)
            of_f = passes.forward(params_ahead, layer.with_keys(x), store=store)
            of_b = passes.backward(params, *residuals, *ct)
            (y, *stored), (dx, values, finish) = run_passes(of_f, of_b)
            if is_ordered:
                rings, dx, values = jax.lax.optimization_barrier((rings, dx, values))
            rings = self._put_residuals(rings, stored, forward, ahead)
            y, ct = layer.without_keys(y), layer.with_gathered(dx)
            return (ct, y, *rings), finish(values)

        first = layer.with_gathered(ct), x, *rings
        with jax.named_scope("FB"):
            carry, sums = self.add_over_layers(
                one_backward, backward, first, sums, back=True, everywhere=one_of_each
            )
            (dx, _), *of_forward = carry
            one_forward = self._forward_one(forward, store=store)
            others = self.others(forward.chunk)
            y, *rings = self.over_positions(others, one_forward, forward.chunk, tuple(of_forward))
        return y, dx, rings, sums

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _put(self, name: str, ring: Arrays, values: Arrays, row: OpRow, position: Any) -> Arrays:
        values = self.layer.in_order(name, values)
        return buffers.put(ring, values, *self.index(row, name, position))

    def _get(self, name: str, ring: Arrays, row: OpRow, position: Any) -> Arrays:
        shapes = self.layer.split.shapes(name)
        values = buffers.get(ring, shapes, *self.index(row, name, position))
        return self.layer.in_order(name, values)

    def _residuals(self, rings: Rings, row: OpRow, position: Any) -> tuple[Arrays, Arrays]:
        """The residuals of one layer, for B alone and for the gradients of the weights."""
        pairs = zip(RESIDUALS, rings, strict=True)
        for_b, for_w = [self._get(name, ring, row, position) for name, ring in pairs]
        return for_b, for_w

    def _put_residuals(
        self, rings: Rings, stored: Sequence[Arrays], row: OpRow, position: Any
    ) -> Rings:
        """Writes what F of one layer stores, if it does."""
        if not stored:
            return rings
        each = zip(RESIDUALS, rings, stored, strict=True)
        return [self._put(name, ring, values, row, position) for name, ring, values in each]
