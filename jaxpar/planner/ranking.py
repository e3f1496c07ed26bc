"""The planner's public functions: `plan` ranks ways to train a model on a cluster, `price` estimates one choice."""

from dataclasses import replace
from typing import Any

import optax

from jaxpar.models.transformer import TransformerConfig
from jaxpar.optimizer_state import Optimizer
from jaxpar.planner.candidates import check_held
from jaxpar.planner.choice import Choice
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.estimator import Estimator
from jaxpar.planner.improvements import gains_of
from jaxpar.planner.model_shape import ModelShape, transformer_shape
from jaxpar.planner.no_plan import why_nothing
from jaxpar.planner.op_times import Assumptions
from jaxpar.planner.plans import Plan, why_best, why_not
from jaxpar.planner.search import best_plans
from jaxpar.planner.software import JAXPAR, Software

DEFAULT_TOKENS = 2**22


def plan(
    model_shape: str | TransformerConfig | ModelShape,
    cluster: Cluster,
    *,
    batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    executor: str = "spmd",
    assumed: Assumptions = Assumptions(),  # noqa: B008, it is frozen
    memory_headroom: float = 0.1,
    top: int = 10,
    **fixed: Any,
) -> list[Plan]:
    """Returns ways to train a model on a cluster, the fastest first: for each mesh the best settings.

    Args:
        model_shape: A transformer preset's name, a TransformerConfig, or a ModelShape, of a model of your own.
        cluster: The machines: ``jaxpar.planner.cluster("a100-80gb", num_nodes=48)``, or a ``Cluster`` of your own.
        batch_size: Rows of a step, over all replicas; by default 4 million tokens.
        optimizer: By default Adam.
        executor: "spmd": rank by the time in lock-step. "mpmd": rank by the time of free-running stages.
        assumed: Assumed efficiencies.
        memory_headroom: The share of a device's memory that a plan leaves free, since CUDA, NCCL and fragmentation take it.
        top: The largest number of plans to return.
        **fixed: Settings to fix: data, stage, tensor, schedule, num_chunks, num_microbatches, zero, remat.

    Raises:
        ValueError: A setting is unknown or out of range; or nothing fits: the message states the memory that is needed and
            the nearest setting that fits.

    Example:
        >>> from jaxpar.planner import cluster
        >>> best = plan("gpt2", cluster("h100", devices_per_node=8), batch_size=512)[0]
        >>> best.choice.data, best.choice.stage, best.choice.tensor
        (8, 1, 1)
    """
    shape = model_shape if isinstance(model_shape, ModelShape) else transformer_shape(model_shape)
    batch_size = batch_size or max(1, DEFAULT_TOKENS // shape.tokens_per_row)
    if not 0 <= memory_headroom < 1:
        raise ValueError(
            f"memory_headroom must be a share of the memory, at least 0 and less than 1; got {memory_headroom}. Choose 0.1."
        )
    estimator = Estimator(
        shape, cluster, batch_size, optimizer or optax.adam(1e-4), executor, assumed, memory_headroom=memory_headroom
    )
    check_held(fixed, executor, batch_size, top)
    plans = best_plans(estimator, fixed, top)
    if not plans:
        raise ValueError(why_nothing(estimator, fixed))
    best = plans[0]
    whys = [why_best(best, plans[1:]), *(why_not(each, best) for each in plans[1:])]
    return [replace(p, why=why, gains=gains_of(estimator, p.choice)) for p, why in zip(plans, whys, strict=True)]


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
        ValueError: The choice does not divide the model or the batch.
    """
    shape = model_shape if isinstance(model_shape, ModelShape) else transformer_shape(model_shape)
    count = choice.data * choice.num_microbatches
    if batch_size % count:
        raise ValueError(
            f"data times num_microbatches must divide batch_size; got {choice.data} times {choice.num_microbatches} and "
            f"batch_size={batch_size}. Choose a batch_size of {max(1, batch_size // count) * count}."
        )
    everything = replace(cluster, memory_bytes=float("inf"))
    estimator = Estimator(shape, everything, batch_size, optimizer or optax.adam(1e-4), executor, assumed, software)
    if estimator.analysis(choice) is None:
        raise ValueError(why_nothing(estimator, {}))
    priced = estimator.price(choice)
    assert priced is not None
    return priced
