"""Data of a run: that of its step, which the run itself gathers and writes to report.json, and all of its folder."""

import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxpar.inspect import StepReport, inspect_step
from jaxpar.metrics.log import read_metrics
from jaxpar.pipeline import masks_idle_ops, spmd_program
from jaxpar.report import costs
from jaxpar.report.metrics import metrics
from jaxpar.report.shards import shards
from jaxpar.report.timeline import timeline
from jaxpar.schedule import Schedule
from jaxpar.train import TrainState

FILE = "report.json"
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
    _add(data, "timeline", lambda: timeline(schedule))
    _add(data, "shards", lambda: shards(state.params, mesh))
    report = _add(data, "traffic", lambda: inspect_pipeline(compiled, mesh, schedule))
    if report is not None:
        _add(data, "traffic", lambda: costs.traffic(report))
        _add(data, "memory", lambda: costs.memory(report, state))
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
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, schedule: Schedule | None = None
) -> StepReport:
    """Returns the cost of a compiled step whose pipeline, if it has one, takes its branches as often as a schedule says.

    Args:
        compiled: The training step.
        mesh: Its mesh.
        schedule: The schedule of its pipeline; None for none.
    """
    shares = None if schedule is None else spmd_program(schedule, masks=masks_idle_ops(mesh)).branch_shares()
    return inspect_step(compiled, mesh=mesh, branch_shares=shares)


def _facts(mesh: jax.sharding.Mesh) -> dict[str, str]:
    """Returns what a reader of a report wants to know first, by name."""
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    own = sys.modules["jaxpar"].__version__  # an import would violate the package's import order
    return {
        "mesh": ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        "devices": f"{mesh.size} {', '.join(kinds)}, {jax.process_count()} process{'es' * (jax.process_count() > 1)}",
        "versions": f"jaxpar {own}, jax {jax.__version__}, Python {platform.python_version()}",
    }


def read_run(folder: Path) -> dict[str, Any]:
    """Returns the data of a run from its folder, at any time during the run or after it.

    Args:
        folder: The run's folder: a recipe's ``--out-dir``.

    Returns:
        "name", "kind", "metrics", "config", and what ``step_data`` returned if the step was compiled.

    Raises:
        ValueError: It is not the folder of a run, or one of its files is not as a run writes it.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in RUN_FILES):
        raise ValueError(
            f"a run must be a folder with a {', '.join(RUN_FILES[:-1])} or {FILE}; got {folder}, which has none. Name a "
            "recipe's --out-dir."
        )
    found = _read_object(folder / FILE)
    try:
        lines = metrics(read_metrics(folder / "metrics.jsonl"))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"a metrics.jsonl must hold a line a step, each an object of numbers; got {folder / 'metrics.jsonl'}, which does "
            f"not ({type(error).__name__}). Name one that a recipe has written."
        ) from error
    return {
        **found,
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
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON; got other text: {error}. Remove it, or name another run.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object; got {type(found).__name__}. Remove it, or name another run.")
    return found
