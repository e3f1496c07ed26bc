"""Checksums of the values of sharded arrays, equal on any mesh, and a check that replicas hold equal values.

Each 32-bit word of an array is mixed with its index in the complete array, and the mixed words are added modulo 2**32. The sum
does not depend on the order of addition, so each device adds the words of its shard, and these sums are added. The mixing is
one to one, so changing a single word always changes the sum. JAX and SPMD programs assume that replicas are equal and never
check it: after a fault of a device or a program they diverge unnoticed, and a checkpoint would hold a mixture of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.mesh import entry_axes
from jaxpar.sharding import path_string, replicated


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
    if not leaves:
        return {}
    arrays = [leaf for _, leaf in leaves]
    specs = tuple(_full(leaf.sharding, leaf.ndim) for leaf in arrays)
    found = np.asarray(_check(mesh, specs)(arrays))
    return {
        path_string(path): Checked(int(checksum), bool(differ), not broken)
        for (path, _), (checksum, differ, broken) in zip(leaves, found, strict=True)
    }


def _full(sharding: jax.sharding.Sharding, ndim: int) -> PartitionSpec:
    assert isinstance(sharding, NamedSharding)
    return PartitionSpec(*sharding.spec, *[None] * (ndim - len(sharding.spec)))


@lru_cache(maxsize=8)
def _check(mesh: Mesh, specs: tuple[PartitionSpec, ...]):
    def check(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([_check_one(array, spec, mesh) for array, spec in zip(arrays, specs, strict=True)])

    # Replicas are compared here, so check_vma, which assumes that they are equal, must be off.
    shard_map = jax.shard_map(check, mesh=mesh, in_specs=(list(specs),), out_specs=replicated(), check_vma=False)
    return jax.jit(shard_map)


def _check_one(part: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Returns uint32 ``[3]``: the checksum, whether replicas differ, whether an element is not finite."""
    cut = tuple(axis for entry in spec for axis in entry_axes(entry))
    replicas = tuple(axis for axis in mesh.axis_names if axis not in cut)
    local = jnp.sum(_mix(_words(part) ^ _indices(part, spec, mesh)), dtype=jnp.uint32)
    differ = jax.lax.pmax(local, replicas) != jax.lax.pmin(local, replicas) if replicas else jnp.bool_(False)
    exact = not jnp.issubdtype(part.dtype, jnp.inexact)
    broken = jnp.bool_(False) if exact else jnp.any(~jnp.isfinite(part))
    flags = jax.lax.pmax(jnp.stack([differ, broken]).astype(jnp.uint32), mesh.axis_names)
    return jnp.concatenate([(jax.lax.psum(local, cut) if cut else local)[None], flags])


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


def _mix(words: jax.Array) -> jax.Array:
    """Returns words spread over 32 bits, one to one (the finalizer of MurmurHash3, Austin Appleby, public domain)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return words ^ (words >> 16)
