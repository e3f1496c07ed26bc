"""One layer of a stage: what its ops compute and store, and what the layer exchanges with other replicas.

    forward          x -> y                 and the residuals, if F or R stores them
    backward         ct -> ct below it      and the gradients of its params: B and W at once
    backward_input   ct -> ct below it      and what B stores for W
    weights          the gradients of its params, from what F and B stored
    fetch            its params, as ops read them
    add              its gradients, as they are added
    finish           the sums of its gradients, reduced over the replicas

Arrays are flat lists: of the leaves of params, of an activation x, and of a cotangent ct, which has the float leaves of x
alone. Buffers hold PRNG keys as their data (``with_keys``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar._compat import row_major
from jaxpar.backward.partition import Cut
from jaxpar.backward.passes import LayerPasses, run_passes
from jaxpar.backward.split import SplitLayer
from jaxpar.dtypes import float_indices, rewrap_key, unwrap_key
from jaxpar.mesh import TENSOR
from jaxpar.shard_map import on_tensor_shards
from jaxpar.zero import Zero

Arrays = list[Any]
Backward = tuple[Arrays, Arrays]  # a cotangent, and what the layer gathers of it before any product
Orders = Mapping[str, list[Callable[[Any], Any]]]

# The buffers that hold values of each layer.
RESIDUALS = ("residuals_b", "residuals_w")
COTANGENTS = "cotangents_w"
BUFFERS = (*RESIDUALS, COTANGENTS)


@dataclass(frozen=True)
class Layer:
    """The functions of a layer.

    Attributes:
        split: The layer split into forward pass, B and W.
        passes: Its forward pass and its complete backward pass, in order.
        zero: What it exchanges with the other replicas: ``zero[LAYERS]`` of a step.
        x: The shapes of the leaves of an activation.
        orders: For each buffer a function for each value, which fixes its order of dims in memory.
    """

    split: SplitLayer
    passes: LayerPasses
    zero: Zero
    x: list[jax.ShapeDtypeStruct]
    orders: Orders

    # -- ops -----------------------------------------------------------------------------------------------------------

    def forward(self, params: Arrays, x: Arrays, *, store: bool) -> tuple[Arrays, list[Arrays]]:
        """Returns y and, if it is to ``store`` them, the values of each of ``RESIDUALS``."""
        one = self.passes.forward(params, self.with_keys(x), store=store)
        ((y, *stored),) = run_passes(one)
        return self.without_keys(y), stored

    def backward(
        self,
        params: Arrays,
        residuals: tuple[Arrays, Arrays],
        ct: Backward,
    ) -> tuple[Backward, Arrays]:
        """Returns the cotangent of the layer's input, as ``with_gathered``, and the gradients of its params."""
        for_b, for_w = residuals
        one = self.passes.backward(params, for_b, for_w, *ct)
        ((dx, values, finish),) = run_passes(one)
        return self.with_gathered(dx), finish(values)

    def with_gathered(self, ct: Arrays) -> Backward:
        """Returns a cotangent with what the layer below gathers of it."""
        return ct, self.passes.gathered(ct)

    def backward_input(
        self,
        params: Arrays,
        residuals: tuple[Arrays, Arrays],
        ct: Arrays,
    ) -> tuple[Arrays, Arrays]:
        """Returns the cotangent of the layer's input, and the values of ``COTANGENTS``."""
        for_b, for_w = residuals
        return self.split.backward_input(params, for_b, for_w, ct)

    def weights(
        self,
        params: Arrays,
        residuals_w: Arrays,
        cotangents_w: Arrays,
    ) -> Arrays:
        """Returns the gradients of the layer's params."""
        return self.passes.backward_weights(params, residuals_w, cotangents_w)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def fetch(self, params: Arrays) -> Arrays:
        """Returns the layer's params as ops read them."""
        return self.zero.fetch(params)

    def add(self, grads: Arrays) -> Arrays:
        """Returns the layer's gradients as they are added."""
        return self.zero.add(grads)

    def finish(self, sums: Arrays) -> Arrays:
        """Returns the complete gradients ``[1, ...]`` of the layer, reduced over the replicas."""
        _, reduced = self.zero.finish(None, sums)
        return reduced

    # -- buffers -------------------------------------------------------------------------------------------------------

    def in_order(self, name: str, values: Arrays) -> Arrays:
        """Returns the layer's values of a buffer with their dims in order in memory."""
        pairs = zip(self.orders[name], values, strict=True)
        return [order(value) for order, value in pairs]

    def with_keys(self, x: Sequence[Any]) -> Arrays:
        """Returns an activation with its PRNG keys rewrapped."""
        pairs = zip(x, self.x, strict=True)
        return [rewrap_key(leaf, like) for leaf, like in pairs]

    def without_keys(self, x: Sequence[Any]) -> Arrays:
        """Returns an activation with the data of its PRNG keys."""
        return [unwrap_key(leaf) for leaf in x]

    @property
    def floats(self) -> list[int]:
        """Which leaves of an activation have a cotangent."""
        return float_indices(self.x)


def orders_in_memory(
    layer: SplitLayer,
    cuts: Mapping[int, Cut],
    num_shards: int,
    *,
    masks: bool,
) -> Orders:
    """Returns, for each buffer, one function per stored value, which makes a transposed value row-major in memory.

    Otherwise XLA may write a transposed value as it was before, or read it as a product wants it, and transpose the whole
    buffer for that; it does so on GPUs. XLA's partitioner would gather a value to fix its order, so each shard over ``tensor``
    is fixed on its own.

    Args:
        layer: The layer.
        cuts: The dim of each of its values that is sharded over ``tensor``.
        num_shards: The number of shards.
        masks: Whether the program masks idle ops; otherwise XLA may choose the order.
    """

    def order(value: int) -> Callable[[Any], Any]:
        cut = cuts.get(value)
        is_known = cut is not None or num_shards == 1
        if not masks or not is_known or not layer.graph.is_transposed(value):
            return lambda array: array
        dims = range(len(layer.graph.avals[value].shape))
        entries = [TENSOR if dim == cut else None for dim in dims]
        return partial(on_tensor_shards, row_major, spec=PartitionSpec(*entries))

    return {name: [order(value) for value in layer.values[name]] for name in BUFFERS}
