"""The order of layers: from the order of the model to the order of the devices, and back.

Canonical order is that of the model and of checkpoints. Packed order is device-major: the chunks of stage 0, then those of
stage 1, each chunk padded to the same number of positions. Seven layers on two stages with two chunks, in ``loop`` and in ``v``
placement:

    chunk        0      1                    chunk        0      1
    stage 0    0 1 |  4 5                    stage 0    0 1 |  6 .
    stage 1    2 3 |  6 .                    stage 1    2 3 |  4 5        . is padding: takes memory, no time

Layers in packed order have their own type, ``PackedLayers``, so that layers cannot be passed in the wrong order. If packed
order equals canonical order (stages of equal size, one chunk), layers are not wrapped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar.fields import arg, check_kind, check_one_of
from jaxpar.layered_model import (
    LAYERS,
    PackedLayers,
    check_unpacked,
    is_layered,
    is_packed,
    is_stacked,
    num_layers,
)
from jaxpar.schedule import PLACEMENTS, Schedule, check_sizes, stage_and_chunk


@dataclass(frozen=True)
class LayerLayout:
    """Which layers each chunk of each stage holds.

    Attributes:
        num_layers: Layers of the model.
        num_stages: Stages of the mesh.
        num_chunks: Chunks of layers on each stage.
        placement: "loop": chunk c of stage s is virtual stage c * num_stages + s. "v": odd chunks run from the last stage
            back to the first.
        layers_per_virtual_stage: The number of layers of each virtual stage, in the model's order; 0 for one that only embeds,
            only has the head, or sends on what it receives. By default they differ by at most one, and the larger ones come
            first.
        end_layers: The number of layers that the embedding and the head count as; the first and the last virtual stage have so
            many fewer layers.
    """

    num_layers: int
    num_stages: int
    num_chunks: int = 1
    placement: str = "loop"
    layers_per_virtual_stage: Sequence[int] | None = None
    end_layers: tuple[int, int] = field(
        default=(0, 0), compare=False
    )  # layers_per_virtual_stage holds the result

    def __post_init__(self) -> None:
        check_sizes(
            num_layers=self.num_layers, num_stages=self.num_stages, num_chunks=self.num_chunks
        )
        check_one_of(PLACEMENTS, placement=self.placement)
        for name in ("layers_per_virtual_stage", "end_layers"):
            counts, rule, remedy = getattr(self, name), "integers in a tuple", "Write (1, 2), say."
            check_kind((tuple, list, np.ndarray, None), rule, remedy, **{name: counts})
            for each in () if counts is None else counts:
                check_kind((Integral,), rule, remedy, **{name: each})
        count = self.num_stages * self.num_chunks
        if self.num_layers < count and self.layers_per_virtual_stage is None:
            raise ValueError(
                f"a pipeline needs at least one layer for each chunk of each stage; got {self.num_layers} layers for "
                f"{arg(stage=self.num_stages, num_chunks=self.num_chunks)}. Choose a product of at most {self.num_layers}, "
                f"or give {arg('layers_per_virtual_stage')}, with 0 where a chunk has no layer."
            )
        given = (
            _spread(self.num_layers, count, self.end_layers)
            if self.layers_per_virtual_stage is None
            else self.layers_per_virtual_stage
        )
        object.__setattr__(self, "layers_per_virtual_stage", tuple(given))
        if len(given) != count or sum(given) != self.num_layers or min(given) < 0:
            raise ValueError(
                f"{arg('layers_per_virtual_stage')} must have one count a virtual stage, and they must add up to num_layers; "
                f"got {tuple(given)} for {count} virtual stages and {self.num_layers} layers. Give {count} counts that add up "
                f"to {self.num_layers}."
            )

    @property
    def positions_per_chunk(self) -> int:
        """The number of positions of each chunk, which is the number of layers of the largest virtual stage."""
        return max(self.layers_per_virtual_stage or ())

    @property
    def min_layers(self) -> int:
        """The number of layers of the smallest virtual stage: positions up to it hold a layer in every chunk."""
        return min(self.layers_per_virtual_stage or (0,))

    @property
    def is_even(self) -> bool:
        """Whether all virtual stages have the same number of layers."""
        return self.min_layers == self.positions_per_chunk

    @property
    def num_positions(self) -> int:
        """The leading dim of packed layers."""
        return self.num_stages * self.num_chunks * self.positions_per_chunk

    @property
    def is_canonical(self) -> bool:
        """Whether packed order equals canonical order, so that packing moves nothing."""
        return self.packed_order.tolist() == list(range(self.num_layers))

    @property
    def layer_counts(self) -> np.ndarray:
        """The number of layers of each chunk, ``[num_stages, num_chunks]``."""
        is_layer = (
            self.packed_order.reshape(self.num_stages, self.num_chunks, self.positions_per_chunk)
            >= 0
        )
        return is_layer.sum(axis=-1, dtype=np.int32)

    @property
    def packed_order(self) -> np.ndarray:
        """The layer at each packed position, -1 for padding."""
        order = np.full((self.num_stages, self.num_chunks, self.positions_per_chunk), -1)
        start = 0
        for virtual_stage, count in enumerate(self.layers_per_virtual_stage or ()):
            order[(*self.stage_and_chunk(virtual_stage), slice(count))] = np.arange(
                start, start + count
            )
            start += count
        return order.reshape(-1)

    def stage_and_chunk(self, virtual_stage: int) -> tuple[int, int]:
        """Returns the (stage, chunk) that holds a virtual stage."""
        return stage_and_chunk(virtual_stage, self.num_stages, self.placement)

    def pack(self, layers: PyTree) -> PyTree:
        """Returns layers ``[num_layers, ...]`` as PackedLayers ``[num_positions, ...]``, with zeros as padding.

        If packed order equals canonical order, they are returned unchanged and not wrapped. NumPy arrays stay NumPy arrays.

        Args:
            layers: Stacked layers in the model's order.

        Raises:
            TypeError: They are already packed.
            ValueError: Their number is not ``num_layers``.
        """
        check_unpacked(layers)
        return self.as_packed(self.in_packed_order(layers))

    def unpack(self, packed: PyTree) -> PyTree:
        """Returns PackedLayers in canonical order ``[num_layers, ...]``, without the padding.

        Raises:
            TypeError: They are not packed, although packed order differs from canonical order.
            ValueError: They are packed by another layout.
        """
        return self.in_canonical_order(self.tree_of(packed))

    def as_packed(self, tree: PyTree) -> PyTree:
        """Returns arrays or specs that are already in packed order as PackedLayers, or unchanged if that order is canonical."""
        return tree if self.is_canonical else PackedLayers(tree, self)

    def tree_of(self, packed: PyTree) -> PyTree:
        """Returns the tree of packed layers, in packed order; raises as ``unpack`` does."""
        if not is_packed(packed):
            if self.is_canonical:
                return packed
            raise TypeError(
                f"layers must be packed by the layout that comes with them; got {type(packed).__name__}, not PackedLayers, for "
                f'{self}. Pack them: params | {{"layers": layout.pack(params["layers"])}}.'
            )
        if packed.layout != self:
            raise ValueError(
                f"layers must be packed by the layout that comes with them; got layers packed by {packed.layout} for {self}. "
                'Give the layout that packed them, params["layers"].layout, or unpack them with it and pack them again.'
            )
        return packed.tree

    def in_packed_order(self, layers: PyTree) -> PyTree:
        """Returns leaves ``[num_layers, ...]`` as leaves ``[num_positions, ...]``, with zeros as padding."""
        _check_leading(layers, self.num_layers, "num_layers", self)
        if self.is_canonical:
            return layers
        order = self.packed_order
        real = order >= 0

        def pack(leaf: Any) -> Any:
            numpy = _numpy_of(leaf)
            taken = numpy.take(leaf, np.maximum(order, 0), axis=0)
            return numpy.where(
                real.reshape(-1, *(1,) * (leaf.ndim - 1)), taken, numpy.zeros((), leaf.dtype)
            )

        return jax.tree.map(pack, layers)

    def in_canonical_order(self, packed: PyTree) -> PyTree:
        """Returns leaves ``[num_positions, ...]`` as leaves ``[num_layers, ...]``, without the padding."""
        _check_leading(packed, self.num_positions, "num_positions", self)
        if self.is_canonical:
            return packed
        packed_order = self.packed_order
        order = np.argsort(packed_order, kind="stable")[np.sum(packed_order < 0) :]
        return jax.tree.map(lambda leaf: _numpy_of(leaf).take(leaf, order, axis=0), packed)

    def pack_params(self, params: PyTree) -> PyTree:
        """Returns a LayeredModel's params with their layers packed."""
        return params | {LAYERS: self.pack(params[LAYERS])}

    def unpack_params(self, packed: PyTree) -> PyTree:
        """Returns a LayeredModel's packed params in canonical order."""
        return packed | {LAYERS: self.unpack(packed[LAYERS])}


