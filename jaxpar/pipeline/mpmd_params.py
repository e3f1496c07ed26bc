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
from jax import Array, ShapeDtypeStruct, tree
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
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) > 1:
        raise ValueError(
            'executor="mpmd" drives all devices from one process; got a mesh with devices of processes '
            f'{sorted(processes)}. Use executor="spmd".'
        )


@lru_cache(maxsize=64)
def submeshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """Returns the mesh of each stage: the same axes, ``stage`` of size 1."""
    names = mesh.axis_names
    at = names.index(STAGE)
    meshes = []
    for devices in np.split(mesh.devices, mesh.shape[STAGE], axis=at):
        meshes.append(Mesh(devices, names, axis_types=mesh.axis_types))
    return tuple(meshes)


def without(spec: PartitionSpec, *axes: str) -> PartitionSpec:
    """Returns a spec without some axes."""
    entries = []
    for entry in spec:
        kept = [axis for axis in entry_axes(entry) if axis not in axes]
        if len(kept) > 1:
            entries.append(tuple(kept))
        else:
            entries.append(kept[0] if kept else None)
    return PartitionSpec(*entries)


def move(array: Any, sharding: NamedSharding) -> Array:
    """Returns an array from the host or any devices with the given sharding; XLA reshards it if the devices are the same."""
    is_placed = isinstance(array, Array) and array.committed
    if not is_placed or array.sharding.device_set != sharding.device_set:
        return jax.device_put(array, sharding)
    if array.sharding == sharding:
        return array
    return _mover(sharding)(array)


class RestSharding:
    """The sharding of an array at rest.

    Attributes:
        given: Its sharding on the mesh.
        spec: Its spec, without ``stage`` if another axis comes before it on the same dim.
        stage_dim: The dim that is sharded over ``stage``, or None.
    """

    def __init__(self, given: NamedSharding) -> None:
        mesh = given.mesh
        assert isinstance(mesh, Mesh), "an array at rest lies on devices"
        leads = all(STAGE not in entry_axes(entry)[1:] for entry in given.spec)
        self.given = given
        self.spec = given.spec if leads else without(given.spec, STAGE)
        self.stage_dim = None
        for dim, entry in enumerate(self.spec):
            if STAGE in entry_axes(entry):
                self.stage_dim = dim
        self._submeshes = submeshes(mesh)
        self._rest = NamedSharding(mesh, self.spec)

    def on(self, stage: int, *dropped: str) -> NamedSharding:
        """Returns its sharding on the devices of one stage, without the ``dropped`` axes."""
        spec = without(self.spec, STAGE, *dropped)
        return NamedSharding(self._submeshes[stage], spec)

    def like(self, stage: int, shape: tuple[int, ...], dtype: Any) -> ShapeDtypeStruct:
        """Returns an array on one stage, as a shape."""
        return ShapeDtypeStruct(shape, dtype, sharding=self.on(stage))

    def pieces(self, array: Any) -> Arrays:
        """Returns the piece of each stage, on its submesh, of an array from the host or any devices."""
        array = move(array, self._rest)
        shape = list(array.shape)
        if self.stage_dim is not None:
            shape[self.stage_dim] //= len(self._submeshes)
        shards = {}
        for shard in array.addressable_shards:
            shards[shard.device] = shard.data
        pieces = []
        for stage, mesh in enumerate(self._submeshes):
            own = [shards[device] for device in mesh.devices.flat]
            piece = _of_shards(shape, self.on(stage), own)
            pieces.append(piece)
        return pieces

    def join(self, pieces: Sequence[Array]) -> Array:
        """Returns the array at rest from its pieces, each on its submesh."""
        shape = list(pieces[0].shape)
        if self.stage_dim is not None:
            shape[self.stage_dim] *= len(pieces)
        shards = []
        for piece in pieces:
            # JAX orders them by device.
            shards += [shard.data for shard in piece.addressable_shards]
        joined = _of_shards(shape, self._rest, shards)
        return move(joined, self.given)

    def gather(self, array: Any, stage: int) -> Array:
        """Returns the complete array on one stage, replicated over ``data``."""
        pieces = self.pieces(array)
        whole = self.on(stage, DATA)
        if self.stage_dim is None:
            return move(pieces[stage], whole)
        here = jax.device_put(pieces, self.on(stage))
        return _joiner(self.stage_dim, whole)(here)

    def scatter(self, array: Array) -> Array:
        """Returns the array at rest from a complete array on one stage, with its sharding there (``on``)."""
        count = len(self._submeshes)
        pieces = [array] * count
        if self.stage_dim is not None:
            cut = _cutter(self.stage_dim, count, array.sharding)
            pieces = cut(array)
        targets = [self.on(stage) for stage in range(count)]
        return self.join(jax.device_put(pieces, targets))


# Jitted functions are cached, so that later steps do not recompile them.


