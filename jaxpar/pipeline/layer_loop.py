"""Loops over the layers of a stage's chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.mesh import STAGE
from jaxpar.pipeline import buffers
from jaxpar.pipeline.control_flow import for_range
from jaxpar.pipeline.layout import LayerLayout


@dataclass(frozen=True)
class LayerLoop:
    """The layers of a stage.

    Attributes:
        layout: Which stage and chunk holds which layers.
        params: This stage's packed layers ``[num_chunks * positions_per_chunk, ...]``, already cast.
        gather: Returns the params of one layer as ops read them; at ZeRO 3 it gathers them.
        masks: Whether the program masks idle ops.
    """

    layout: LayerLayout
    params: list
    gather: Callable[[list], list]
    masks: bool

    def num_layers(self, chunk: jax.Array) -> Any:
        """The number of layers of a chunk of this stage: an int if all chunks have the same, so that trip counts are static."""
        if self.layout.is_even:
            return self.layout.positions_per_chunk
        return jnp.asarray(self.layout.layer_counts)[jax.lax.axis_index(STAGE), chunk]

    def params_at(self, chunk: jax.Array, position: Any) -> list:
        """The params of the layer at a position of a chunk."""
        index = chunk * self.layout.positions_per_chunk + position
        return self.gather(buffers.take(self.params, index, as_stored=self.masks))

    def over_layers(self, body: Callable, chunk: jax.Array, carry: Any, *, back: bool = False) -> Any:
        """Runs ``body(carry, position, layer_params)`` over the layers of a chunk, forward or backward.

        On a GPU the host waits in each trip of a loop whose length it does not know, so in a program that masks the positions
        that hold a layer in every chunk have a loop of their own.
        """
        everywhere = self.layout.min_layers if self.masks else 0
        for start, stop in [(0, everywhere), (everywhere, self.num_layers(chunk))][:: -1 if back else 1]:
            carry = self.over_positions(start, stop, body, chunk, carry, back=back)
        return carry

    def over_positions(
        self, start: int, stop: Any, body: Callable, chunk: jax.Array, carry: Any, *, back: bool = False
    ) -> Any:
        """Does so over some positions."""
        at = lambda position, carry: body(carry, position, self.params_at(chunk, position))
        return for_range(start, stop, at, carry, back=back)