def _spread(num_layers: int, num_virtual_stages: int, end_layers: tuple[int, int]) -> list[int]:
    """The number of layers of each virtual stage, as equal as possible if embedding and head count as ``end_layers``."""
    least, more = divmod(num_layers + sum(end_layers), num_virtual_stages)
    counts = [least + (i < more) for i in range(num_virtual_stages)]
    counts[0] -= end_layers[0]
    counts[-1] -= end_layers[1]
    if min(end_layers) < 0 or min(counts) < 0:
        raise ValueError(
            "end_layers must be from 0 to the layers of the first and the last virtual stage; got "
            f"{tuple(end_layers)} for {num_layers} layers in {num_virtual_stages} virtual stages. Choose smaller ones, "
            "such as (1, 1)."
        )
    return counts


def _check_leading(layers: PyTree, size: int, name: str, layout: LayerLayout) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(layers):
        if leaf.shape[:1] != (size,):
            raise ValueError(
                f"layers must have the leading dim {name} of their layout; got shape {tuple(leaf.shape)} for "
                f"{jax.tree_util.keystr(path) or 'layers'}, {name}={size} of {layout}. Make a LayerLayout for these layers."
            )


def _numpy_of(leaf: Any) -> Any:
    """NumPy for arrays on the host, so that no device receives a complete array; otherwise ``jax.numpy``."""
    return np if isinstance(leaf, np.ndarray) else jnp


