"""Data of the shards of each array, and the shard that each device of the mesh holds."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from jaxpar.dtypes import num_bytes
from jaxpar.planner.at_rest import local_bytes
from jaxpar.sharding import path_string

MAX_DEVICES = 64  # columns of a chart that can be read


def shards(params: PyTree, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Returns the devices of a mesh and the shards of each array, as plain values.

    Args:
        params: Arrays or ShapeDtypeStructs with NamedShardings on the mesh.
        mesh: The mesh.

    Returns:
        "axes": the size of each axis; "devices": for each of the first 64 devices its coordinates by axis; "num_devices": how
        many there are. "arrays": for each array its "name", "shape", "dtype", "spec" as text, "bytes" of all of it,
        "device_bytes" of a shard, "shards" as text, such as "[0:4, :, 32:64]", and "held": the index of the shard that each
        device holds.
    """
    sizes = {str(axis): int(size) for axis, size in mesh.shape.items()}
    devices = [dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values()))]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        "axes": sizes,
        "num_devices": len(devices),
        "devices": devices[:MAX_DEVICES],
        "arrays": [_array(path_string(path), leaf, sizes, devices[:MAX_DEVICES]) for path, leaf in leaves],
    }


def _array(name: str, leaf: Any, sizes: dict[str, int], devices: list[dict[str, int]]) -> dict[str, Any]:
    dims = _axes_of_dims(leaf.sharding.spec, leaf.ndim)
    by_device = [_shard(leaf.shape, dims, sizes, at) for at in devices]
    kinds = list(dict.fromkeys(by_device))
    return {
        "name": name,
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": _spec_text(dims, sizes),
        "bytes": num_bytes([leaf]),
        "device_bytes": local_bytes(leaf),
        "shards": kinds,
        "held": [kinds.index(shard) for shard in by_device],
    }


def _axes_of_dims(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    entries = [*spec, *(None,) * (ndim - len(spec))]
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]


def _shard(shape: Sequence[int], dims: list[tuple[str, ...]], sizes: dict[str, int], at: dict[str, int]) -> str:
    """Returns the part of an array that the device with these coordinates holds, in the notation of slices."""
    parts = []
    for extent, axes in zip(shape, dims, strict=True):
        count, index = math.prod(sizes[axis] for axis in axes), 0
        for axis in axes:  # the first axis varies slowest
            index = index * sizes[axis] + at[axis]
        each = extent // count
        parts.append(f"{index * each}:{(index + 1) * each}" if count > 1 else ":")
    return f"[{', '.join(parts)}]" if parts else "scalar"


def _spec_text(dims: list[tuple[str, ...]], sizes: dict[str, int]) -> str:
    split = [
        f"dim {dim} over {' and '.join(axes)}"
        for dim, axes in enumerate(dims)
        if math.prod(sizes[axis] for axis in axes) > 1
    ]
    return ", ".join(split) or "whole on every device"
