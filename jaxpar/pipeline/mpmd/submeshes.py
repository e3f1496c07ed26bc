"""Converts arrays on the mesh to arrays on the devices of each stage, and back, independent of layers and schedules.

    mesh [data, stage, tensor]  =  S submeshes [data, 1, tensor], one per stage

An array with a dim sharded over ``stage`` already has one piece on each submesh, so splitting and joining it moves nothing. An
array that one stage needs completely is gathered there from the pieces, device to device.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.mesh import DATA, STAGE, entry_axes


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
    """Returns the mesh of each stage: the same three axes, ``stage`` of size 1."""
    stages = range(mesh.shape[STAGE])
    return tuple(Mesh(mesh.devices[:, s : s + 1], mesh.axis_names, axis_types=mesh.axis_types) for s in stages)


def without(spec: PartitionSpec, *axes: str) -> PartitionSpec:
    """Returns a spec without some axes."""

    def left(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        kept = tuple(axis for axis in entry_axes(entry) if axis not in axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    return PartitionSpec(*map(left, spec))


def move(array: Any, sharding: NamedSharding) -> jax.Array:
    """Returns an array from the host or any devices with the given sharding; XLA reshards it if the devices are the same."""
    if isinstance(array, jax.Array) and array.committed and array.sharding.device_set == sharding.device_set:
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
        self.stage_dim = next((dim for dim, entry in enumerate(self.spec) if STAGE in entry_axes(entry)), None)
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
            jax.make_array_from_single_device_arrays(tuple(shape), self.on(s), [shards[d] for d in mesh.devices.flat])
            for s, mesh in enumerate(self._submeshes)
        ]

    def join(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Returns the array at rest from its pieces, each on its submesh."""
        shape = list(pieces[0].shape)
        if self.stage_dim is not None:
            shape[self.stage_dim] *= len(pieces)
        arrays = [shard.data for piece in pieces for shard in piece.addressable_shards]  # JAX orders them by device
        return move(jax.make_array_from_single_device_arrays(tuple(shape), self._rest, arrays), self.given)

    def gather(self, array: Any, stage: int) -> jax.Array:
        """Returns the complete array on one stage, replicated over ``data``."""
        pieces, whole = self.pieces(array), self.on(stage, DATA)
        if self.stage_dim is None:
            return move(pieces[stage], whole)
        return _joiner(self.stage_dim, whole)([jax.device_put(piece, self.on(stage)) for piece in pieces])

    def scatter(self, array: jax.Array, stage: int) -> jax.Array:
        """Returns the array at rest from a complete array on one stage, with the sharding ``on(stage)``."""
        count = len(self._submeshes)
        pieces = [array] * count
        if self.stage_dim is not None:
            pieces = _cutter(self.stage_dim, count, self.on(stage))(array)
        return self.join([jax.device_put(piece, self.on(s)) for s, piece in enumerate(pieces)])


# Jitted functions are cached, so that later steps do not recompile them.


@lru_cache(maxsize=4096)
def _mover(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


@lru_cache(maxsize=4096)
def _joiner(dim: int, sharding: NamedSharding) -> Callable[[Sequence[jax.Array]], jax.Array]:
    return jax.jit(lambda pieces: jnp.concatenate(pieces, axis=dim), out_shardings=sharding)


@lru_cache(maxsize=4096)
def _cutter(dim: int, count: int, sharding: NamedSharding) -> Callable[[jax.Array], list[jax.Array]]:
    return jax.jit(lambda array: jnp.split(array, count, axis=dim), out_shardings=[sharding] * count)