def fitting_layout(
    layout: LayerLayout | None, schedule: Schedule, params: PyTree
) -> tuple[LayerLayout, PyTree]:
    """Returns the layout of a model's layers, and the params with the shapes of layers in the model's order.

    Args:
        layout: The layout, which packed stacked layers; None: layers are in the model's order, and spread evenly.
        schedule: The schedule, which the layout must fit.
        params: The params, or their shapes.

    Raises:
        ValueError: The layout does not fit the schedule or the params.
    """
    num, is_packed = num_layers(params), layout is not None and is_stacked(params)
    layout = layout or LayerLayout(
        num, schedule.num_stages, schedule.num_chunks, schedule.placement
    )
    for name, own, asked in (
        ("num_stages", layout.num_stages, schedule.num_stages),
        ("num_chunks", layout.num_chunks, schedule.num_chunks),
        ("placement", layout.placement, schedule.placement),
        ("layers", layout.num_positions if is_packed else layout.num_layers, num),
    ):
        if own != asked:
            raise ValueError(
                f"a layout must fit the schedule and the packed params; got {name}={own} in the layout and {asked} in the run. "
                "Make the LayerLayout for this schedule, and pack params with it (LayerLayout.pack)."
            )
    in_order = (
        {LAYERS: jax.eval_shape(layout.in_canonical_order, params[LAYERS])} if is_packed else {}
    )
    return layout, params | in_order


def open_params(params: PyTree, layout: LayerLayout | None) -> PyTree:
    """Returns params with PackedLayers replaced by the tree that they hold; raises unless ``layout`` packed them.

    Args:
        params: The params of a LayeredModel, or a tree of their structure. Other trees and lists of layers are returned
            unchanged.
        layout: Their layout; None for layers in the model's order.
    """
    if layout is None:
        check_unpacked(
            params,
            "Or give the layout that packed them: jaxpar.Parallel(mesh, shardings, layout=layout), or "
            "value_and_grad(..., layout=layout) where that is given a mesh.",
        )
    if layout is None or not is_layered(params) or not is_stacked(params):
        return params
    return params | {LAYERS: layout.tree_of(params[LAYERS])}


def close_params(params: PyTree, layout: LayerLayout | None) -> PyTree:
    """Inverts ``open_params``, for its result or a tree of the same structure."""
    if layout is None or not is_layered(params) or not is_stacked(params):
        return params
    return params | {LAYERS: layout.as_packed(params[LAYERS])}
