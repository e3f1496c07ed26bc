"""Why a search finds no plan: the fixed settings do not divide the job, or none fits. Names the nearest that fits."""

from dataclasses import replace
from typing import Any

from jaxpar.planner.choice import Choice, divisors, held_or
from jaxpar.planner.estimator import Estimator
from jaxpar.planner.render import remat_text
from jaxpar.planner.search import best_plans

AXES = ("data", "stage", "tensor")


def why_nothing(estimator: Estimator, fixed: dict[str, Any]) -> str:
    """Returns why a search finds no choice, and a remedy."""
    needs = _smallest(estimator, fixed)
    if needs is None:
        refused = next((why for key, why in estimator.refused.items() if isinstance(key, str)), None)
        return _of_model(estimator, fixed, refused) if refused else _undivided(estimator, fixed)
    choice, num_bytes = needs
    name, limit = estimator.shape.name, estimator.memory_limit
    gib = lambda size: f"{size / 2**30:,.{0 if size >= 10 * 2**30 else 1}f}".removesuffix(".0")
    free = f", since {estimator.memory_headroom:.0%} of {gib(estimator.cluster.memory_bytes)} stays free"
    free = free if estimator.memory_headroom else ""
    return (
        f"{name} needs {gib(num_bytes)} GiB a device at {choice.axes()}; have {gib(limit)}{free}. "
        f"{_nearest(estimator, fixed, choice)}"
    )


def _of_model(estimator: Estimator, fixed: dict[str, Any], refused: str) -> str:
    """Returns why the model cannot be split as fixed, with the values that divide the devices too."""
    why, _, remedy = refused.rpartition(". ")
    return f"{why}. {_remedy(estimator, fixed) if fixed.get('tensor') else remedy}"


def _undivided(estimator: Estimator, fixed: dict[str, Any]) -> str:
    """Returns why no mesh has the fixed settings."""
    count, rows = estimator.cluster.num_devices, estimator.batch_size
    held = ", ".join(f"{name}={value}" for name, value in fixed.items() if value is not None) or "any setting"
    inner = (fixed.get("tensor") or 1) * (fixed.get("stage") or 1)
    data = fixed.get("data") or (count // inner if count % inner == 0 else 0)
    if data and count % (data * inner) == 0 and rows % data:
        return (
            f"data must divide the batch; got data={data}, the rest of {count} devices with {held}, and {rows} rows. Choose "
            f"batch_size={-(-rows // data) * data}, or another mesh."
        )
    return (
        f"the axes must multiply to the devices, stages be at most the layers, and microbatches divide a replica's rows; "
        f"got {held} with {count} devices, {estimator.shape.num_layers} layers and {rows} rows. {_remedy(estimator, fixed)}"
    )


def _remedy(estimator: Estimator, fixed: dict[str, Any]) -> str:
    """Returns values of one fixed setting that fit the others, or else one to leave out."""
    count, held = estimator.cluster.num_devices, [name for name, value in fixed.items() if value is not None]
    values = {
        "tensor": divisors(estimator.cluster.devices_per_node),
        "stage": divisors(count),
        "data": divisors(count),
        "num_microbatches": divisors(estimator.batch_size),
    }
    if "num_chunks" in held and _is_possible(estimator, fixed | {"num_chunks": None}):
        return "Leave num_chunks out."
    for name in filter(held.__contains__, values):
        if fitting := [value for value in values[name] if _is_possible(estimator, fixed | {name: value})]:
            return f"Choose {name} from {', '.join(map(str, fitting))}."
    for name in reversed(held):
        if _is_possible(estimator, fixed | {name: None}):
            return f"Leave {name} out."
    return "Choose another batch_size, or fix fewer settings."


def _is_possible(estimator: Estimator, fixed: dict[str, Any]) -> bool:
    choice = next(estimator.divided(fixed), None)
    if choice is None:
        return False
    of_one_row = replace(choice, num_microbatches=estimator.batch_size // choice.data)
    return estimator.analysis(of_one_row) is not None


def _smallest(estimator: Estimator, fixed: dict[str, Any]) -> tuple[Choice, int] | None:
    """Returns the choice that needs the least memory, and its bytes."""
    variants = [
        replace(choice, zero=zero)
        for choice in estimator.choices(fixed)
        for zero in held_or(fixed, "zero", (0, 1, 2, 3) if choice.data > 1 else (0,))
        if estimator.analysis(choice) is not None
    ]
    sized = [(sum(estimator.memory(variant, quick=True).values()), i) for i, variant in enumerate(variants)]
    return (variants[min(sized)[1]], min(sized)[0]) if sized else None


def _nearest(estimator: Estimator, fixed: dict[str, Any], choice: Choice) -> str:
    """Returns the nearest setting that fits: with one fixed setting released, then on any mesh, then with more nodes."""
    for free in ("remat", "zero", "schedule", "num_microbatches", "num_chunks", "stage", "data", "tensor"):
        looser = {name: value for name, value in fixed.items() if name != free and (free not in AXES or name != "data")}
        if fixed.get(free) is None or not (found := best_plans(estimator, looser, 1000)):
            continue
        same = lambda plan, free=free: abs(getattr(plan.choice, free) - getattr(choice, free)) if free in AXES else 0
        nearest = min(found, key=same).choice
        if free == "remat":
            return f"Nearest: remat={nearest.remat}, by flag --remat {remat_text(nearest.remat)}."
        if free in AXES and fixed.get("data"):
            return f"Nearest: {nearest.axes()}."
        return f"Nearest: {free}={getattr(nearest, free)}."
    anywhere = {name: value for name, value in fixed.items() if name not in AXES}
    if any(fixed.get(axis) for axis in AXES) and (found := best_plans(estimator, anywhere, 1)):
        return f"Nearest: {found[0].choice.axes()}."
    for more in (2, 4, 8, 16, 32):
        larger = replace(
            estimator,
            cluster=replace(estimator.cluster, num_nodes=more * estimator.cluster.num_nodes),
            _states={},
            refused={},
        )
        if best_plans(larger, anywhere, 1):
            held = " or ".join(axis for axis in AXES if fixed.get(axis))
            return f"Nearest: {larger.cluster.num_nodes} nodes" + (f", without a fixed {held}." if held else ".")
    return "Choose devices with more memory."
