"""The checksum of an array, equal on any mesh and on the host, and the comparison of its replicas.

Each 32-bit word of an array is mixed with its index in the complete array, and the mixed words are
added modulo 2**32:

    checksum = sum over i of mix(word[i] ^ mix(i))

The sum does not depend on the order of addition, so each device adds the words of its shard, and
these sums are added; a reader on the host adds those of one part of the array after another. The
mixing is one to one, so changing a single word always changes the sum.

JAX and SPMD programs assume that replicas are equal and never check it: after a fault of a device
or a program they diverge unnoticed, and a checkpoint would hold a mixture of them. Arrays that
ZeRO shards have a single copy, so there is nothing to compare them with.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.mesh import entry_axes
from jaxpar.sharding import path_string, replicated

Axes = tuple[str, ...]
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
    found: list[Array] = []
    for _, leaf in leaves:
        sharding = NamedSharding(mesh, _spec(leaf))
        found.append(_check(leaf, sharding))
    checked = {}
    for (path, _), numbers in zip(leaves, jax.device_get(found), strict=True):
        checksum, is_diverged, is_broken = map(int, numbers)
        checked[path_string(path)] = Checked(checksum, bool(is_diverged), not is_broken)
    return checked


@partial(jax.jit, static_argnames="sharding")
def _check(array: Array, sharding: NamedSharding) -> Array:
    """Returns what ``_check_one`` does, in a program of its own, which arrays of one shape, dtype and sharding share."""
    check = partial(_check_one, sharding=sharding)
    return _on_shards(check, sharding.mesh, sharding.spec)(array)


def _on_shards(function: Callable[..., Array], mesh: Any, specs: Any) -> Callable[..., Array]:
    """Returns a function of shards as one of arrays."""
    # Replicas are compared here, so check_vma, which assumes that they are equal, must be off.
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=specs,
        out_specs=replicated(),
        check_vma=False,
    )


def _check_one(part: Array, sharding: NamedSharding) -> Array:
    """Returns uint32 ``[3]``: the checksum, whether replicas differ, whether an element is not finite."""
    cut, replicas = _axes(sharding)
    local = _local_sum(part, sharding)
    differ = _differ_over(replicas, local) if replicas else jnp.bool_(False)
    broken = jnp.bool_(False)
    if jnp.issubdtype(part.dtype, jnp.inexact):
        broken = jnp.any(~jnp.isfinite(part))
    flags = jnp.stack([differ, broken]).astype(jnp.uint32)
    flags = lax.pmax(flags, sharding.mesh.axis_names)
    checksum = lax.psum(local, cut) if cut else local
    return jnp.concatenate([checksum[None], flags])


def _differ_over(axes: Axes, sums: Array) -> Array:
    """Returns for each sum whether it differs between devices along some axes."""
    return lax.pmax(sums, axes) != lax.pmin(sums, axes)


def _spec(leaf: Array) -> PartitionSpec:
    """Returns an array's PartitionSpec with an entry for each dim."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding), "states have no other shardings"
    spec = sharding.spec
    missing = leaf.ndim - len(spec)
    return PartitionSpec(*spec, *[None] * missing)


def _axes(sharding: NamedSharding) -> tuple[Axes, Axes]:
    """Returns the axes over which an array is sharded, and those over which it is replicated."""
    cut = tuple(axis for entry in sharding.spec for axis in entry_axes(entry))
    replicas = tuple(axis for axis in sharding.mesh.axis_names if axis not in cut)
    return cut, replicas


def _local_sum(part: Array, sharding: NamedSharding) -> Array:
    """Returns the sum of the mixed words of a shard."""
    words = _words(part)
    index = _indices(part, sharding)
    mixed = _mix(words ^ index)
    return jnp.sum(mixed, dtype=jnp.uint32)


def _words(part: Array) -> Array:
    """Returns an array's bits as uint32 ``[..., words]``."""
    if jnp.issubdtype(part.dtype, jnp.complexfloating):
        of_real = _words(part.real)
        of_imag = _words(part.imag)
        return jnp.concatenate([of_real, of_imag], axis=-1)
    if part.dtype == jnp.bool_:
        part = part.astype(jnp.uint8)
    words = lax.bitcast_convert_type(part, _word_dtype(part.dtype))
    words = words.astype(jnp.uint32)
    return words if words.ndim > part.ndim else words[..., None]


def _word_dtype(dtype: Any) -> Any:
    """Returns the dtype of the words of an element, of at most 32 bits."""
    return {1: np.uint8, 2: np.uint16}.get(dtype.itemsize, np.uint32)


