"""Why a search finds no plan: what its fixed settings break or need, and the nearest settings that would do."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

from jaxpar.fields import arg
from jaxpar.mesh import AXES, DATA, OF_MODELS
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.job import Choice, divisors, fixed_or, is_round
from jaxpar.planner.model_shape import MAX_SEQ
from jaxpar.planner.plans import remat_text
from jaxpar.planner.search import Estimator, fitting_plans


def why_nothing(
    estimator: Estimator, fixed: dict[str, Any], rows_of: Callable[[Cluster], int]
) -> str:
    """Returns why a search finds no choice, and a remedy."""
    needs = _smallest(estimator, fixed)
    if needs is None:
        has_tensor = bool(fixed.get("tensor"))
        needs_rows = _larger_batch(estimator, fixed, estimator.cluster.num_devices) is not None
        if not estimator.refused or (needs_rows and not has_tensor):
            return _undivided(estimator, fixed)
        if refused := _refused_anyhow(estimator, fixed):
            return refused
        # The model cannot be split as fixed; the values must divide the devices too.
        why, _, remedy = next(iter(estimator.refused.values())).rpartition(". ")
        return f"{why}. {_remedy(estimator, fixed) if has_tensor else remedy}"
    choice, num_bytes = needs
    limit = estimator.memory_limit
    gib = lambda size: f"{size / 2**30:,.{0 if size >= 10 * 2**30 else 1}f}".removesuffix(".0")
    free = f", since {estimator.memory_headroom:.0%} of {gib(estimator.cluster.memory_bytes)} stays free"
    free = free if estimator.memory_headroom else ""
    named, remedy = _rows_and_scores(estimator, choice)
    return (
        f"{estimator.shape.name}{named} needs {gib(num_bytes)} GiB a device at {arg(**choice.sizes)}; have {gib(limit)}{free}. "
        f"{remedy or _nearest(estimator, fixed, choice, rows_of)}"
    )


def _refused_anyhow(estimator: Estimator, fixed: dict[str, Any]) -> str | None:
    """Returns why no mesh with the fixed context has the model, whatever its tensor is; None: one has."""
    sizes = {"context": fixed.get("context") or 1, "num_microbatches": estimator.batch_size}
    whole = Choice(**sizes, remat=fixed.get("remat") or False)
    return estimator.refused["tensor=1"] if estimator.analysis(whole) is None else None


def _rows_and_scores(estimator: Estimator, choice: Choice) -> tuple[str, str]:
    """Returns what needs much memory in many models, long rows and stored scores of attention, and what to do about it."""
    analysis, seq = estimator.analysis(choice), estimator.shape.tokens_per_row
    assert analysis is not None
    causes, remedies = [], []
    if seq > MAX_SEQ:
        causes.append(f"rows of {seq:,} tokens")
        remedies.append(f"{arg(seq=MAX_SEQ)}")
    is_narrow = all(leaf.dtype.itemsize == 2 for leaf in analysis.x)  # as fused attention takes it
    if is_narrow and analysis.works["forward"].kernels.score_bytes:
        causes.append("attention that stores its scores")
        remedies.append(f"{arg(attention='flash')}")
    return (
        (f" with {' and '.join(causes)}", f"Choose {' or '.join(remedies)}.")
        if causes
        else ("", "")
    )


def _undivided(estimator: Estimator, fixed: dict[str, Any]) -> str:
    """Returns why no mesh has the fixed settings."""
    count, rows = estimator.cluster.num_devices, estimator.batch_size
    held = (
        arg(**{name: value for name, value in fixed.items() if value is not None}) or "any setting"
    )
    inner = (fixed.get("tensor") or 1) * (fixed.get("stage") or 1)
    data = fixed.get("data") or (count // inner if count % inner == 0 else 0)
    if data and count % (data * inner) == 0 and rows % data:
        larger = _larger_batch(estimator, fixed, data)
        remedy = (
            f"Choose {arg(batch_size=larger)}, or another mesh."
            if larger
            else _remedy(estimator, fixed)
        )
        return (
            f"{arg('data')} must divide the batch; got {arg(data=data)}, the rest of {count} devices with {held}, and {rows} "
            f"rows. {remedy}"
        )
    sizes = {axis: size for axis in AXES if (size := fixed.get(axis))}
    if count % math.prod(sizes.values()):
        return (
            f"the axes must multiply to the devices; got {arg(**sizes)}, which {count} devices cannot be divided into. "
            f"{_remedy(estimator, fixed)}"
        )
    num_experts, own_data = estimator.shape.experts or 1, fixed.get("data") or 1
    if fixed.get("experts") == DATA and num_experts % own_data:
        return (
            f"{arg('data')} must divide the experts where {arg(experts=DATA)} spreads them; got {arg(data=own_data)} and "
            f"{num_experts} experts. {_remedy(estimator, fixed)}"
        )
    return (
        f"the axes must multiply to the devices, stages be at most the layers, and microbatches divide a replica's rows; "
        f"got {held} with {count} devices, {estimator.shape.num_layers} layers and {rows} rows. {_remedy(estimator, fixed)}"
    )


def _remedy(estimator: Estimator, fixed: dict[str, Any]) -> str:
    """Returns values of one fixed setting that fit the others, or else one to leave out."""
    count, held = (
        estimator.cluster.num_devices,
        [name for name, value in fixed.items() if value is not None],
    )
    values = {
        "tensor": divisors(estimator.cluster.devices_per_node),
        "stage": divisors(count),
        "data": divisors(count),
        "num_microbatches": divisors(estimator.batch_size),
    }
    if "num_chunks" in held and _is_possible(estimator, fixed | {"num_chunks": None}):
        return f"Leave {arg('num_chunks')} out."
    for name in filter(held.__contains__, values):
        if fitting := [
            value for value in values[name] if _is_possible(estimator, fixed | {name: value})
        ]:
            return f"Choose {arg(name)} from {', '.join(map(str, fitting))}."
    for number in range(1, len(held) + 1):
        for names in combinations(reversed(held), number):
            if _is_possible(estimator, fixed | dict.fromkeys(names)):
                return f"Leave {' and '.join(map(arg, names))} out."
    larger = _larger_batch(estimator, fixed, count)
    return f"Choose {arg(batch_size=larger)}." if larger else "Choose another number of devices."


def _larger_batch(estimator: Estimator, fixed: dict[str, Any], num_replicas: int) -> int | None:
    """Returns the next batch that so many replicas divide, if the settings are possible with it."""
    unit = num_replicas * (fixed.get("num_microbatches") or 1)
    rows = -(-estimator.batch_size // unit) * unit
    return rows if _is_possible(replace(estimator, batch_size=rows), fixed) else None


def _is_possible(estimator: Estimator, fixed: dict[str, Any]) -> bool:
    choice = next(estimator.candidates(fixed), None)
    if choice is None:
        return False
    of_one_row = replace(choice, num_microbatches=estimator.batch_size // choice.num_replicas)
    return estimator.analysis(of_one_row) is not None


def _smallest(estimator: Estimator, fixed: dict[str, Any]) -> tuple[Choice, int] | None:
    """Returns the choice that needs the least memory, and its bytes."""
    smallest: dict[Choice, Choice] = {}  # more microbatches of fewer rows need no more memory
    for choice in estimator.candidates(fixed):
        alike = replace(choice, num_microbatches=1)
        if alike not in smallest or choice.num_microbatches > smallest[alike].num_microbatches:
            smallest[alike] = choice
    variants = [
        replace(choice, zero=zero)
        for choice in map(estimator.balanced, smallest.values())
        for zero in fixed_or(fixed, "zero", (0, 1, 2, 3) if choice.parts() > 1 else (0,))
        if estimator.analysis(choice) is not None
    ]
    sized = [(estimator.quick_bytes(variant), i) for i, variant in enumerate(variants)]
    return (variants[min(sized)[1]], min(sized)[0]) if sized else None


def _nearest(
    estimator: Estimator, fixed: dict[str, Any], choice: Choice, rows_of: Callable[[Cluster], int]
) -> str:
    """Returns the nearest setting that fits: with one fixed setting released, then on any mesh, then with more nodes."""
    for free in (
        "remat",
        "zero",
        "schedule",
        "num_microbatches",
        "num_chunks",
        "stage",
        "data",
        "tensor",
    ):
        released = {free, "data"} if free in OF_MODELS else {free}
        looser = {name: value for name, value in fixed.items() if name not in released}
        if fixed.get(free) is None or not (found := fitting_plans(estimator, looser, 1000)):
            continue
        nearest = found[0].choice
        if free in OF_MODELS:
            wanted = getattr(choice, free)
            nearest = min(
                (plan.choice for plan in found), key=lambda each: abs(getattr(each, free) - wanted)
            )
        if free == "remat":
            return f"Nearest: remat={nearest.remat}, by flag --remat {remat_text(nearest.remat)}."
        if free in OF_MODELS and fixed.get("data"):
            return f"Nearest: {arg(**nearest.sizes)}."
        return f"Nearest: {arg(**{free: getattr(nearest, free)})}."
    anywhere = {name: value for name, value in fixed.items() if name not in AXES}
    if any(fixed.get(axis) for axis in OF_MODELS) and (
        found := fitting_plans(estimator, anywhere, 1)
    ):
        return f"Nearest: {arg(**found[0].choice.sizes)}."
    num_nodes = _fewest_nodes(estimator, fixed, rows_of)
    if num_nodes is not None:
        return f"Nearest: {num_nodes} nodes."
    held = [axis for axis in AXES if fixed.get(axis)]
    num_nodes = _fewest_nodes(estimator, anywhere, rows_of) if held else None
    if num_nodes is None:
        return "Choose devices with more memory."
    return f"Nearest: {num_nodes} nodes, without a fixed {' or '.join(held)}."


def _fewest_nodes(
    estimator: Estimator, fixed: dict[str, Any], rows_of: Callable[[Cluster], int]
) -> int | None:
    """Returns a round number of nodes that fits, the next if twice as many do; None if 32 times as many do not fit."""

    def fits(num_nodes: int) -> bool:
        cluster = replace(estimator.cluster, num_nodes=num_nodes)
        larger = replace(estimator, cluster=cluster, batch_size=rows_of(cluster))
        return bool(fitting_plans(larger, fixed, 1))

    times = (estimator.cluster.num_nodes * more for more in (2, 4, 8, 16, 32))
    enough = next(filter(fits, times), None)
    if enough is None:
        return None
    fewer = filter(is_round, range(enough // 2 + 1, enough))
    return next(filter(fits, fewer), enough)
