"""The data of a report, as plain values: of a run or of plans.

A run gathers the data of its step itself and writes it to report.json; ``read_run`` reads that and the rest of the folder.
"""

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import optax

from jaxpar import fields
from jaxpar.inspect import StepReport, inspect_step
from jaxpar.mesh import sizes_text
from jaxpar.metrics.log import figures_of, read_metrics
from jaxpar.pipeline import masks_idle_ops, spmd_program
from jaxpar.planner import Cluster, ModelShape, Plan
from jaxpar.planner.plans import SETTINGS
from jaxpar.planner.state import AtRest
from jaxpar.report.sections import memory, metrics, shards, traffic
from jaxpar.schedule import Schedule, timeline_data
from jaxpar.train import TrainState

FILE = "report.json"
LOADS = "expert_loads.json"
RUN_FILES = ("config.json", "metrics.jsonl", FILE)


def step_data(
    compiled: jax.stages.Compiled,
    state: TrainState,
    mesh: jax.sharding.Mesh,
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
    data: dict[str, Any] = {"kind": "run", "num_steps": num_steps, "facts": _facts(mesh), "problems": {}}
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


def inspect_pipeline(
    compiled: jax.stages.Compiled,
    mesh: jax.sharding.Mesh,
    schedule: Schedule | None = None,
    *,
    loop_trips: int | None = None,
) -> StepReport:
    """Returns the cost of a compiled step whose pipeline, if it has one, takes its branches as often as a schedule says.

    Args:
        compiled: The training step.
        mesh: Its mesh.
        schedule: The schedule of its pipeline; None for none.
        loop_trips: The trips of a loop whose number the program does not tell.
    """
    shares = None if schedule is None else spmd_program(schedule, masks=masks_idle_ops(mesh)).branch_shares()
    return inspect_step(compiled, mesh=mesh, branch_shares=shares, loop_trips=loop_trips)


def _facts(mesh: jax.sharding.Mesh) -> dict[str, str]:
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


def read_run(folder: Path) -> dict[str, Any]:
    """Returns the data of a run from its folder, at any time during the run or after it.

    Args:
        folder: The run's folder: a recipe's ``--out-dir``.

    Returns:
        "name", "kind", "metrics", "config", "experts" if there are loads of experts, as ``write_loads`` wrote them, and what
        ``step_data`` returned if the step was compiled.

    Raises:
        ValueError: It is not the folder of a run, or one of its files is not as a run writes it.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in RUN_FILES):
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
    return fields.read_json(dict[str, Any], path.read_bytes(), str(path), "Remove it, or name another run.")


def plan_data(plans: Sequence[Plan], model: ModelShape, machines: Cluster, *, name: str) -> dict[str, Any]:
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
        "step_time": {f"{rank}: {plan.choice.axes()}": plan.time_by_part for rank, plan in enumerate(plans, 1)},
        "timeline": _timeline(best),
        "shards": shards(AtRest(model, optax.adam(1e-4), best.choice).params, best.choice.mesh),
        "memory": {"bars": _bars(best), "limit_bytes": machines.memory_bytes, "total_bytes": best.memory_bytes},
        "traffic": {"axes": dict(best.bytes_moved), "collectives": [], "is_known": True},
        "config": {name: as_json[0][name] for name in (*SETTINGS, "executor", "software", "layers_per_virtual_stage")},
        "problems": {},
    }


def _facts_of_plan(best: Plan, model: ModelShape, machines: Cluster) -> dict[str, str]:
    num_rows = best.tokens // model.tokens_per_row
    per_device = lambda flops: flops / best.step_seconds / 1e12
    return {
        "model": f"{model.num_params / 1e9:.4g} billion parameters, {num_rows} rows of {model.tokens_per_row} tokens a step",
        "rate": f"{best.tokens / best.step_seconds:,.0f} tokens/s",
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
