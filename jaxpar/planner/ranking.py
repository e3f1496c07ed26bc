"""The planner's public functions: `plan` ranks ways to train a model on a cluster, `price` estimates one choice.

A plan names the changes that would help it most, of one setting, of the batch or of the machines, by how many more tokens a
second they give.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.fields import arg, check_kind
from jaxpar.mesh import AXES, abstract_mesh
from jaxpar.models.transformer import TransformerConfig
from jaxpar.planner.cluster import Cluster, Links
from jaxpar.planner.fixed import check_fixed, check_has_effect
from jaxpar.planner.job import JAXPAR, Assumptions, Choice, Software, is_round
from jaxpar.planner.model_shape import ModelShape, transformer_shape
from jaxpar.planner.no_plan import why_nothing
from jaxpar.planner.plans import Gain, Plan, why_best, why_not
from jaxpar.planner.search import Estimator, best_plans
from jaxpar.schedule import NAMED, NUM_CHUNKS
from jaxpar.step.optimizer_state import Optimizer
from jaxpar.step.position_checks import check_positions
from jaxpar.step.row_checks import check_rows

DEFAULT_TOKENS = 2**22
TOP = 10  # plans that are returned by default
COUNT, LEAST = 3, 0.005  # gains to report, and the smallest
NO_RECOMPUTATION, SCORES_ALONE = "no recomputation", "recomputing attention scores alone"


def plan(
    model_shape: str | TransformerConfig | ModelShape,
    cluster: Cluster,
    *,
    batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    executor: str = "spmd",
    assumed: Assumptions = Assumptions(),  # noqa: B008, it is frozen
    memory_headroom: float = 0.1,
    top: int = TOP,
    **fixed: Any,
) -> list[Plan]:
    """Returns ways to train a model on a cluster, the fastest first: for each mesh the best settings.

    Args:
        model_shape: A transformer preset's name, a TransformerConfig, or a ModelShape, of a model of your own.
        cluster: The machines: ``jaxpar.planner.cluster("a100-80gb", num_nodes=48)``, or a ``Cluster`` of your own.
        batch_size: Rows of a step, over all replicas; by default about 4 million tokens, which the devices divide. Needed where
            rows have one token each.
        optimizer: By default Adam.
        executor: "spmd": rank by the time in lock-step. "mpmd": rank by the time of free-running stages.
        assumed: Assumed efficiencies.
        memory_headroom: The share of a device's memory that a plan leaves free, since CUDA, NCCL and fragmentation take it.
        top: The largest number of plans to return.
        **fixed: Settings to fix: replica, data, context, stage, tensor, schedule, num_chunks, num_microbatches, zero, remat,
            experts.

    Raises:
        ValueError: A setting is unknown or out of range; or nothing fits: the message states the memory that is needed and
            the nearest setting that fits; or the loss depends on how one of the plans splits rows or sequences.

    Example:
        >>> from jaxpar.planner import cluster
        >>> best = plan("gpt2", cluster("h100", devices_per_node=2), batch_size=8)[0]
        >>> best.choice.data, best.choice.stage, best.choice.tensor
        (2, 1, 1)
    """
    shape = model_shape if isinstance(model_shape, ModelShape) else transformer_shape(model_shape)
    check_kind((Cluster,), "a Cluster", 'Use jaxpar.planner.cluster("h100"), say.', cluster=cluster)
    _check_fp8(shape, cluster)
    if batch_size is None and shape.tokens_per_row == 1:
        raise ValueError(
            f"a plan must know the rows of a step, by default {DEFAULT_TOKENS} tokens; got a model whose rows have one token "
            f"each, and no {arg('batch_size')}. Give it, over all replicas, such as {arg(batch_size=256)}; or the tokens of a "
            "row: ModelShape(tokens_per_row=...)."
        )

    def rows_of(shape: ModelShape, cluster: Cluster) -> int:
        return _usual_rows(shape, cluster) if batch_size is None else batch_size

    rows = rows_of(shape, cluster)
    if not 0 <= memory_headroom < 1:
        raise ValueError(
            f"{arg('memory_headroom')} must be a share of the memory, at least 0 and less than 1; got {memory_headroom}. "
            "Choose 0.1."
        )
    estimator = Estimator(
        shape,
        cluster,
        rows,
        optimizer or optax.adam(1e-4),
        executor,
        assumed,
        memory_headroom=memory_headroom,
    )
    check_fixed(fixed, executor, rows, top, shape, cluster.num_devices)
    # As many for any smaller number, so that the best is the same.
    plans = best_plans(estimator, fixed, max(TOP, top))
    if not plans:
        raise ValueError(why_nothing(estimator, fixed, rows_of))
    check_has_effect(estimator, fixed)
    for each in plans:  # also those beyond top: which are shown decides nothing
        _check_split(shape, each.choice, rows)
    best = plans[0]
    whys = [why_best(best, plans[1:]), *(why_not(each, best) for each in plans[1:])]
    pairs = zip(plans[:top], whys, strict=False)
    return [replace(each, why=why, gains=gains_of(estimator, each.choice)) for each, why in pairs]


def price(
    model_shape: str | TransformerConfig | ModelShape,
    cluster: Cluster,
    choice: Choice,
    *,
    batch_size: int,
    optimizer: Optimizer | None = None,
    executor: str = "spmd",
    assumed: Assumptions = Assumptions(),  # noqa: B008, it is frozen
    software: Software = JAXPAR,
) -> Plan:
    """Returns the plan of one choice of your own, whether it fits the memory or not.

    Args:
        model_shape: As for ``plan``.
        cluster: The machines.
        choice: Mesh axes and settings.
        batch_size: Rows of a step, over all replicas.
        optimizer: By default Adam.
        executor: As for ``plan``.
        assumed: Assumed efficiencies.
        software: What others' software does, for comparison; by default jaxpar.

    Raises:
        ValueError: The choice does not divide the model or the batch, or the loss depends on how it splits rows or sequences.
    """
    shape = model_shape if isinstance(model_shape, ModelShape) else transformer_shape(model_shape)
    _check_fp8(shape, cluster)
    count = choice.num_replicas * choice.num_microbatches
    if batch_size % count:
        raise ValueError(
            f"data times num_microbatches must divide batch_size; got {choice.num_replicas} times "
            f"{choice.num_microbatches} and batch_size={batch_size}. Choose a batch_size of "
            f"{max(1, batch_size // count) * count}."
        )
    everything = replace(cluster, memory_bytes=float("inf"))
    estimator = Estimator(
        shape, everything, batch_size, optimizer or optax.adam(1e-4), executor, assumed, software
    )
    if estimator.analysis(choice) is None:
        raise ValueError(next(iter(estimator.refused.values())))
    _check_split(shape, choice, batch_size)
    priced = estimator.price(choice)
    assert priced is not None
    return priced


def _check_split(shape: ModelShape, choice: Choice, batch_size: int) -> None:
    """Raises ValueError for a model or a loss that depends on how rows or sequences are split, which no step takes.

    What is right is remembered in the shape, so that a sweep over choices traces each split once.
    """
    num_parts = choice.num_replicas * choice.num_microbatches
    of_rows = "rows", batch_size, num_parts
    if of_rows not in shape.cache:
        check_rows(shape.model, shape.loss, shape.params, shape.batch(batch_size), num_parts)
        shape.cache[of_rows] = True
    of_positions = "positions", choice.context
    if choice.context > 1 and of_positions not in shape.cache:
        _check_positions(shape, choice.context)
        shape.cache[of_positions] = True


def _check_positions(shape: ModelShape, context: int) -> None:
    """Raises ValueError for a model or a loss that depends on how sequences are split over so many devices.

    What a step would only warn of is left to the step: ``planned_attention`` is an operation of which nothing is known.
    """
    batch = shape.batch(1)
    if isinstance(batch, dict) and "positions" not in batch:  # as ``shard_batch`` adds them
        batch |= {"positions": jax.ShapeDtypeStruct((1, shape.seq), jnp.int32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh: Any = abstract_mesh(context=context)
        check_positions(shape.model, shape.loss, shape.params, batch, mesh)


def _check_fp8(shape: ModelShape, cluster: Cluster) -> None:
    """Raises ValueError for products in FP8 on devices without them."""
    if shape.in_fp8 and cluster.fp8_rate <= 1:
        raise ValueError(
            "products in FP8 need GPUs of the architecture Hopper, such as h100, or later ones; got "
            f"{arg(gpu=cluster.name)}. Choose {arg(gpu='h100')}, or {arg(products='compute')}."
        )


def gains_of(estimator: Estimator, choice: Choice) -> tuple[Gain, ...]:
    """Returns the changes that would help a choice most, the best first; changes that do not fit the memory come last."""
    memory, found = estimator.quick_bytes(choice), []
    seconds = _seconds_a_row(estimator, choice)
    for change, other, changed in _changes(estimator, choice):
        if other.analysis(changed) is None:
            continue
        needed = other.quick_bytes(changed)
        missing = max(0, round(needed - estimator.memory_limit))
        faster = seconds / _seconds_a_row(other, changed) - 1
        if faster >= LEAST:
            found.append(Gain(change, faster, needed - memory, missing))
    # What fits comes first.
    found.sort(key=lambda gain: (gain.missing_bytes > 0, -gain.faster))
    best: dict[str, Gain] = {}  # of the ways to make one change
    for gain in found:
        best.setdefault(gain.change, gain)
    none, scores = best.get(NO_RECOMPUTATION), best.get(SCORES_ALONE)
    if none and scores and none.faster >= scores.faster and none.more_bytes <= scores.more_bytes:
        del best[SCORES_ALONE]
    return tuple([*best.values()][:COUNT])


def _seconds_a_row(estimator: Estimator, choice: Choice) -> float:
    """Returns the seconds of a step of a choice for each row of its batch, whether it fits the memory or not."""
    everything = replace(estimator.cluster, memory_bytes=float("inf"))
    priced = replace(estimator, cluster=everything).price(choice, quick=True)
    assert priced is not None
    return priced.step_seconds / estimator.batch_size


def _changes(estimator: Estimator, choice: Choice) -> Iterator[tuple[str, Estimator, Choice]]:
    """Yields changes by name, each with the estimator that prices the changed choice; a name again for another way to it."""
    for remat, name in (
        (False, NO_RECOMPUTATION),
        ("dots", SCORES_ALONE),
    ):
        if remat != choice.remat and choice.remat is not False:
            yield name, estimator, replace(choice, remat=remat)
    rows = estimator.batch_size // choice.num_replicas
    for factor in (2, 0.5):
        count = int(choice.num_microbatches * factor)
        if count and rows % count == 0:
            yield (
                f"microbatches of {rows // count} rows",
                estimator,
                replace(choice, num_microbatches=count),
            )
    if choice.stage > 1:
        for name, chunks in (*NUM_CHUNKS.items(), ("interleaved", 4)):
            if not NAMED[name].holds_all and chunks * choice.stage <= estimator.shape.num_layers:
                changed = replace(
                    choice, schedule=name, num_chunks=chunks, layers_per_virtual_stage=None
                )
                label = f"{name} with {chunks} chunks" if chunks > 1 else name
                yield label, estimator, estimator.balanced(changed)
    if choice.zero == 3:
        yield "ZeRO 1", estimator, replace(choice, zero=1)
    larger = replace(estimator, batch_size=2 * estimator.batch_size)
    for factor in (1, 2):  # larger microbatches, or more of them
        count = factor * choice.num_microbatches
        yield "twice the batch", larger, replace(choice, num_microbatches=count)
    links = Links(estimator.cluster, choice.mesh.shape, estimator.assumed.network)
    crossing = {links.crosses(axis) for axis in AXES if choice.mesh.shape[axis] > 1}
    for crosses in sorted(crossing):
        field = "network_bandwidth" if crosses else "node_bandwidth"
        faster = replace(estimator.cluster, **{field: 2 * getattr(estimator.cluster, field)})
        name = f"twice the bandwidth {'between' if crosses else 'inside'} nodes"
        yield name, replace(estimator, cluster=faster), choice


def _usual_rows(shape: ModelShape, cluster: Cluster) -> int:
    """Returns about the rows of four million tokens: a round number for each device, or for a half or less of them."""
    rows, parts = max(1, DEFAULT_TOKENS // shape.tokens_per_row), cluster.num_devices
    while parts > rows and parts % 2 == 0:
        parts //= 2
    if parts > rows:
        return rows
    of_each = filter(is_round, range(1, 2 * rows // parts + 1))
    return parts * min(of_each, key=lambda each: abs(each * parts - rows))
