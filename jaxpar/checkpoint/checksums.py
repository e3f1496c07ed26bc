"""The checksum of an array, equal on any mesh and on the host, and the comparison of its replicas.

Each 32-bit word of an array is mixed with its index in the complete array, and the mixed words are
added modulo 2**32. The sum does not depend on the order of addition, so each device adds the words
of its shard, and these sums are added; a reader on the host adds those of one part of the array
after another. The mixing is one to one, so changing a single word always changes the sum.

JAX and SPMD programs assume that replicas are equal and never check it: after a fault of a device
or a program they diverge unnoticed, and a checkpoint would hold a mixture of them. Arrays that
ZeRO shards have a single copy, so there is nothing to compare them with.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.mesh import entry_axes
from jaxpar.sharding import path_string, replicated

HOST_WORDS = 1 << 17  # that the host mixes at once, so that they stay in its cache


@dataclass(frozen=True)
class Checked:
    """The result of checking an array.

    Attributes:
        checksum: The checksum of its values, from 0 to 2**32 - 1.
        is_diverged: Whether devices that should hold the same values of it do not.
        is_finite: Whether it holds no NaN and no infinity.
    """

    checksum: int
    is_diverged: bool
    is_finite: bool


def check_arrays(tree: PyTree, mesh: Mesh) -> dict[str, Checked]:
    """Returns the checksum of each array of a tree, by its path, and whether its replicas agree; every process must call it.

    **Collectives**: one all-reduce of a few numbers per array.

    Args:
        tree: Arrays with NamedShardings on ``mesh``.
        mesh: The mesh.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = jax.device_get([_check(leaf, _spec(leaf), mesh) for _, leaf in leaves])
    return {
        path_string(path): Checked(int(checksum), bool(differ), not broken)
        for (path, _), (checksum, differ, broken) in zip(leaves, found, strict=True)
    }


