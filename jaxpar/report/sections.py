"""Data of the sections of a report, as plain values.

The shards of arrays, the memory and the traffic of a compiled step, and the curves of a run's metrics. That of a pipeline's
timeline is made by ``jaxpar.schedule.timeline_data``.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from jaxpar.dtypes import num_bytes
from jaxpar.inspect import StepReport
from jaxpar.inspect.report import axes_text
from jaxpar.mesh import entry_axes, shown_sizes
from jaxpar.planner.state import local_bytes
from jaxpar.sharding import path_string
from jaxpar.train import TrainState

MAX_DEVICES = 64  # columns of a chart that can be read
MAX_POINTS = 4000


def shards(params: PyTree, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Returns the devices of a mesh and the shards of each array, as plain values.

    Args:
        params: Arrays or ShapeDtypeStructs with NamedShardings on the mesh.
        mesh: The mesh.

    Returns:
        "devices": for each of the first 64 devices its coordinates by axis; "num_devices": how
        many there are. "arrays": for each array its "name", "shape", "dtype", "spec" as text, "bytes" of all of it,
        "device_bytes" of a shard, "shards" as text, such as "[0:4, :, 32:64]", and "held": the index of the shard that each
        device holds.
    """
    sizes = shown_sizes(mesh.shape)
    devices = [dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values()))]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        "num_devices": len(devices),
        "devices": devices[:MAX_DEVICES],
        "arrays": [_array(path_string(path), leaf, sizes, devices[:MAX_DEVICES]) for path, leaf in leaves],
    }


def _array(name: str, leaf: Any, sizes: dict[str, int], devices: list[dict[str, int]]) -> dict[str, Any]:
    spec = leaf.sharding.spec
    dims = [entry_axes(entry) for entry in (*spec, *(None,) * (leaf.ndim - len(spec)))]
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


def memory(report: StepReport, state: TrainState) -> dict[str, Any]:
    """Returns bytes on one device: "bars" by kind, "total_bytes" by the compiler, "limit_bytes" None.

    The kinds add up to the total. "batch" is all arguments but the state.

    Args:
        report: The report of the compiled step.
        state: The state that it takes, of arrays or ShapeDtypeStructs with shardings.
    """
    planned, params = report.memory, local_bytes(state.params)
    optimizer = local_bytes((state.opt_state, state.step, state.num_skipped))
    kinds = {
        "params": params,
        "optimizer": optimizer,
        "batch": max(0, planned.argument_bytes - params - optimizer),
        "temporary": planned.temp_bytes,
        "metrics and other outputs": planned.output_bytes - planned.alias_bytes,
        "program": planned.generated_code_bytes,
    }
    return {"bars": {"a device": kinds}, "limit_bytes": None, "total_bytes": planned.total_bytes}


def traffic(report: StepReport) -> dict[str, Any]:
    """Returns the bytes that a device sends in a step by axes, and each collective."""
    rows = [
        {
            "kind": each.kind,
            "axes": axes_text(each.axes),
            "runs": each.known_times,
            "is_bound": each.is_bound or each.times is None,
            "payload_bytes": each.payload_bytes,
            "bytes": each.bytes_moved,
        }
        for each in report.collectives
    ]
    is_known = all(each.times is not None for each in report.collectives)
    axes = {axes_text(axes): sent for axes, sent in report.bytes_by_axes().items()} if is_known else {}
    return {"axes": axes, "collectives": rows, "is_known": is_known}


Number = int | float


def metrics(lines: Sequence[Mapping[str, Number]]) -> dict[str, Any]:
    """Returns the curves of a run as plain values, None where a value is not finite.

    Args:
        lines: The lines of metrics.jsonl, as ``read_metrics`` returns them.

    Returns:
        "num_steps_done"; "curves": for each column its "steps" taken and "values", each the mean of "mean_of" lines; "rows":
        for each column its first, lowest, highest, median and last finite value, and how many are not finite.
    """
    names = list(dict.fromkeys(name for line in lines for name in line if name != "step"))
    columns = {name: [(int(line["step"]) + 1, line[name]) for line in lines if name in line] for name in names}
    return {
        "num_steps_done": int(lines[-1]["step"]) + 1 if lines else 0,
        "curves": {name: _curve(points) for name, points in columns.items()},
        "rows": {name: _row(points) for name, points in columns.items()},
    }


def _curve(points: list[tuple[int, Number]]) -> dict[str, Any]:
    """Returns means of consecutive points, at most ``MAX_POINTS``, each at the step of its last point."""
    each = -(-len(points) // MAX_POINTS)
    parts = [points[at : at + each] for at in range(0, len(points), each or 1)]
    means = [_mean([value for _, value in part]) for part in parts]
    return {"steps": [part[-1][0] for part in parts], "values": means, "mean_of": each}


def _mean(values: list[Number]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _row(points: list[tuple[int, Number]]) -> dict[str, Any]:
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    found: dict[str, Any] = {"num_not_finite": len(points) - len(finite), "first": None}
    if finite:
        values = [value for value, _ in finite]
        lowest, at = min(finite)
        found |= {"first": values[0], "lowest": lowest, "at_step": at, "highest": max(values)}
        found |= {"median": statistics.median(values), "last": values[-1]}
    return found
