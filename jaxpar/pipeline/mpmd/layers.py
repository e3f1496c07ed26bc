"""Runs the layers of a virtual stage forward and backward: equal layers in a loop, different layers unrolled.

The residuals of layers are a list of arrays with a leading dim of layers, or a list of arrays for each layer. Params and sums
are those of the stage; those of the virtual stage begin at ``first_position``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.backward.split import SplitLayer
from jaxpar.pipeline import buffers

Arrays = Sequence[Any]
Stored = dict[str, Any]


@dataclass(frozen=True)
class EqualLayers:
    """Equal layers, whose params are arrays ``[positions, ...]``, in a loop whose body is compiled once."""

    layer: SplitLayer
    count: int
    first_position: int

    @property
    def _positions(self) -> jax.Array:
        return jnp.arange(self.count, dtype=jnp.int32) + self.first_position

    def _params(self, params: Arrays, position: Any) -> list:
        return self.layer.cast(buffers.take(params, position))

    def forward(self, params: Arrays, x: Arrays) -> list:
        """Returns y."""
        body = lambda x, position: (self.layer.forward(self._params(params, position), x), None)
        return jax.lax.scan(body, list(x), self._positions)[0]

    def forward_and_store(self, params: Arrays, x: Arrays) -> tuple[list, Stored]:
        """Returns y and its residuals."""

        def body(x: list, position: Any) -> tuple[list, tuple]:
            y, *stored = self.layer.forward_and_store(self._params(params, position), x)
            return y, tuple(stored)

        y, (residuals_b, residuals_w) = jax.lax.scan(body, list(x), self._positions)
        return y, {"residuals_b": residuals_b, "residuals_w": residuals_w}

    def backward_input(self, params: Arrays, stored: Stored, ct: Arrays) -> tuple[list, Stored]:
        """Returns dx and the cotangents that W reads."""

        def body(ct: list, at: tuple) -> tuple[list, list]:
            position, residuals_b, residuals_w = at
            return self.layer.backward_input(self._params(params, position), residuals_b, residuals_w, ct)

        over = (self._positions, stored["residuals_b"], stored["residuals_w"])
        dx, cotangents_w = jax.lax.scan(body, list(ct), over, reverse=True)
        return dx, {"cotangents_w": cotangents_w}

    def backward(self, params: Arrays, stored: Stored, ct: Arrays, sums: Arrays) -> tuple[list, list]:
        """Returns dx and the sums with the gradients added."""

        def body(carry: tuple, at: tuple) -> tuple[tuple, None]:
            (ct, sums), (position, residuals_b, residuals_w) = carry, at
            dx, dp = self.layer.backward(self._params(params, position), residuals_b, residuals_w, ct)
            return (dx, buffers.add_at(sums, dp, position)), None

        over = (self._positions, stored["residuals_b"], stored["residuals_w"])
        return jax.lax.scan(body, (list(ct), list(sums)), over, reverse=True)[0]

    def backward_weights(self, params: Arrays, stored: Stored, sums: Arrays) -> list:
        """Returns the sums with the gradients added."""

        def body(sums: list, at: tuple) -> tuple[list, None]:
            position, residuals_w, cotangents_w = at
            dp = self.layer.backward_weights(self._params(params, position), residuals_w, cotangents_w)
            return buffers.add_at(sums, dp, position), None

        return jax.lax.scan(body, list(sums), (self._positions, stored["residuals_w"], stored["cotangents_w"]))[0]


@dataclass(frozen=True)
class UnlikeLayers:
    """Layers that may differ, whose params are a list of arrays for each position."""

    layers: Sequence[SplitLayer]
    first_position: int

    def forward(self, params: Sequence[Arrays], x: Arrays) -> list:
        """Returns y."""
        for i, layer in enumerate(self.layers):
            x = layer.forward(layer.cast(params[self.first_position + i]), x)
        return list(x)

    def forward_and_store(self, params: Sequence[Arrays], x: Arrays) -> tuple[list, Stored]:
        """Returns y and its residuals."""
        stored = []
        for i, layer in enumerate(self.layers):
            x, *for_layer = layer.forward_and_store(layer.cast(params[self.first_position + i]), x)
            stored.append(for_layer)
        return list(x), {"residuals_b": [b for b, _ in stored], "residuals_w": [w for _, w in stored]}

    def backward_input(self, params: Sequence[Arrays], stored: Stored, ct: Arrays) -> tuple[list, Stored]:
        """Returns dx and the cotangents that W reads."""
        cotangents_w: list[Arrays] = []
        for i, layer in reversed(list(enumerate(self.layers))):
            own = layer.cast(params[self.first_position + i]), stored["residuals_b"][i], stored["residuals_w"][i]
            ct, for_layer = layer.backward_input(*own, ct)
            cotangents_w.insert(0, for_layer)
        return list(ct), {"cotangents_w": cotangents_w}

    def backward(
        self, params: Sequence[Arrays], stored: Stored, ct: Arrays, sums: Sequence[Arrays]
    ) -> tuple[list, list]:
        """Returns dx and the sums with the gradients added."""
        sums = list(sums)
        for i, layer in reversed(list(enumerate(self.layers))):
            position = self.first_position + i
            ct, dp = layer.backward(
                layer.cast(params[position]), stored["residuals_b"][i], stored["residuals_w"][i], ct
            )
            sums[position] = add(sums[position], dp)
        return list(ct), sums

    def backward_weights(self, params: Sequence[Arrays], stored: Stored, sums: Sequence[Arrays]) -> list:
        """Returns the sums with the gradients added."""
        sums = list(sums)
        for i, layer in enumerate(self.layers):
            position = self.first_position + i
            dp = layer.backward_weights(
                layer.cast(params[position]), stored["residuals_w"][i], stored["cotangents_w"][i]
            )
            sums[position] = add(sums[position], dp)
        return sums


def add(sums: Arrays, grads: Arrays) -> list:
    """Returns sums with gradients added, in the sums' dtype."""
    return [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]