@partial(jax.jit, static_argnames=("spec", "mesh"))
def _check(array: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Returns what ``_check_one`` does, in a program of its own, which arrays of one shape, dtype and sharding share."""
    # Replicas are compared here, so check_vma, which assumes that they are equal, must be off.
    check = partial(_check_one, spec=spec, mesh=mesh)
    return jax.shard_map(check, mesh=mesh, in_specs=spec, out_specs=replicated(), check_vma=False)(
        array
    )


def _check_one(part: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Returns uint32 ``[3]``: the checksum, whether replicas differ, whether an element is not finite."""
    cut, replicas = _axes(spec, mesh)
    local = _local_sum(part, spec, mesh)
    differ = (
        jax.lax.pmax(local, replicas) != jax.lax.pmin(local, replicas)
        if replicas
        else jnp.bool_(False)
    )
    exact = not jnp.issubdtype(part.dtype, jnp.inexact)
    broken = jnp.bool_(False) if exact else jnp.any(~jnp.isfinite(part))
    flags = jax.lax.pmax(jnp.stack([differ, broken]).astype(jnp.uint32), mesh.axis_names)
    return jnp.concatenate([(jax.lax.psum(local, cut) if cut else local)[None], flags])


def _spec(leaf: jax.Array) -> PartitionSpec:
    """Returns an array's PartitionSpec with an entry for each dim."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding), "states have no other shardings"
    spec = sharding.spec
    return PartitionSpec(*spec, *(None,) * (leaf.ndim - len(spec)))


def _axes(
    spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes over which an array is sharded, and those over which it is replicated."""
    cut = tuple(axis for entry in spec for axis in entry_axes(entry))
    return cut, tuple(axis for axis in mesh.axis_names if axis not in cut)


def _local_sum(part: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Returns the sum of the mixed words of a shard."""
    return jnp.sum(_mix(_words(part) ^ _indices(part, spec, mesh)), dtype=jnp.uint32)


def _words(part: jax.Array) -> jax.Array:
    """Returns an array's bits as uint32 ``[..., words]``."""
    if jnp.issubdtype(part.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(part.real), _words(part.imag)], axis=-1)
    if part.dtype == jnp.bool_:
        part = part.astype(jnp.uint8)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(part.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(part, bits).astype(jnp.uint32)
    return words if words.ndim > part.ndim else words[..., None]


def _indices(part: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Returns the index of each word of a shard in the complete array, spread over 32 bits."""
    words = max(1, part.dtype.itemsize // 4)
    index, stride = jax.lax.broadcasted_iota(jnp.uint32, (*part.shape, words), part.ndim), words
    for dim in reversed(range(part.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, index.shape, dim)
        if axes := entry_axes(spec[dim]):
            along += jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(part.shape[dim])
        index += along * jnp.uint32(stride % 2**32)
        stride *= part.shape[dim] * math.prod(mesh.shape[axis] for axis in axes)
    return _mix(index)


def _mix(words: Any) -> Any:
    """Returns words spread over 32 bits, one to one (the finalizer of MurmurHash3, Austin Appleby, public domain)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return words ^ (words >> 16)


# -- replicas -----------------------------------------------------------------------------------------------------------


def diverged_replicas(tree: PyTree) -> list[str]:
    """Returns the paths of the arrays whose replicas differ; every process must call it.

    Arrays without a second copy, as those that ZeRO shards, are not read. It waits for the arrays
    to be computed.

    **Collectives**: two all-reduces of a number per array, for each set of axes over which arrays are replicated.

    Args:
        tree: Any tree. Only arrays with NamedShardings have replicas.
    """
    by_mesh: dict[Any, list[tuple[str, jax.Array]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _has_copies(leaf):
            by_mesh.setdefault(leaf.sharding.mesh, []).append((path_string(path), leaf))
    diverged = []
    for mesh, copied in by_mesh.items():
        arrays = tuple(leaf for _, leaf in copied)
        differ = jax.device_get(_differ(arrays, tuple(map(_spec, arrays)), mesh))
        diverged += [path for (path, _), it_does in zip(copied, differ, strict=True) if it_does]
    return diverged


def _has_copies(leaf: Any) -> bool:
    """Returns whether several devices hold the same part of an array."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return False
    _, replicas = _axes(sharding.spec, sharding.mesh)
    return math.prod(sharding.mesh.shape[axis] for axis in replicas) > 1


@partial(jax.jit, static_argnames=("specs", "mesh"))
def _differ(
    arrays: tuple[jax.Array, ...], specs: tuple[PartitionSpec, ...], mesh: Mesh
) -> jax.Array:
    """Returns whether the replicas of each array differ, bool ``[arrays]``, in one program."""

    def compare(*parts: jax.Array) -> jax.Array:
        found: list[Any] = [None] * len(parts)
        for replicas, places in by_axes.items():
            sums = jnp.stack([_local_sum(parts[at], specs[at], mesh) for at in places])
            differ = jax.lax.pmax(sums, replicas) != jax.lax.pmin(sums, replicas)
            for at, each in zip(places, differ, strict=True):
                found[at] = each
        return jax.lax.pmax(jnp.stack(found).astype(jnp.uint32), mesh.axis_names)

    by_axes: dict[tuple[str, ...], list[int]] = {}
    for at, spec in enumerate(specs):
        by_axes.setdefault(_axes(spec, mesh)[1], []).append(at)
    # As in ``_check``, replicas must not be assumed to be equal.
    return jax.shard_map(
        compare, mesh=mesh, in_specs=specs, out_specs=replicated(), check_vma=False
    )(*arrays)


# -- on the host --------------------------------------------------------------------------------------------------------


def row_sums(part: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Returns the sum of the mixed words of each row of a part of an array, uint32 ``[rows]``.

    The sums of all rows of all parts add up to the array's checksum, modulo 2**32.

    Args:
        part: The part; its rows are along its leading dim.
        start: The index of its first element in the array.
        shape: The shape of the array.
    """
    part, start, shape = (part, start, shape) if part.ndim else (part[None], (0,), (1,))
    if part.size == 0:
        return np.zeros(len(part), np.uint32)
    words_each, words = _host_words(part)
    runs = words.reshape(math.prod(part.shape[: _first_whole(part, shape)]), -1)
    offsets = _run_offsets(part, start, shape) * np.uint32(words_each)
    sums = np.zeros(len(runs), np.uint32)
    for rows, columns in _blocks(*runs.shape):
        index = offsets[rows, None] + np.arange(columns.start, columns.stop, dtype=np.uint32)
        sums[rows] += _mix(runs[rows, columns].astype(np.uint32) ^ _mix(index)).sum(
            axis=1, dtype=np.uint32
        )
    return sums.reshape(len(part), -1).sum(axis=1, dtype=np.uint32)


def _host_words(part: np.ndarray) -> tuple[int, np.ndarray]:
    """Returns how many words an element has, and the words of all, of at most 32 bits, in the order of the elements."""
    size = part.dtype.itemsize
    dtype = {1: np.uint8, 2: np.uint16}.get(size, np.uint32)
    return max(1, size // 4), np.ascontiguousarray(part).reshape(-1).view(dtype)


def _first_whole(part: np.ndarray, shape: Sequence[int]) -> int:
    """Returns the first dim, from 1 on, from which on elements that follow one another in a part do so in the array."""
    first = part.ndim
    while first > 1 and (first == part.ndim or part.shape[first] == shape[first]):
        first -= 1
    return first


def _run_offsets(part: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Returns the index in the array, modulo 2**32, of the first element of each run of elements that follow one another."""
    first = _first_whole(part, shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    within = sum(start[dim] * strides[dim] for dim in range(first, part.ndim))
    offsets = np.array([within % 2**32], np.uint32)
    for dim in range(first):
        along = np.arange(start[dim], start[dim] + part.shape[dim], dtype=np.uint64) * np.uint64(
            strides[dim]
        )
        offsets = (offsets[:, None] + along.astype(np.uint32)).reshape(-1)
    return offsets


def _blocks(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """Yields the rows and columns of blocks of at most ``HOST_WORDS`` words."""
    width = min(num_columns, HOST_WORDS) or 1
    height = max(1, HOST_WORDS // width)
    for row in range(0, num_rows, height):
        for column in range(0, num_columns, width):
            yield (
                slice(row, min(row + height, num_rows)),
                slice(column, min(column + width, num_columns)),
            )
