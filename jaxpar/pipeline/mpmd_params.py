"""Moves params from their shardings at rest to the stages that use them, and gradients back.

    stacked layers    each stage has its own; none moves between stages if params are packed or packed order is canonical
    a list of layers  each gathered on its stage
    outer             the params that an end of the model reads, gathered on the stage of that end

A leaf that is not on the mesh (but on the host or one device) is first placed as by ``shardings_from_paths``, without
``tensor``. ``shards`` says how the params of a layer are sharded over ``tensor``. ``like`` holds the shapes and dtypes of the
trained params on each stage, with the shardings of their gradients there. Frozen params are moved to the stages; they have no
gradients to move back.

Ops take the params of each layer as arrays of its own: ``split`` and ``stack`` are the functions, to be jitted, from what a
stage holds to layers and back. ``like_each`` is as ``like``, for each layer.

``RestSharding`` and ``submeshes`` convert arrays, independent of layers and schedules:

    mesh [data, stage, tensor]  =  S submeshes [data, 1, tensor], one per stage

An array with a dim sharded over ``stage`` already has one piece on each submesh, so splitting and joining it moves nothing. An
array that one stage needs completely is gathered there from the pieces, device to device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from jaxpar.backward.partition import ParamShards
from jaxpar.dtypes import wide_dtype
from jaxpar.layered_model import outer_stage_dim
from jaxpar.mesh import DATA, STAGE, TENSOR, cut_of, entry_axes
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.trainable import only_trained, trained_indices

Arrays = list[Any]


def check_one_process(mesh: Mesh) -> None:
    """Raises for a mesh with devices of other processes."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    if len(processes) > 1:
        raise ValueError(
            'executor="mpmd" drives all devices from one process; got a mesh with devices of processes '
            f'{processes}. Use executor="spmd".'
        )


@lru_cache(maxsize=64)
def submeshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """Returns the mesh of each stage: the same axes, ``stage`` of size 1."""
    stages, at = range(mesh.shape[STAGE]), mesh.axis_names.index(STAGE)
    return tuple(
        Mesh(mesh.devices.take([s], at), mesh.axis_names, axis_types=mesh.axis_types)
        for s in stages
    )


