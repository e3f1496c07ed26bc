"""Why a search finds no plan: what its fixed settings break or need, and the nearest settings that would do."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

from jaxpar.fields import arg
from jaxpar.mesh import AXES, DATA, FROM_SLOWEST, ROWS
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.fixed import check_fixed
from jaxpar.planner.job import Choice, divisors, fixed_or, is_round
from jaxpar.planner.model_shape import MAX_SEQ, ModelShape
from jaxpar.planner.plans import Plan, remat_text
from jaxpar.planner.search import SURPLUS, Estimator, fitting_plans
from jaxpar.schedule import NUM_CHUNKS

USUAL_HEADROOM = 0.1  # no smaller one is advised
LEAST_SEQ = 512  # no shorter rows are
# The settings in the order in which another value is looked for, those that change least first.
RELEASED = (
    "remat",
    "zero",
    "schedule",
    "num_microbatches",
    "num_chunks",
    "experts",
    *FROM_SLOWEST,
)
RowsOf = Callable[[ModelShape, Cluster], int]


def why_nothing(estimator: Estimator, fixed: dict[str, Any], rows_of: RowsOf) -> str:
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
    percent = f"{100 * estimator.memory_headroom:.4g}%"
    free = f", since {percent} of {gib(estimator.cluster.memory_bytes)} stays free"
    free = free if estimator.memory_headroom else ""
    named, remedy = _rows_and_scores(estimator, fixed, choice, rows_of)
    parts = estimator.memory(choice, quick=True)
    kind = max(parts, key=parts.__getitem__)
    most = f"The largest part: {kind}, {gib(parts[kind])} GiB."
    return (
        f"{estimator.shape.name}{named} needs {gib(num_bytes)} GiB a device at {arg(**choice.sizes)}; have {gib(limit)}{free}. "
        f"{most} {remedy or _nearest(estimator, fixed, choice, rows_of)}"
    )


def _refused_anyhow(estimator: Estimator, fixed: dict[str, Any]) -> str | None:
    """Returns why no mesh with the fixed context has the model, whatever its tensor is; None: one has."""
    sizes = {"context": fixed.get("context") or 1, "num_microbatches": estimator.batch_size}
    whole = Choice(**sizes, remat=fixed.get("remat") or False)
    return estimator.refused["tensor=1"] if estimator.analysis(whole) is None else None


def _rows_and_scores(
    estimator: Estimator, fixed: dict[str, Any], choice: Choice, rows_of: RowsOf
) -> tuple[str, str]:
    """Returns what needs much memory in many models, long rows and stored scores of attention, and a change of them that fits.

    The change is "" where none does.
    """
    analysis, seq = estimator.analysis(choice), estimator.shape.tokens_per_row
    assert analysis is not None
    causes: list[str] = []
    changes: list[dict[str, Any]] = []
    if seq > MAX_SEQ:
        causes.append(f"rows of {seq:,} tokens")
        changes.append({"seq": MAX_SEQ})
    is_narrow = all(leaf.dtype.itemsize == 2 for leaf in analysis.x)  # as fused attention takes it
    if is_narrow and analysis.works["forward"].kernels.score_bytes:
        causes.append("attention that stores its scores")
        changes.append({"attention": "flash"})
    if not causes:
        return "", ""
    named = f" with {' and '.join(causes)}"
    helping = [each for each in changes if _helps(estimator, fixed, each, rows_of)]
    if helping:
        return named, f"Choose {' or '.join(arg(**each) for each in helping)}."
    together = {name: value for each in changes for name, value in each.items()}
    if len(changes) > 1 and _helps(estimator, fixed, together, rows_of):
        return named, f"Choose {' and '.join(arg(**each) for each in changes)}."
    return named, ""


def _helps(
    estimator: Estimator, fixed: dict[str, Any], changes: dict[str, Any], rows_of: RowsOf
) -> bool:
    """Returns whether a plan fits with other rows or another attention; not for a model for which they cannot be chosen."""
    if estimator.shape.remake is None:
        return False
    shape = estimator.shape.remake(**changes)
    rows = rows_of(shape, estimator.cluster)
    empty: dict[str, Any] = {name: {} for name in ("_analyses", "_states", "refused")}
    other = replace(estimator, shape=shape, batch_size=rows, **empty)
    return _is_taken(other, fixed) and bool(_plans(other, fixed, 1))


def _undivided(estimator: Estimator, fixed: dict[str, Any]) -> str:
    """Returns why no mesh has the fixed settings."""
    count, rows, shape = estimator.cluster.num_devices, estimator.batch_size, estimator.shape
    given = {name: value for name, value in fixed.items() if value is not None}
    held = arg(**given) or "any setting"
    sizes = {axis: given[axis] for axis in AXES if axis in given}
    rest, left = divmod(count, math.prod(sizes.values()))
    if left:
        return (
            f"the axes must multiply to the devices; got {arg(**sizes)}, which {count} devices cannot be divided into. "
            f"{_remedy(estimator, fixed)}"
        )
    num_chunks = given.get("num_chunks") or NUM_CHUNKS.get(given.get("schedule", ""), 1)
    if given.get("stage", 1) * num_chunks > shape.num_layers and "stage" in given:
        names = ("stage", "schedule", "num_chunks")
        of_pipeline = arg(**{name: given[name] for name in names if name in given})
        is_told = num_chunks > 1 and "num_chunks" not in given
        told = f", {num_chunks} chunks a stage," if is_told else ""
        return (
            f"each stage must have a layer for each of its chunks; got {of_pipeline}{told} and {shape.num_layers} layers. "
            f"{_remedy(estimator, fixed)}"
        )
    over = {name: given.get(name, 1) for name in ROWS} | {DATA: given.get(DATA, rest)}
    over = {name: size for name, size in over.items() if name == DATA or size > 1}
    num_replicas, microbatches = math.prod(over.values()), given.get("num_microbatches", 1)
    larger = _larger_batch(estimator, fixed, num_replicas)
    if rows % num_replicas:
        of_rest = "" if DATA in given else f", the rest of {count} devices with {held}"
        remedy = f"Choose {arg(batch_size=larger)}, or another mesh." if larger else ""
        return (
            f"{' times '.join(map(arg, over))} must divide the batch; got {arg(**over)}{of_rest}, and {rows} rows. "
            f"{remedy or _remedy(estimator, fixed)}"
        )
    if rows // num_replicas % microbatches:
        remedy = f"Choose {arg(batch_size=larger)}." if larger else _remedy(estimator, fixed)
        return (
            f"{arg('num_microbatches')} must divide the rows of a replica; got {arg(num_microbatches=microbatches)}, and "
            f"{rows} rows over {num_replicas} replica{'s' * (num_replicas > 1)}. {remedy}"
        )
    num_experts, own_data = shape.experts or 1, given.get(DATA, 1)
    if given.get("experts") == DATA and num_experts % own_data:
        return (
            f"{arg('data')} must divide the experts where {arg(experts=DATA)} spreads them; got {arg(data=own_data)} and "
            f"{num_experts} experts. {_remedy(estimator, fixed)}"
        )
    return (
        "the axes must multiply to the devices, each stage must have a layer for each of its chunks, and microbatches must "
        f"divide a replica's rows; got {held} with {count} devices, {shape.num_layers} layers and {rows} rows. "
        f"{_remedy(estimator, fixed)}"
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


def _is_taken(estimator: Estimator, fixed: dict[str, Any]) -> bool:
    """Returns whether ``plan`` takes fixed settings, before it searches."""
    shape, count = estimator.shape, estimator.cluster.num_devices
    try:
        check_fixed(fixed, estimator.executor, estimator.batch_size, 1, shape, count)
    except ValueError:
        return False
    return True


def _is_possible(estimator: Estimator, fixed: dict[str, Any]) -> bool:
    """Returns whether a mesh has fixed settings, whatever memory it needs."""
    if not _is_taken(estimator, fixed):
        return False
    choice = next(estimator.candidates(fixed), None)
    if choice is None:
        return False
    of_one_row = replace(choice, num_microbatches=estimator.batch_size // choice.num_replicas)
    return estimator.analysis(of_one_row) is not None


def _smallest(estimator: Estimator, fixed: dict[str, Any]) -> tuple[Choice, int] | None:
    """Returns the choice that needs the least memory, and its bytes."""
    smallest: dict[Choice, Choice] = {}  # more microbatches of fewer rows need no more memory
    single: list[Choice] = []  # but a single one, whose gradients are not added to others
    for choice in estimator.candidates(fixed):
        if choice.num_microbatches == choice.stage == 1 and estimator.may_fit(choice):
            single.append(choice)
        alike = replace(choice, num_microbatches=1)
        if alike not in smallest or choice.num_microbatches > smallest[alike].num_microbatches:
            smallest[alike] = choice
    variants = [
        replace(choice, zero=zero)
        for choice in map(estimator.balanced, [*smallest.values(), *single])
        for zero in fixed_or(fixed, "zero", (0, 1, 2, 3) if choice.parts() > 1 else (0,))
        if estimator.analysis(choice) is not None
    ]
    sized = [(estimator.quick_bytes(variant), i) for i, variant in enumerate(variants)]
    return (variants[min(sized)[1]], min(sized)[0]) if sized else None


def _plans(estimator: Estimator, fixed: dict[str, Any], top: int) -> list[Plan]:
    """Returns the plans of ``fitting_plans``, without its search where even the smallest choice does not fit."""
    found = _smallest(estimator, fixed)
    if found is None or found[1] > SURPLUS * estimator.memory_limit:
        return []
    return fitting_plans(estimator, fixed, top)


def _nearest(estimator: Estimator, fixed: dict[str, Any], choice: Choice, rows_of: RowsOf) -> str:
    """Returns the nearest setting that fits.

    It is looked for with one fixed setting released, then on any mesh, then without any fixed setting, then with less memory
    that stays free, then with more nodes.
    """
    held = {name: value for name, value in fixed.items() if value is not None}
    axes = [axis for axis in AXES if axis in held]
    for free in filter(held.__contains__, RELEASED):
        released = [free, DATA] if free in AXES and free != DATA and DATA in held else [free]
        if found := _fitting(estimator, held, released, 1000):
            nearest = found[0]
            if free in AXES:
                wanted = getattr(choice, free)
                nearest = min(found, key=lambda each: abs(getattr(each, free) - wanted))
            return f"Nearest: {_values(nearest, released)}."
    if len({*axes} - {DATA}) > 1:
        # The fastest mesh may have no pipeline, for which a schedule is fixed.
        top = 1 if held.keys().isdisjoint(("schedule", "num_chunks")) else 1000
        if found := _fitting(estimator, held, axes, top):
            return f"Nearest: {_values(found[0], axes)}."
    if len(held) > max(1, len(axes)) and _plans(estimator, {}, 1):
        return f"Leave {' and '.join(map(arg, held))} out."
    if headroom := _smaller_headroom(estimator, choice):
        return f"Nearest: {arg(memory_headroom=headroom)}."
    shorter = _shorter_rows(estimator, fixed, rows_of)
    num_nodes = _fewest_nodes(estimator, fixed, rows_of)
    if num_nodes is not None:
        return f"Nearest: {shorter}{num_nodes} nodes."
    anywhere = {name: value for name, value in held.items() if name not in AXES}
    num_nodes = _fewest_nodes(estimator, anywhere, rows_of) if axes else None
    if num_nodes is None:
        return "Choose devices with more memory."
    return f"Nearest: {num_nodes} nodes, without a fixed {' or '.join(axes)}."


def _fitting(
    estimator: Estimator, held: dict[str, Any], released: list[str], top: int
) -> list[Choice]:
    """Returns choices that fit with other values of the released settings, which ``plan`` takes beside the others."""
    others = {name: value for name, value in held.items() if name not in released}
    found = [plan.choice for plan in _plans(estimator, others, top)]
    values = lambda choice: {name: getattr(choice, name) for name in released}
    return [choice for choice in found if _is_taken(estimator, others | values(choice))]


def _values(choice: Choice, names: list[str]) -> str:
    """Returns the values of some settings of a choice as text."""
    if names == ["remat"]:
        return f"remat={choice.remat}, by flag --remat {remat_text(choice.remat)}"
    return arg(**{name: getattr(choice, name) for name in names})


def _smaller_headroom(estimator: Estimator, choice: Choice) -> float | None:
    """Returns the share of the memory that may stay free for a choice to fit; None where that is less than usual."""
    share = 1 - estimator.quick_bytes(choice) / estimator.cluster.memory_bytes
    smaller = math.floor(100 * share) / 100
    if not USUAL_HEADROOM <= smaller < estimator.memory_headroom:
        return None
    return smaller if replace(estimator, memory_headroom=smaller).price(choice) else None


def _shorter_rows(estimator: Estimator, fixed: dict[str, Any], rows_of: RowsOf) -> str:
    """Returns a half or a quarter of the length of rows that fits, as text to go on after; "" if none does."""
    seq = estimator.shape.tokens_per_row
    shorter = [seq // part for part in (2, 4) if seq // part >= LEAST_SEQ]
    fitting = (each for each in shorter if _helps(estimator, fixed, {"seq": each}, rows_of))
    found = next(fitting, None)
    return "" if found is None else f"{arg(seq=found)}, or "


def _fewest_nodes(estimator: Estimator, fixed: dict[str, Any], rows_of: RowsOf) -> int | None:
    """Returns a round number of nodes that fits, the next if twice as many do; None if 32 times as many do not fit."""

    def fits(num_nodes: int) -> bool:
        cluster = replace(estimator.cluster, num_nodes=num_nodes)
        larger = replace(estimator, cluster=cluster, batch_size=rows_of(estimator.shape, cluster))
        return bool(_plans(larger, fixed, 1))

    times = (estimator.cluster.num_nodes * more for more in (2, 4, 8, 16, 32))
    enough = next(filter(fits, times), None)
    if enough is None:
        return None
    fewer = filter(is_round, range(enough // 2 + 1, enough))
    return next(filter(fits, fewer), enough)
