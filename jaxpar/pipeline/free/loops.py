"""The layers of a part one after the other, forward and back: equal ones in a loop, unlike ones written out.

What layers store is a list of arrays, with a leading dim of layers, or a list of lists, one a layer. Params and sums are
those of the whole stage, of which the part has the places from ``first_place`` on.
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
    """Equal layers, whose params are arrays ``[places, ...]``, in a loop that is compiled once for all of them."""

    layer: SplitLayer
    count: int
    first_place: int

    @property
    def _places(self) -> jax.Array:
        return jnp.arange(self.count, dtype=jnp.int32) + self.first_place

    def _params(self, params: Arrays, place: Any) -> list:
        return self.layer.cast(buffers.take(params, place))

    def forward(self, params: Arrays, x: Arrays) -> list:
        """Returns y."""
        body = lambda x, place: (self.layer.forward(self._params(params, place), x), None)
        return jax.lax.scan(body, list(x), self._places)[0]

    def forward_and_store(self, params: Arrays, x: Arrays) -> tuple[list, Stored]:
        """Returns y and what is stored for B and W."""

        def body(x: list, place: Any) -> tuple[list, tuple]:
            y, *stored = self.layer.forward_and_store(self._params(params, place), x)
            return y, tuple(stored)

        y, (stored_b, stored_w) = jax.lax.scan(body, list(x), self._places)
        return y, {"stored_b": stored_b, "stored_w": stored_w}

    def backward_input(self, params: Arrays, stored: Stored, ct: Arrays) -> tuple[list, Stored]:
        """Returns dx and what is kept for W."""

        def body(ct: list, at: tuple) -> tuple[list, list]:
            place, stored_b, stored_w = at
            return self.layer.backward_input(self._params(params, place), stored_b, stored_w, ct)

        over = (self._places, stored["stored_b"], stored["stored_w"])
        dx, kept = jax.lax.scan(body, list(ct), over, reverse=True)
        return dx, {"kept": kept}

    def backward(self, params: Arrays, stored: Stored, ct: Arrays, sums: Arrays) -> tuple[list, list]:
        """Returns dx and the sums with the gradients added."""

        def body(carry: tuple, at: tuple) -> tuple[tuple, None]:
            (ct, sums), (place, stored_b, stored_w) = carry, at
            dx, dp = self.layer.backward(self._params(params, place), stored_b, stored_w, ct)
            return (dx, buffers.add_at(sums, dp, place)), None

        over = (self._places, stored["stored_b"], stored["stored_w"])
        return jax.lax.scan(body, (list(ct), list(sums)), over, reverse=True)[0]

    def backward_weights(self, params: Arrays, stored: Stored, sums: Arrays) -> list:
        """Returns the sums with the gradients added."""

        def body(sums: list, at: tuple) -> tuple[list, None]:
            place, stored_w, kept = at
            dp = self.layer.backward_weights(self._params(params, place), stored_w, kept)
            return buffers.add_at(sums, dp, place), None

        return jax.lax.scan(body, list(sums), (self._places, stored["stored_w"], stored["kept"]))[0]


@dataclass(frozen=True)
class UnlikeLayers:
    """Layers that may be unlike each other, whose params are a list of arrays a place."""

    layers: Sequence[SplitLayer]
    first_place: int

    def forward(self, params: Sequence[Arrays], x: Arrays) -> list:
        """Returns y."""
        for i, layer in enumerate(self.layers):
            x = layer.forward(layer.cast(params[self.first_place + i]), x)
        return list(x)

    def forward_and_store(self, params: Sequence[Arrays], x: Arrays) -> tuple[list, Stored]:
        """Returns y and what is stored for B and W."""
        stored = []
        for i, layer in enumerate(self.layers):
            x, *for_layer = layer.forward_and_store(layer.cast(params[self.first_place + i]), x)
            stored.append(for_layer)
        return list(x), {"stored_b": [b for b, _ in stored], "stored_w": [w for _, w in stored]}

    def backward_input(self, params: Sequence[Arrays], stored: Stored, ct: Arrays) -> tuple[list, Stored]:
        """Returns dx and what is kept for W."""
        kept: list[Arrays] = []
        for i, layer in reversed(list(enumerate(self.layers))):
            own = layer.cast(params[self.first_place + i]), stored["stored_b"][i], stored["stored_w"][i]
            ct, for_layer = layer.backward_input(*own, ct)
            kept.insert(0, for_layer)
        return list(ct), {"kept": kept}

    def backward(
        self, params: Sequence[Arrays], stored: Stored, ct: Arrays, sums: Sequence[Arrays]
    ) -> tuple[list, list]:
        """Returns dx and the sums with the gradients added."""
        sums = list(sums)
        for i, layer in reversed(list(enumerate(self.layers))):
            place = self.first_place + i
            ct, dp = layer.backward(layer.cast(params[place]), stored["stored_b"][i], stored["stored_w"][i], ct)
            sums[place] = add(sums[place], dp)
        return list(ct), sums

    def backward_weights(self, params: Sequence[Arrays], stored: Stored, sums: Sequence[Arrays]) -> list:
        """Returns the sums with the gradients added."""
        sums = list(sums)
        for i, layer in enumerate(self.layers):
            place = self.first_place + i
            dp = layer.backward_weights(layer.cast(params[place]), stored["stored_w"][i], stored["kept"][i])
            sums[place] = add(sums[place], dp)
        return sums


def add(sums: Arrays, grads: Arrays) -> list:
    """Returns sums with gradients added, in the sums' dtype."""
    return [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]