def without(spec: PartitionSpec, *axes: str) -> PartitionSpec:
    """Returns a spec without some axes."""

    def left(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        kept = tuple(axis for axis in entry_axes(entry) if axis not in axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    return PartitionSpec(*map(left, spec))


def move(array: Any, sharding: NamedSharding) -> jax.Array:
    """Returns an array from the host or any devices with the given sharding; XLA reshards it if the devices are the same."""
    if (
        isinstance(array, jax.Array)
        and array.committed
        and array.sharding.device_set == sharding.device_set
    ):
        return array if array.sharding == sharding else _mover(sharding)(array)
    return jax.device_put(array, sharding)


class RestSharding:
    """The sharding of an array at rest.

    Attributes:
        given: Its sharding on the mesh.
        spec: Its spec, without ``stage`` if another axis comes before it on the same dim.
        stage_dim: The dim that is sharded over ``stage``, or None.
    """

    def __init__(self, given: NamedSharding) -> None:
        leads = all(STAGE not in entry_axes(entry)[1:] for entry in given.spec)
        self.given = given
        self.spec = given.spec if leads else without(given.spec, STAGE)
        self.stage_dim = next(
            (dim for dim, entry in enumerate(self.spec) if STAGE in entry_axes(entry)), None
        )
        assert isinstance(given.mesh, Mesh), "an array at rest lies on devices"
        self._submeshes = submeshes(given.mesh)
        self._rest = NamedSharding(given.mesh, self.spec)

    def on(self, stage: int, *dropped: str) -> NamedSharding:
        """Returns its sharding on the devices of one stage, without the ``dropped`` axes."""
        return NamedSharding(self._submeshes[stage], without(self.spec, STAGE, *dropped))

    def pieces(self, array: Any) -> list[jax.Array]:
        """Returns the piece of each stage, on its submesh, of an array from the host or any devices."""
        array = move(array, self._rest)
        shape = list(array.shape)
        if self.stage_dim is not None:
            shape[self.stage_dim] //= len(self._submeshes)
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        return [
            jax.make_array_from_single_device_arrays(
                tuple(shape), self.on(s), [shards[d] for d in mesh.devices.flat]
            )
            for s, mesh in enumerate(self._submeshes)
        ]

    def join(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Returns the array at rest from its pieces, each on its submesh."""
        shape = list(pieces[0].shape)
        if self.stage_dim is not None:
            shape[self.stage_dim] *= len(pieces)
        arrays = [
            shard.data for piece in pieces for shard in piece.addressable_shards
        ]  # JAX orders them by device
        return move(
            jax.make_array_from_single_device_arrays(tuple(shape), self._rest, arrays), self.given
        )

    def gather(self, array: Any, stage: int) -> jax.Array:
        """Returns the complete array on one stage, replicated over ``data``."""
        pieces, whole = self.pieces(array), self.on(stage, DATA)
        if self.stage_dim is None:
            return move(pieces[stage], whole)
        return _joiner(self.stage_dim, whole)(
            [jax.device_put(piece, self.on(stage)) for piece in pieces]
        )

    def scatter(self, array: jax.Array) -> jax.Array:
        """Returns the array at rest from a complete array on one stage, with its sharding there (``on``)."""
        count = len(self._submeshes)
        pieces = [array] * count
        if self.stage_dim is not None:
            pieces = _cutter(self.stage_dim, count, array.sharding)(array)
        return self.join([jax.device_put(piece, self.on(s)) for s, piece in enumerate(pieces)])


# Jitted functions are cached, so that later steps do not recompile them.


@lru_cache(maxsize=4096)
def _mover(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


@lru_cache(maxsize=4096)
def _joiner(dim: int, sharding: NamedSharding) -> Callable[[Sequence[jax.Array]], jax.Array]:
    return jax.jit(lambda pieces: jnp.concatenate(pieces, axis=dim), out_shardings=sharding)


@lru_cache(maxsize=4096)
def _cutter(dim: int, count: int, sharding: Sharding) -> Callable[[jax.Array], list[jax.Array]]:
    return jax.jit(
        lambda array: jnp.split(array, count, axis=dim), out_shardings=[sharding] * count
    )


class StackedLayers:
    """Layers stacked along a leading dim; on a stage, arrays ``[positions, ...]``."""

    def __init__(self, layers: PyTree, mesh: Mesh, layout: LayerLayout, *, is_packed: bool) -> None:
        leaves, self._tree = jax.tree.leaves(layers), jax.tree.structure(only_trained(layers))
        own = trained_indices(layers)
        self._layout = None if is_packed or layout.is_canonical else layout
        self._stages = range(layout.num_stages)
        divides = is_packed or layout.num_layers % layout.num_stages == 0
        self._given = [_sharding(leaf, mesh, (STAGE,) if divides else ()) for leaf in leaves]
        packed = [PartitionSpec(STAGE, *without(s.spec, STAGE)[1:]) for s in self._given]
        self.shards = ParamShards.of_layers(packed, mesh.shape[TENSOR])
        self._at_rest = [RestSharding(NamedSharding(mesh, spec)) for spec in packed]
        self._pack = jax.jit(
            layout.in_packed_order, out_shardings=[rest.given for rest in self._at_rest]
        )
        self._own = [(self._at_rest[i], self._given[i]) for i in own]
        self._unpack = jax.jit(
            layout.in_canonical_order, out_shardings=[given for _, given in self._own]
        )
        self._are_on_mesh = all(_is_on(leaf, mesh) for leaf in leaves)
        self._is_layer = layout.packed_order.reshape(layout.num_stages, -1) >= 0
        positions = self._is_layer.shape[1]
        shapes = [
            jax.ShapeDtypeStruct((positions, *leaf.shape[1:]), leaf.dtype)
            for leaf in map(jax.typeof, leaves)
        ]
        self.like = [
            [_like(shapes[i], self._at_rest[i], stage) for i in own] for stage in self._stages
        ]
        self.like_each = [
            [[_like_one(leaf) for leaf in like]] * int(count)
            for like, count in zip(self.like, self._is_layer.sum(axis=1), strict=True)
        ]

    def enter(self, layers: PyTree) -> list[Arrays]:
        """Returns each stage's layers, on the stage."""
        leaves = jax.tree.leaves(layers)
        if self._layout is not None:
            leaves = (
                self._pack(leaves) if self._are_on_mesh else self._layout.in_packed_order(leaves)
            )
        pieces = [rest.pieces(leaf) for leaf, rest in zip(leaves, self._at_rest, strict=True)]
        return [
            [
                move(piece[stage], rest.on(stage, DATA))
                for piece, rest in zip(pieces, self._at_rest, strict=True)
            ]
            for stage in self._stages
        ]

    def split(self, stacked: Arrays, stage: int) -> list[Arrays]:
        """Returns the arrays of each layer of a stage, without padding."""
        return [
            [leaf[position] for leaf in stacked]
            for position in np.flatnonzero(self._is_layer[stage])
        ]

    def stack(self, sums: list[Arrays], stage: int) -> Arrays:
        """Returns the gradients of the layers of a stage stacked, with zeros as padding."""
        padding = [jnp.zeros(leaf.shape[1:], wide_dtype(leaf.dtype)) for leaf in self.like[stage]]
        each = iter(sums)
        by_position = [next(each) if is_layer else padding for is_layer in self._is_layer[stage]]
        return [jnp.stack(leaves) for leaves in zip(*by_position, strict=True)]

    def leave(self, grads: Sequence[Arrays]) -> PyTree:
        """Returns the gradients of layers, from those of each stage."""
        leaves = [rest.join(pieces) for (rest, _), *pieces in zip(self._own, *grads, strict=True)]
        if self._layout is not None:
            leaves = self._unpack(leaves)
        else:
            leaves = [move(leaf, given) for leaf, (_, given) in zip(leaves, self._own, strict=True)]
        return jax.tree.unflatten(self._tree, leaves)


class ListedLayers:
    """A list of layers that may differ; on a stage, a list of arrays for each layer."""

    def __init__(self, layers: list[PyTree], mesh: Mesh, layout: LayerLayout) -> None:
        self._each = [OnOneStage(layer, mesh) for layer in layers]
        self.shards = [layer.shards for layer in self._each]
        order = layout.packed_order.reshape(layout.num_stages, -1).tolist()
        self._by_stage = [[layer for layer in stage if layer >= 0] for stage in order]
        self.like = self.like_each = [
            [list(self._each[i].like(self._each[i].trained, stage).values()) for i in own]
            for stage, own in enumerate(self._by_stage)
        ]

    def enter(self, layers: list[PyTree]) -> list[list[Arrays]]:
        """Returns each stage's layers, on the stage."""
        return [
            [list(self._each[i].enter(layers[i], None, stage).values()) for i in own]
            for stage, own in enumerate(self._by_stage)
        ]

    def split(self, layers: list[Arrays], stage: int) -> list[Arrays]:
        """Returns the arrays of each layer of a stage."""
        return layers

    def stack(self, sums: list[Arrays], stage: int) -> list[Arrays]:
        """Returns the gradients of the layers of a stage, which stay lists."""
        return sums

    def leave(self, grads: Sequence[list[Arrays]]) -> list[PyTree]:
        """Returns the gradients of layers, from those of each stage."""
        each = {
            i: layer
            for own, layers in zip(self._by_stage, grads, strict=True)
            for i, layer in zip(own, layers, strict=True)
        }
        return [
            layer.leave(dict(zip(layer.trained, each[i], strict=True)))
            for i, layer in enumerate(self._each)
        ]


class OnOneStage:
    """A tree of params of which each leaf is used on one stage: outer params, or one of a list of layers.

    Leaves are given and taken by their numbers, in the order of the tree.

    Attributes:
        trained: The numbers of the leaves that are trained.
        shards: How the leaves are sharded over ``tensor``.
    """

    def __init__(self, params: PyTree, mesh: Mesh) -> None:
        leaves, self._tree = jax.tree.leaves(params), jax.tree.structure(only_trained(params))
        self.trained = trained_indices(params)
        self._shapes = [jax.typeof(leaf) for leaf in leaves]
        self._at_rest = [_spread(leaf, mesh) for leaf in leaves]
        cuts = tuple(cut_of(rest.given.spec, TENSOR) for rest in self._at_rest)
        self.shards = ParamShards(cuts, mesh.shape[TENSOR])

    def like(self, numbers: Sequence[int], stage: int) -> dict[int, Any]:
        """Returns the shapes, dtypes and shardings of some leaves on a stage."""
        return {i: _like(self._shapes[i], self._at_rest[i], stage) for i in numbers}

    def enter(self, params: PyTree, numbers: Sequence[int] | None, stage: int) -> dict[int, Any]:
        """Returns some leaves, or all, on a stage."""
        leaves = jax.tree.leaves(params)
        numbers = range(len(leaves)) if numbers is None else numbers
        return {i: self._at_rest[i].gather(leaves[i], stage) for i in numbers}

    def leave(self, grads: Mapping[int, jax.Array]) -> PyTree:
        """Returns the gradients at rest, from those of some leaves on their stages; the gradients of the others are zero."""

        def grad_of(i: int) -> jax.Array:
            rest, shape = self._at_rest[i], self._shapes[i]
            return (
                rest.scatter(grads[i])
                if i in grads
                else jnp.zeros(shape.shape, shape.dtype, device=rest.given)
            )

        return jax.tree.unflatten(self._tree, [grad_of(i) for i in self.trained])


def _spread(leaf: Any, mesh: Mesh) -> RestSharding:
    """The sharding at rest of a leaf that one stage uses, by default sharded over all stages."""
    dim = outer_stage_dim(jnp.shape(leaf), mesh.shape[STAGE])
    return RestSharding(_sharding(leaf, mesh, () if dim is None else (*(None,) * dim, STAGE)))


def _sharding(leaf: Any, mesh: Mesh, default: tuple) -> NamedSharding:
    return leaf.sharding if _is_on(leaf, mesh) else NamedSharding(mesh, PartitionSpec(*default))


def _is_on(leaf: Any, mesh: Mesh) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def _like(shape: Any, rest: RestSharding, stage: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=rest.on(stage))


def _like_one(stacked: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """One layer of stacked layers."""
    assert isinstance(stacked.sharding, NamedSharding)
    sharding = NamedSharding(stacked.sharding.mesh, PartitionSpec(*stacked.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype, sharding=sharding)
