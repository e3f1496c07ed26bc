"""Arrays of the whole mesh as arrays on the stages' own devices, and back. Nothing here knows about layers or schedules.

    mesh [data, stage, tensor]  =  S submeshes [data, 1, tensor], one a stage

An array whose dim lies over ``stage`` is already in pieces, one on each submesh, so that taking it apart and joining it
again moves nothing. An array that one stage is to have whole is gathered there from the pieces, device to device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.mesh import DATA, STAGE


def submeshes(mesh: Mesh) -> list[Mesh]:
    """Returns the mesh of each stage: the same three axes, ``stage`` of size 1."""
    stages = range(mesh.shape[STAGE])
    return [Mesh(mesh.devices[:, s : s + 1], mesh.axis_names, axis_types=mesh.axis_types) for s in stages]


def without(spec: PartitionSpec, *axes: str) -> PartitionSpec:
    """Returns a spec that leaves out some axes."""

    def left(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        kept = tuple(axis for axis in _axes(entry) if axis not in axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    return PartitionSpec(*map(left, spec))


def move(array: PyTree, sharding: NamedSharding) -> jax.Array:
    """Returns an array with another sharding. On the devices that have it XLA moves it; else it is sent."""
    if isinstance(array, jax.Array) and array.committed and array.sharding.device_set == sharding.device_set:
        return array if array.sharding == sharding else _mover(sharding)(array)
    return jax.device_put(array, sharding)


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class Home:
    """Where an array lies at rest, of whose sharding ``stage`` is the first axis of its dim, or no axis at all.

    Attributes:
        mesh: The whole mesh.
        spec: Its sharding there.
    """

    mesh: Mesh
    spec: PartitionSpec

    @classmethod
    def of(cls, sharding: NamedSharding) -> "Home":
        """Returns the home nearest to a sharding: itself, or without ``stage`` where another axis cuts its dim first."""
        leads = all(STAGE not in _axes(entry)[1:] for entry in sharding.spec)
        return cls(sharding.mesh, sharding.spec if leads else without(sharding.spec, STAGE))

    @property
    def sharding(self) -> NamedSharding:
        """The sharding at rest."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def stage_dim(self) -> int | None:
        """The dim that lies over ``stage``."""
        return next((dim for dim, entry in enumerate(self.spec) if STAGE in _axes(entry)), None)

    @cached_property
    def submeshes(self) -> list[Mesh]:
        """The stages' meshes."""
        return submeshes(self.mesh)

    def on(self, stage: int, *dropped: str) -> NamedSharding:
        """The sharding, on a stage, of the stage's piece, or of the whole; without more axes if asked."""
        return NamedSharding(self.submeshes[stage], without(self.spec, STAGE, *dropped))

    def pieces(self, array: jax.Array) -> list[jax.Array]:
        """Returns the piece of each stage, on its submesh. Nothing moves."""
        dim = self.stage_dim
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        shape = list(array.shape)
        if dim is not None:
            shape[dim] //= len(self.submeshes)
        return [
            jax.make_array_from_single_device_arrays(
                tuple(shape), self.on(stage), [by_device[device] for device in mesh.devices.flat]
            )
            for stage, mesh in enumerate(self.submeshes)
        ]

    def join(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Returns the array that has these pieces, each on its submesh. Nothing moves."""
        dim = self.stage_dim
        shape = list(pieces[0].shape)
        if dim is not None:
            shape[dim] *= len(pieces)
        shards = {shard.device: shard.data for piece in pieces for shard in piece.addressable_shards}
        arrays = [shards[device] for device in self.mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding, arrays)

    def gather(self, array: jax.Array, stage: int) -> jax.Array:
        """Returns the whole array on one stage, whole over ``data`` too."""
        pieces = self.pieces(array)
        if self.stage_dim is None:
            return move(pieces[stage], self.on(stage, DATA))
        sent = [jax.device_put(piece, self.on(stage)) for piece in pieces]
        return _joiner(self.stage_dim, self.on(stage, DATA))(sent)

    def scatter(self, array: jax.Array, stage: int) -> jax.Array:
        """Returns the array at rest that one stage has whole, cut over ``data`` as at rest (``on(stage)``)."""
        count = len(self.submeshes)
        if self.stage_dim is None:
            return self.join([jax.device_put(array, self.on(s)) for s in range(count)])
        pieces = _cutter(self.stage_dim, count, self.on(stage))(array)
        return self.join([jax.device_put(piece, self.on(s)) for s, piece in enumerate(pieces)])


# Jitted functions are kept by what they do, so that no step compiles what one before it did.


@lru_cache(maxsize=4096)
def _mover(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


@lru_cache(maxsize=4096)
def _joiner(dim: int, sharding: NamedSharding) -> Callable[[Sequence[jax.Array]], jax.Array]:
    return jax.jit(lambda pieces: jnp.concatenate(pieces, axis=dim), out_shardings=sharding)


@lru_cache(maxsize=4096)
def _cutter(dim: int, count: int, sharding: NamedSharding) -> Callable[[jax.Array], list[jax.Array]]:
    return jax.jit(lambda array: jnp.split(array, count, axis=dim), out_shardings=[sharding] * count)