@lru_cache(maxsize=4096)
def _mover(sharding: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


@lru_cache(maxsize=4096)
def _joiner(dim: int, sharding: NamedSharding) -> Callable[[Arrays], Array]:
    join = lambda pieces: jnp.concatenate(pieces, axis=dim)
    return jax.jit(join, out_shardings=sharding)


@lru_cache(maxsize=4096)
def _cutter(dim: int, count: int, sharding: Sharding) -> Callable[[Array], Arrays]:
    cut = lambda array: jnp.split(array, count, axis=dim)
    return jax.jit(cut, out_shardings=[sharding] * count)


def _of_shards(shape: list[int], sharding: NamedSharding, shards: Arrays) -> Array:
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)


class StackedLayers:
    """Layers stacked along a leading dim; on a stage, arrays ``[positions, ...]``."""

    def __init__(
        self,
        layers: PyTree,
        mesh: Mesh,
        layout: LayerLayout,
        *,
        is_packed: bool,
    ) -> None:
        leaves = tree.leaves(layers)
        self._tree = tree.structure(only_trained(layers))
        self._are_on_mesh = all(_is_on(leaf, mesh) for leaf in leaves)
        self._layout = None if is_packed or layout.is_canonical else layout
        self._is_layer = _by_stage(layout) >= 0
        self._positions = self._is_layer.shape[1]

        divides = is_packed or layout.num_layers % layout.num_stages == 0
        default = (STAGE,) if divides else ()
        given, at_rest = [], []
        for leaf in leaves:
            sharding = _sharding(leaf, mesh, default)
            others = without(sharding.spec, STAGE)[1:]
            packed = PartitionSpec(STAGE, *others)
            given.append(sharding)
            at_rest.append(NamedSharding(mesh, packed))
        packed_specs = [sharding.spec for sharding in at_rest]
        self.shards = ParamShards.of_layers(packed_specs, mesh.shape[TENSOR])
        self._at_rest = [RestSharding(sharding) for sharding in at_rest]
        self._pack = jax.jit(layout.in_packed_order, out_shardings=at_rest)

        own = trained_indices(layers)
        self._own_at_rest = [self._at_rest[i] for i in own]
        self._own_given = [given[i] for i in own]
        self._unpack = jax.jit(layout.in_canonical_order, out_shardings=self._own_given)

        own_types = [jax.typeof(leaves[i]) for i in own]
        self.like, self.like_each = [], []
        for stage, is_layer in enumerate(self._is_layer):
            like = self._like_on(stage, own_types)
            one_layer = [_like_one(leaf) for leaf in like]
            self.like.append(like)
            self.like_each.append([one_layer] * int(is_layer.sum()))

    def _like_on(self, stage: int, own_types: Arrays) -> Arrays:
        like = []
        for leaf, rest in zip(own_types, self._own_at_rest, strict=True):
            shape = (self._positions, *leaf.shape[1:])
            like.append(rest.like(stage, shape, leaf.dtype))
        return like

    def enter(self, layers: PyTree) -> list[Arrays]:
        """Returns each stage's layers, on the stage."""
        leaves = tree.leaves(layers)
        if self._layout is not None:
            pack = self._pack if self._are_on_mesh else self._layout.in_packed_order
            leaves = pack(leaves)
        by_stage = [[] for _ in self.like]
        for leaf, rest in zip(leaves, self._at_rest, strict=True):
            for stage, piece in enumerate(rest.pieces(leaf)):
                moved = move(piece, rest.on(stage, DATA))
                by_stage[stage].append(moved)
        return by_stage

    def split(self, stacked: Arrays, stage: int) -> list[Arrays]:
        """Returns the arrays of each layer of a stage, without padding."""
        layers = []
        for position in np.flatnonzero(self._is_layer[stage]):
            layers.append([leaf[position] for leaf in stacked])
        return layers

    def stack(self, sums: list[Arrays], stage: int) -> Arrays:
        """Returns the gradients of the layers of a stage stacked, with zeros as padding."""
        padding = []
        for leaf in self.like[stage]:
            zeros = jnp.zeros(leaf.shape[1:], wide_dtype(leaf.dtype))
            padding.append(zeros)
        each = iter(sums)
        by_position = []
        for is_layer in self._is_layer[stage]:
            by_position.append(next(each) if is_layer else padding)
        by_leaf = zip(*by_position, strict=True)
        return [jnp.stack(leaves) for leaves in by_leaf]

    def leave(self, grads: Sequence[Arrays]) -> PyTree:
        """Returns the gradients of layers, from those of each stage."""
        leaves = []
        by_leaf = zip(*grads, strict=True)
        for rest, pieces in zip(self._own_at_rest, by_leaf, strict=True):
            leaves.append(rest.join(pieces))
        if self._layout is not None:
            leaves = self._unpack(leaves)
        else:
            leaves = list(map(move, leaves, self._own_given))
        return tree.unflatten(self._tree, leaves)


