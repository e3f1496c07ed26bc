"""Data of a list of plans: a row for each, and for the best its timeline, shards, memory and traffic."""

import sys
from collections.abc import Sequence
from typing import Any

import optax

from jaxpar.planner import Cluster, ModelShape, Plan
from jaxpar.planner.at_rest import AtRest
from jaxpar.report.shards import shards
from jaxpar.report.timeline import timeline

SETTINGS = (
    "data",
    "stage",
    "tensor",
    "schedule",
    "num_microbatches",
    "num_chunks",
    "zero",
    "remat",
    "executor",
    "software",
)


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
    best = plans[0]
    return {
        "kind": "plan",
        "name": name,
        "facts": _facts(best, model, machines),
        "plans": [plan.as_json() for plan in plans],
        "step_time": {f"{rank}: {plan.choice.axes()}": plan.time_by_part for rank, plan in enumerate(plans, 1)},
        "timeline": _timeline(best),
        "shards": shards(AtRest(model, optax.adam(1e-4), best.choice).params, best.choice.mesh),
        "memory": {"bars": _bars(best), "limit_bytes": machines.memory_bytes, "total_bytes": best.memory_bytes},
        "traffic": {"axes": dict(best.bytes_moved), "collectives": [], "is_known": True},
        "config": {name: best.as_json()[name] for name in (*SETTINGS, "layers_per_virtual_stage")},
        "problems": {},
    }


def _facts(best: Plan, model: ModelShape, machines: Cluster) -> dict[str, str]:
    num_rows = best.tokens // model.tokens_per_row
    own = sys.modules["jaxpar"].__version__  # an import would violate the package's import order
    per_device = lambda flops: flops / best.step_seconds / 1e12
    return {
        "model": f"{model.num_params / 1e9:.4g} billion parameters, {num_rows} rows of {model.tokens_per_row} tokens a step",
        "rate": f"{best.tokens / best.step_seconds:,.0f} tokens/s",
        "TFLOP/s of a device": f"{per_device(best.flops):.0f}, of which useful {per_device(best.useful_flops):.0f}",
        "devices": f"{machines.num_nodes} x {machines.devices_per_node} {machines.name}",
        "versions": f"jaxpar {own}",
    }


def _timeline(plan: Plan) -> dict[str, Any] | None:
    """Returns the timeline of as many microbatches as show the steady state, in the form that the plan's executor runs."""
    choice = plan.choice
    if choice.stage == 1:
        return None
    form, timing = ("published", "free") if plan.is_ideal else (None, "lockstep")
    table = choice.table(choice.num_simulated, form)
    return timeline(table, timing=timing, of_microbatches=choice.num_microbatches)


def _bars(plan: Plan) -> dict[str, dict[str, int]]:
    """Returns the bytes by kind of each stage, once if all stages are alike."""
    first, *others = plan.bytes_by_stage.values()
    alike = others and all(parts == first for parts in others)
    return {"each stage": first} if alike else plan.bytes_by_stage
