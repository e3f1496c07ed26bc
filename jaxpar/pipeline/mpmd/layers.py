"""Runs the layers of a virtual stage forward and backward, one after the other, each with arrays of its own.

The layers are written out. A loop over stacked params would copy the params of each layer out of the stack in every op.

Params, in the dtypes that the layers take, residuals and sums of gradients are lists of arrays, one list for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.backward.split import SplitLayer

Arrays = Sequence[Any]
Stored = dict[str, Any]


@dataclass(frozen=True)
class Layers:
    """The layers of a virtual stage, which may differ."""

    layers: Sequence[SplitLayer]

    def forward(self, params: Sequence[Arrays], x: Arrays) -> list:
        """Returns y."""
        for layer, own in zip(self.layers, params, strict=True):
            x = layer.forward(own, x)
        return list(x)

    def forward_and_store(self, params: Sequence[Arrays], x: Arrays) -> tuple[list, Stored]:
        """Returns y and its residuals."""
        stored = []
        for layer, own in zip(self.layers, params, strict=True):
            x, *for_layer = layer.forward_and_store(own, x)
            stored.append(for_layer)
        return list(x), {"residuals_b": [b for b, _ in stored], "residuals_w": [w for _, w in stored]}

    def backward_input(self, params: Sequence[Arrays], stored: Stored, ct: Arrays) -> tuple[list, Stored]:
        """Returns dx and the cotangents that W reads."""
        cotangents_w: list[Arrays] = []
        for layer, *own in self._reversed(params, stored["residuals_b"], stored["residuals_w"]):
            ct, for_layer = layer.backward_input(*own, ct)
            cotangents_w.insert(0, for_layer)
        return list(ct), {"cotangents_w": cotangents_w}

    def backward(
        self, params: Sequence[Arrays], stored: Stored, ct: Arrays, sums: Sequence[Arrays]
    ) -> tuple[list, list]:
        """Returns dx and the sums with the gradients added."""
        added: list[Arrays] = []
        for layer, total, *own in self._reversed(sums, params, stored["residuals_b"], stored["residuals_w"]):
            ct, grads = layer.backward(*own, ct)
            added.insert(0, add(total, grads))
        return list(ct), added

    def backward_weights(self, params: Sequence[Arrays], stored: Stored, sums: Sequence[Arrays]) -> list:
        """Returns the sums with the gradients added."""
        each = zip(self.layers, sums, params, stored["residuals_w"], stored["cotangents_w"], strict=True)
        return [add(total, layer.backward_weights(*own)) for layer, total, *own in each]

    def _reversed(self, *arrays: Sequence[Arrays]) -> list[tuple]:
        """Each layer with its own of some arrays, the last layer first."""
        return list(zip(self.layers, *arrays, strict=True))[::-1]


def add(sums: Arrays, grads: Arrays) -> list:
    """Returns sums with gradients added, in the sums' dtype.

    Sums have a leading dim of one replica, which gradients get here. XLA would copy a sum that is reshaped before the addition.
    """
    return [total + grad.astype(total.dtype)[None] for total, grad in zip(sums, grads, strict=True)]