class ListedLayers:
    """A list of layers that may differ; on a stage, a list of arrays for each layer."""

    def __init__(self, layers: list[PyTree], mesh: Mesh, layout: LayerLayout) -> None:
        self._each = [OnOneStage(layer, mesh) for layer in layers]
        self.shards = [layer.shards for layer in self._each]
        self._by_stage = []
        self.like = self.like_each = []
        for stage, order in enumerate(_by_stage(layout).tolist()):
            own = [layer for layer in order if layer >= 0]
            self._by_stage.append(own)
            self.like.append([self._each[i].like_trained(stage) for i in own])

    def enter(self, layers: list[PyTree]) -> list[list[Arrays]]:
        """Returns each stage's layers, on the stage."""
        by_stage = []
        for stage, own in enumerate(self._by_stage):
            entered = []
            for i in own:
                leaves = self._each[i].enter(layers[i], None, stage)
                entered.append([*leaves.values()])
            by_stage.append(entered)
        return by_stage

    def split(self, layers: list[Arrays], stage: int) -> list[Arrays]:
        """Returns the arrays of each layer of a stage."""
        return layers

    def stack(self, sums: list[Arrays], stage: int) -> list[Arrays]:
        """Returns the gradients of the layers of a stage, which stay lists."""
        return sums

    def leave(self, grads: Sequence[list[Arrays]]) -> list[PyTree]:
        """Returns the gradients of layers, from those of each stage."""
        left: list[Any] = [None] * len(self._each)
        for own, layers in zip(self._by_stage, grads, strict=True):
            for i, arrays in zip(own, layers, strict=True):
                layer = self._each[i]
                by_number = zip(layer.trained, arrays, strict=True)
                left[i] = layer.leave(dict(by_number))
        return left


class OnOneStage:
    """A tree of params of which each leaf is used on one stage: outer params, or one of a list of layers.

    Leaves are given and taken by their numbers, in the order of the tree.

    Attributes:
        trained: The numbers of the leaves that are trained.
        shards: How the leaves are sharded over ``tensor``.
    """

    def __init__(self, params: PyTree, mesh: Mesh) -> None:
        leaves = tree.leaves(params)
        self._tree = tree.structure(only_trained(params))
        self.trained = trained_indices(params)
        self._shapes = [jax.typeof(leaf) for leaf in leaves]
        self._at_rest = [_spread(leaf, mesh) for leaf in leaves]
        specs = [rest.given.spec for rest in self._at_rest]
        cuts = tuple(cut_of(spec, TENSOR) for spec in specs)
        self.shards = ParamShards(cuts, mesh.shape[TENSOR])

    def like(self, numbers: Sequence[int], stage: int) -> dict[int, Any]:
        """Returns the shapes, dtypes and shardings of some leaves on a stage."""
        like = {}
        for i in numbers:
            leaf = self._shapes[i]
            like[i] = self._at_rest[i].like(stage, leaf.shape, leaf.dtype)
        return like

    def like_trained(self, stage: int) -> Arrays:
        """Returns those of the leaves that are trained, in their order."""
        return [*self.like(self.trained, stage).values()]

    def enter(
        self,
        params: PyTree,
        numbers: Sequence[int] | None,
        stage: int,
    ) -> dict[int, Any]:
        """Returns some leaves, or all, on a stage."""
        leaves = tree.leaves(params)
        entered = {}
        for i in range(len(leaves)) if numbers is None else numbers:
            entered[i] = self._at_rest[i].gather(leaves[i], stage)
        return entered

    def leave(self, grads: Mapping[int, Array]) -> PyTree:
        """Returns the gradients at rest, from those of some leaves on their stages; the gradients of the others are zero."""
        at_rest = []
        for i in self.trained:
            rest = self._at_rest[i]
            leaf = self._shapes[i]
            if i in grads:
                at_rest.append(rest.scatter(grads[i]))
            else:
                zeros = jnp.zeros(leaf.shape, leaf.dtype, device=rest.given)
                at_rest.append(zeros)
        return tree.unflatten(self._tree, at_rest)


def _spread(leaf: Any, mesh: Mesh) -> RestSharding:
    """The sharding at rest of a leaf that one stage uses, by default sharded over all stages."""
    dim = outer_stage_dim(jnp.shape(leaf), mesh.shape[STAGE])
    default = () if dim is None else (*[None] * dim, STAGE)
    return RestSharding(_sharding(leaf, mesh, default))


def _sharding(leaf: Any, mesh: Mesh, default: tuple) -> NamedSharding:
    if _is_on(leaf, mesh):
        return leaf.sharding
    return NamedSharding(mesh, PartitionSpec(*default))


def _by_stage(layout: LayerLayout) -> np.ndarray:
    """Returns the layer at each position of each stage, ``[stages, positions]``."""
    return layout.packed_order.reshape(layout.num_stages, -1)


def _is_on(leaf: Any, mesh: Mesh) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def _like_one(stacked: ShapeDtypeStruct) -> ShapeDtypeStruct:
    """One layer of stacked layers."""
    assert isinstance(stacked.sharding, NamedSharding)
    spec = PartitionSpec(*stacked.sharding.spec[1:])
    sharding = NamedSharding(stacked.sharding.mesh, spec)
    return ShapeDtypeStruct(stacked.shape[1:], stacked.dtype, sharding=sharding)
