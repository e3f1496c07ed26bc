"""The data of a report, as plain values: of a run or of plans.

A run gathers the data of its step itself and writes it to report.json; ``read_run`` reads that and the rest of the folder.
"""

import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from jaxpar import fields
from jaxpar.dtypes import num_bytes
from jaxpar.inspect import StepReport
from jaxpar.inspect.report import axes_text
from jaxpar.inspect.text import params_text
from jaxpar.mesh import entry_axes, numbered_places, shown_sizes, sizes_text
from jaxpar.metrics.jumps import find_jumps
from jaxpar.metrics.log import figures_of, read_metrics
from jaxpar.planner import Cluster, ModelShape, Plan
from jaxpar.planner.compiled import inspect_pipeline
from jaxpar.planner.plans import SETTINGS
from jaxpar.planner.state import AtRest, local_bytes
from jaxpar.runtime.lease import NAME as LEASE
from jaxpar.runtime.life import LifeWatch
from jaxpar.schedule import Schedule, timeline_data
from jaxpar.sharding import path_string
from jaxpar.train import TrainState

MAX_DEVICES = 64  # columns of a chart that can be read
MAX_POINTS = 4000
MAX_JUMPS = 5
FILE = "report.json"
LOADS = "expert_loads.json"
Number = int | float
RUN_FILES = ("config.json", "metrics.jsonl", FILE)


def step_data(
    compiled: jax.stages.Compiled,
    state: TrainState,
    mesh: Mesh,
    *,
    schedule: Schedule | None = None,
    num_steps: int,
) -> dict[str, Any]:
    """Returns the data of a run that is known once its step is compiled, as plain values.

    Args:
        compiled: The training step.
        state: The state that it takes, of arrays or ShapeDtypeStructs with shardings.
        mesh: The mesh.
        schedule: The schedule of its pipeline; None for none.
        num_steps: The step at which the run ends.

    Returns:
        "kind", "num_steps", "facts", "problems" (messages by section), and one entry per section of ``page.SECTIONS`` that is
        known once the step is compiled, None where it is in "problems".
    """
    data: dict[str, Any] = {
        "kind": "run",
        "num_steps": num_steps,
        "facts": _facts(mesh),
        "problems": {},
    }
    _add(data, "timeline", lambda: timeline_data(schedule))
    _add(data, "shards", lambda: shards(state.params, mesh))
    report = _add(data, "traffic", lambda: inspect_pipeline(compiled, mesh, schedule))
    if report is not None:
        _add(data, "traffic", lambda: traffic(report))
        _add(data, "memory", lambda: memory(report, state))
    return data


def _add(data: dict[str, Any], name: str, gather: Callable[[], Any]) -> Any:
    """Gathers a part of the data and returns it; a failure is shown in its place, since it must not end the run."""
    try:
        data[name] = gather()
    except Exception as error:
        data[name] = None
        data["problems"][name] = f"{type(error).__name__}: {error}"
    return data[name]


def _facts(mesh: Mesh) -> dict[str, str]:
    """Returns what a reader of a report wants to know first, by name."""
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    return {
        "mesh": sizes_text(mesh.shape),
        "devices": f"{mesh.size} {', '.join(kinds)}, {jax.process_count()} process{'es' * (jax.process_count() > 1)}",
        "versions": versions(),
    }


def versions() -> str:
    """Returns the versions of jaxpar, JAX and Python as text."""
    own = sys.modules["jaxpar"].__version__  # an import would violate the package's import order
    return f"jaxpar {own}, jax {jax.__version__}, Python {platform.python_version()}"


def has_begun(folder: Path) -> bool:
    """Returns whether a folder is that of a run, which has its lease before it reads its data."""
    return folder.is_dir() and any((folder / name).exists() for name in (*RUN_FILES, LEASE))