def _words_each(dtype: Any) -> int:
    """Returns how many words an element has."""
    return max(1, dtype.itemsize // 4)


def _indices(part: Array, sharding: NamedSharding) -> Array:
    """Returns the index of each word of a shard in the complete array, spread over 32 bits.

    Of word w of element [i, j] of the shard that begins at element [row, column]:

        index = ((row + i) * columns + column + j) * words + w
    """
    stride = _words_each(part.dtype)
    shape = (*part.shape, stride)
    index = lax.broadcasted_iota(jnp.uint32, shape, part.ndim)
    for dim in reversed(range(part.ndim)):
        size = part.shape[dim]
        axes = entry_axes(sharding.spec[dim])
        along = lax.broadcasted_iota(jnp.uint32, shape, dim)
        if axes:
            shard = lax.axis_index(axes).astype(jnp.uint32)
            along += shard * jnp.uint32(size)
        index += along * jnp.uint32(stride % 2**32)
        stride *= size * math.prod(sharding.mesh.shape[axis] for axis in axes)
    return _mix(index)


def _mix(words: Any) -> Any:
    """Returns words spread over 32 bits, one to one (the finalizer of MurmurHash3, Austin Appleby, public domain)."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
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
    by_mesh: dict[Any, list[tuple[str, Array]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _has_copies(leaf):
            copied = by_mesh.setdefault(leaf.sharding.mesh, [])
            copied.append((path_string(path), leaf))
    diverged = []
    for mesh, copied in by_mesh.items():
        paths, arrays = zip(*copied, strict=True)
        specs = tuple(map(_spec, arrays))
        differ = _differ(arrays, specs, mesh)
        diverged += compress(paths, jax.device_get(differ))
    return diverged


def _has_copies(leaf: Any) -> bool:
    """Returns whether several devices hold the same part of an array."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return False
    _, replicas = _axes(sharding)
    return math.prod(sharding.mesh.shape[axis] for axis in replicas) > 1


@partial(jax.jit, static_argnames=("specs", "mesh"))
def _differ(arrays: tuple[Array, ...], specs: tuple[PartitionSpec, ...], mesh: Mesh) -> Array:
    """Returns whether the replicas of each array differ, bool ``[arrays]``, in one program."""
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    by_axes: dict[Axes, list[int]] = {}
    for at, sharding in enumerate(shardings):
        _, replicas = _axes(sharding)
        by_axes.setdefault(replicas, []).append(at)

    def compare(*parts: Array) -> Array:
        found: list[Any] = [None] * len(parts)
        for replicas, places in by_axes.items():
            sums = [_local_sum(parts[at], shardings[at]) for at in places]
            differ = _differ_over(replicas, jnp.stack(sums))
            for at, each in zip(places, differ, strict=True):
                found[at] = each
        flags = jnp.stack(found).astype(jnp.uint32)
        return lax.pmax(flags, mesh.axis_names)

    return _on_shards(compare, mesh, specs)(*arrays)


# -- on the host --------------------------------------------------------------------------------------------------------


def row_sums(
    part: np.ndarray,
    start: Sequence[int],
    shape: Sequence[int],
) -> np.ndarray:
    """Returns the sum of the mixed words of each row of a part of an array, uint32 ``[rows]``.

    The sums of all rows of all parts add up to the array's checksum, modulo 2**32.

    Args:
        part: The part; its rows are along its leading dim.
        start: The index of its first element in the array.
        shape: The shape of the array.
    """
    if part.ndim == 0:
        return row_sums(part[None], (0,), (1,))
    if part.size == 0:
        return np.zeros(len(part), np.uint32)
    dtype = part.dtype
    words = np.ascontiguousarray(part).reshape(-1)
    words = words.view(_word_dtype(dtype))
    offsets = _run_offsets(part, start, shape)
    offsets *= np.uint32(_words_each(dtype))
    runs = words.reshape(len(offsets), -1)
    sums = np.zeros(len(runs), np.uint32)
    for rows, columns in _blocks(*runs.shape):
        along = np.arange(columns.start, columns.stop, dtype=np.uint32)
        index = offsets[rows, None] + along
        block = runs[rows, columns].astype(np.uint32)
        mixed = _mix(block ^ _mix(index))
        sums[rows] += _row_totals(mixed)
    return _row_totals(sums.reshape(len(part), -1))


def _row_totals(words: np.ndarray) -> np.ndarray:
    return words.sum(axis=1, dtype=np.uint32)


def _first_whole(part: np.ndarray, shape: Sequence[int]) -> int:
    """Returns the first dim, from 1 on, from which on elements that follow one another in a part do so in the array."""
    first = part.ndim
    is_whole = True
    while first > 1 and is_whole:
        first -= 1
        is_whole = part.shape[first] == shape[first]
    return first


def _run_offsets(part: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Returns the index in the array, modulo 2**32, of the first element of each run of elements that follow one another.

    A part of two rows and three columns of an array with eight columns:

        . . . # # # . .     offset 3
        . . . # # # . .     offset 11
    """
    first = _first_whole(part, shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    within = sum(start[dim] * strides[dim] for dim in range(first, part.ndim))
    offsets = np.array([within % 2**32], np.uint32)
    for dim in range(first):
        begin = start[dim]
        places = np.arange(begin, begin + part.shape[dim], dtype=np.uint64)
        along = places * np.uint64(strides[dim])
        offsets = offsets[:, None] + along.astype(np.uint32)
        offsets = offsets.reshape(-1)
    return offsets


def _blocks(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """Yields the rows and columns of blocks of at most ``HOST_WORDS`` words."""
    width = min(num_columns, HOST_WORDS) or 1
    height = max(1, HOST_WORDS // width)
    for row in range(0, num_rows, height):
        rows = slice(row, row + height)
        for column in range(0, num_columns, width):
            end = min(column + width, num_columns)
            yield rows, slice(column, end)
