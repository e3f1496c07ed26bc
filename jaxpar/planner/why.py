"""Why no plan is left: the settings that are held divide nothing, or nothing fits; and the nearest that would."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxpar.planner.choice import SCHEDULES, Choice, divisors, held_or

if TYPE_CHECKING:
    from jaxpar.planner.search import Search

AXES = ("data", "stage", "tensor")


def why_nothing(search: "Search", fixed: dict[str, Any]) -> str:
    """Returns why a search finds no choice, and what to do about it."""
    needs = _smallest(search, fixed)
    if needs is None:
        refused = next((why for key, why in search.refused.items() if isinstance(key, str)), None)
        return refused or _undivided(search, fixed)
    choice, num_bytes = needs
    gib = lambda size: f"{size / 2**30:,.0f}"
    return (
        f"{search.shape.name} needs {gib(num_bytes)} GiB a device at {choice.axes()}; have {gib(search.cluster.memory_bytes)}. "
        f"{_nearest(search, fixed, choice)}"
    )


def _undivided(search: "Search", fixed: dict[str, Any]) -> str:
    """Why the settings that are held leave no mesh."""
    count, rows = search.cluster.num_devices, search.batch_size
    held = ", ".join(f"{name}={value}" for name, value in fixed.items() if value is not None) or "any setting"
    inner = (fixed.get("tensor") or 1) * (fixed.get("stage") or 1)
    data = fixed.get("data") or (count // inner if count % inner == 0 else 0)
    if data and count % (data * inner) == 0 and rows % data:
        return (
            f"data must divide the batch; got data={data}, which {held} leave of {count} devices, and {rows} rows. Choose "
            f"batch_size={-(-rows // data) * data}, or another mesh."
        )
    return (
        f"the axes must multiply to the devices, stages be at most the layers, and microbatches divide a replica's rows; "
        f"got {held} with {count} devices, {search.shape.num_layers} layers and {rows} rows. {_remedy(search, fixed)}"
    )


def _remedy(search: "Search", fixed: dict[str, Any]) -> str:
    """What the first of the settings that cannot be held may be."""
    count, layers, rows = search.cluster.num_devices, search.shape.num_layers, search.batch_size
    sizes = {
        "tensor": divisors(search.cluster.devices_per_node),
        "stage": [n for n in divisors(count) if n <= layers],
        "data": [n for n in divisors(count) if rows % n == 0],
    }
    for axis, fitting in sizes.items():
        if fixed.get(axis) not in (None, *fitting):
            return f"Choose {axis} from {_words(fitting)}."
    axes = [axis for axis in AXES if fixed.get(axis)]
    product = math.prod(fixed[axis] for axis in axes)
    if count % product or (len(axes) == len(AXES) and product != count):
        return f"Leave {axes[0]} out."
    usual = dict(SCHEDULES).get(fixed.get("schedule") or "", 1)
    if fixed.get("num_chunks") not in (None, usual) and fixed.get("schedule") != "interleaved":
        return "Leave num_chunks out."
    if (fixed.get("stage") or 1) * (fixed.get("num_chunks") or usual) > layers:
        return f"Choose stage times num_chunks of at most {layers}."
    if fixed.get("num_microbatches") and rows % fixed["num_microbatches"]:
        return f"Choose num_microbatches from {_words(divisors(rows))}."
    return "Leave one of them out, or choose another batch_size."


def _words(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _smallest(search: "Search", fixed: dict[str, Any]) -> tuple[Choice, int] | None:
    """The choice that needs least memory, and what it needs."""
    variants = [
        replace(choice, zero=zero)
        for choice in search.choices(fixed)
        for zero in held_or(fixed, "zero", (0, 1, 2, 3) if choice.data > 1 else (0,))
        if search.analysis(choice) is not None
    ]
    sized = [(sum(search.memory(variant, quick=True).values()), i) for i, variant in enumerate(variants)]
    return (variants[min(sized)[1]], min(sized)[0]) if sized else None


def _nearest(search: "Search", fixed: dict[str, Any], choice: Choice) -> str:
    """The setting nearest to one that does not fit: one thing let go, then any mesh, then more nodes."""
    for free in ("remat", "zero", "schedule", "num_microbatches", "num_chunks", "stage", "data", "tensor"):
        looser = {name: value for name, value in fixed.items() if name != free and (free not in AXES or name != "data")}
        if fixed.get(free) is None or not (found := search.best(looser, 1000)):
            continue
        same = lambda plan, free=free: abs(getattr(plan.choice, free) - getattr(choice, free)) if free in AXES else 0
        nearest = min(found, key=same).choice
        if free == "remat":
            return f"Nearest: remat={nearest.remat}, by flag --remat {'yes' if nearest.remat else 'no'}."
        if free in AXES and fixed.get("data"):
            return f"Nearest: {nearest.axes()}."
        return f"Nearest: {free}={getattr(nearest, free)}."
    anywhere = {name: value for name, value in fixed.items() if name not in AXES}
    if any(fixed.get(axis) for axis in AXES) and (found := search.best(anywhere, 1)):
        return f"Nearest: {found[0].choice.axes()}."
    for more in (2, 4, 8, 16, 32):
        larger = replace(
            search, cluster=replace(search.cluster, num_nodes=more * search.cluster.num_nodes), _states={}, refused={}
        )
        if larger.best(anywhere, 1):
            held = " or ".join(axis for axis in AXES if fixed.get(axis))
            return f"Nearest: {larger.cluster.num_nodes} nodes" + (f", without {held} held." if held else ".")
    return "Choose devices with more memory."