def is_free(folder: Path) -> bool:
    """Returns whether a run may still begin in a folder: there is none, or nothing is in it."""
    try:
        return not any(folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError:  # a file, or one in place of a folder above it
        return False


def read_run(folder: Path) -> dict[str, Any]:
    """Returns the data of a run from its folder, at any time during the run or after it.

    Args:
        folder: The run's folder: a recipe's ``--out-dir``.

    Returns:
        "name", "kind", "life" as ``jaxpar.runtime.life`` has it, "metrics", "config", "experts" if there are loads of experts,
        as ``write_loads`` wrote them, and what ``step_data`` returned if the step was compiled.

    Raises:
        ValueError: It is not the folder of a run, or one of its files is not as a run writes it.
    """
    if not has_begun(folder):
        raise ValueError(
            f"a run must be a folder with a {', '.join(RUN_FILES[:-1])} or {FILE}; got {folder}, which has none. Name a "
            "recipe's --out-dir."
        )
    found = _read_object(folder / FILE)
    with figures_of(folder / "metrics.jsonl"):
        lines = metrics(read_metrics(folder / "metrics.jsonl"))
    loads = _read_object(folder / LOADS)
    return {
        **found,
        **({"experts": loads} if loads else {}),
        "kind": "run",
        "name": folder.absolute().name,
        "life": LifeWatch(folder).look(),
        "metrics": lines,
        "config": _read_object(folder / "config.json"),
    }


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turns errors of rendering a run, whose files other versions or other programs may have written, into a ValueError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"a run's files must be as this version of jaxpar writes them; got others in {folder} ({type(error).__name__}: "
            f"{error}). Remove its {FILE}: the page is then without the data of the step."
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return fields.read_json(
        dict[str, Any], path.read_bytes(), str(path), "Remove it, or name another run."
    )


def plan_data(
    plans: Sequence[Plan], model: ModelShape, machines: Cluster, *, name: str
) -> dict[str, Any]:
    """Returns the data of plans as plain values.

    Args:
        plans: The plans, the best first.
        model: The model that they are of.
        machines: The machines that they are for.
        name: The model's name.

    Returns:
        "kind", "name", "facts", "problems" (messages by section), "step_time" in seconds by plan and part, and one entry per
        section of ``page.SECTIONS`` but "metrics".

    Raises:
        ValueError: There are no plans.
    """
    if not plans:
        raise ValueError(
            "a report must have one plan or more; got none. Plan with more devices or less memory_headroom."
        )
    best, as_json = plans[0], [plan.as_json() for plan in plans]
    return {
        "kind": "plan",
        "name": name,
        "facts": _facts_of_plan(best, model, machines),
        "plans": as_json,
        "step_time": {
            f"{rank}: {plan.choice.axes()}": plan.time_by_part for rank, plan in enumerate(plans, 1)
        },
        "timeline": _timeline(best),
        "shards": shards(AtRest(model, optax.adam(1e-4), best.choice).params, best.choice.mesh),
        "memory": {
            "bars": _bars(best),
            "limit_bytes": machines.memory_bytes,
            "total_bytes": best.memory_bytes,
        },
        "traffic": {"axes": dict(best.bytes_moved), "collectives": [], "is_known": True},
        "config": {
            name: as_json[0][name]
            for name in (*SETTINGS, "executor", "software", "layers_per_virtual_stage")
        },
        "problems": {},
    }


def _facts_of_plan(best: Plan, model: ModelShape, machines: Cluster) -> dict[str, str]:
    num_rows = best.tokens // model.tokens_per_row
    of_tokens, unit = (
        (f" of {model.tokens_per_row} tokens", "tokens")
        if model.tokens_per_row > 1
        else ("", "rows")
    )
    per_device = lambda flops: flops / best.step_seconds / 1e12
    return {
        "model": f"{params_text(model.num_params)}, {num_rows} rows{of_tokens} a step",
        "rate": f"{best.tokens / best.step_seconds:,.0f} {unit}/s",
        "TFLOP/s of a device": f"{per_device(best.flops):.0f}, of which useful {per_device(best.useful_flops):.0f}",
        "devices": f"{machines.num_nodes} x {machines.devices_per_node} {machines.name}",
        "versions": versions().partition(",")[0],
    }


def _timeline(plan: Plan) -> dict[str, Any] | None:
    """Returns the timeline of as many microbatches as show the steady state, in the form that the plan's executor runs."""
    choice = plan.choice
    if choice.stage == 1:
        return None
    form, timing = ("published", "free") if plan.is_ideal else (None, "lockstep")
    table = choice.table(choice.num_simulated, form)
    return timeline_data(table, timing=timing, of_microbatches=choice.num_microbatches)


def _bars(plan: Plan) -> dict[str, dict[str, int]]:
    """Returns the bytes by kind of each stage, once if all stages are alike."""
    first, *others = plan.bytes_by_stage.values()
    alike = others and all(parts == first for parts in others)
    return {"each stage": first} if alike else plan.bytes_by_stage


# -- the sections -----------------------------------------------------------------------------------------------------------


def shards(params: PyTree, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Returns the devices of a mesh and the shards of each array, as plain values.

    Args:
        params: Arrays or ShapeDtypeStructs with NamedShardings on the mesh.
        mesh: The mesh.

    Returns:
        "devices": for each of the first 64 devices its coordinates by axis, in the order in which ``make_mesh`` numbers
        devices; "num_devices": how many there are. "arrays": for each array its "name", "shape", "dtype", "spec" as text,
        "bytes" of all of it, "device_bytes" of a shard, "shards" as text, such as "[0:4, :, 32:64]", and "held": the index of
        the shard that each device holds.
    """
    sizes = shown_sizes(mesh.shape)
    devices = numbered_places(sizes)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        "num_devices": len(devices),
        "devices": devices[:MAX_DEVICES],
        "arrays": [
            _array(path_string(path), leaf, sizes, devices[:MAX_DEVICES]) for path, leaf in leaves
        ],
    }


def _array(
    name: str, leaf: Any, sizes: dict[str, int], devices: list[dict[str, int]]
) -> dict[str, Any]:
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


def _shard(
    shape: Sequence[int], dims: list[tuple[str, ...]], sizes: dict[str, int], at: dict[str, int]
) -> str:
    """Returns the part of an array that the device with these coordinates holds, in the notation of slices."""
    parts = []
    for extent, axes in zip(shape, dims, strict=True):
        # An axis of one device, which splits nothing, may not be among them.
        count, index = math.prod(sizes.get(axis, 1) for axis in axes), 0
        for axis in axes:  # the first axis varies slowest
            index = index * sizes.get(axis, 1) + at.get(axis, 0)
        each = extent // count
        parts.append(f"{index * each}:{(index + 1) * each}" if count > 1 else ":")
    return f"[{', '.join(parts)}]" if parts else "scalar"


def _spec_text(dims: list[tuple[str, ...]], sizes: dict[str, int]) -> str:
    split = [
        f"dim {dim} over {' and '.join(axes)}"
        for dim, axes in enumerate(dims)
        if math.prod(sizes.get(axis, 1) for axis in axes) > 1
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
    axes = (
        {axes_text(axes): sent for axes, sent in report.bytes_by_axes().items()} if is_known else {}
    )
    return {"axes": axes, "collectives": rows, "is_known": is_known}


def metrics(lines: Sequence[Mapping[str, Number]]) -> dict[str, Any]:
    """Returns the curves of a run as plain values, None where a value is not finite.

    Args:
        lines: The lines of metrics.jsonl, as ``read_metrics`` returns them.

    Returns:
        "num_steps_done"; "num_lines", fewer where some could not be written; "curves": for each column its "steps" taken and
        "values", each the mean of "mean_of" lines; "rows": for each column its first, lowest, highest, median and last finite
        value, and how many are not finite; "jumps": the last steps whose loss was far above that of the steps before, and
        "num_jumps", how many there were.
    """
    jumps = find_jumps(lines)
    names = list(dict.fromkeys(name for line in lines for name in line if name != "step"))
    columns = {
        name: [(int(line["step"]) + 1, line[name]) for line in lines if name in line]
        for name in names
    }
    return {
        "num_steps_done": int(lines[-1]["step"]) + 1 if lines else 0,
        "num_lines": len({line["step"] for line in lines}),
        "curves": {name: _curve(points) for name, points in columns.items()},
        "rows": {name: _row(points) for name, points in columns.items()},
        "jumps": jumps[-MAX_JUMPS:],
        "num_jumps": len(jumps),
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
