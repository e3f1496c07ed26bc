"""The search over meshes and settings: it estimates memory and time of the candidates and returns the best of each mesh.

Candidates are visited in the order of a quick estimate, until the estimates are far from the plans found. For each mesh the
most promising settings are priced, and the best meshes are priced again in full. gpipe is left out unless it is fixed: 1f1b
takes as long and needs less memory.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import optax

from jaxpar.models.transformer import TransformerConfig
from jaxpar.optimizer_state import Optimizer
from jaxpar.planner.at_rest import AtRest
from jaxpar.planner.candidate_queue import likely_choices
from jaxpar.planner.candidates import candidates, check_held, spreads
from jaxpar.planner.choice import Choice
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.improvements import gains_of
from jaxpar.planner.memory import step_memory
from jaxpar.planner.model_shape import ModelShape, transformer_shape
from jaxpar.planner.no_plan import why_nothing
from jaxpar.planner.op_costs import Analysis
from jaxpar.planner.op_times import Assumptions
from jaxpar.planner.plans import Plan, why_best, why_not
from jaxpar.planner.software import JAXPAR, Software
from jaxpar.planner.step_time import Prices, step_time
from jaxpar.planner.traffic import bytes_by_axis, step_traffic

DEFAULT_TOKENS = 2**22
SLACK, TRIES = 1.1, 2  # trust in the quick estimate; how many settings of a mesh are priced


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
    search = Search(
        shape, cluster, batch_size, optimizer or optax.adam(1e-4), executor, assumed, memory_headroom=memory_headroom
    )
    check_held(fixed, executor, batch_size, top)
    plans = search.best(fixed, top)
    if not plans:
        raise ValueError(why_nothing(search, fixed))
    best = plans[0]
    whys = [why_best(best, plans[1:]), *(why_not(each, best) for each in plans[1:])]
    return [replace(p, why=why, gains=gains_of(search, p.choice)) for p, why in zip(plans, whys, strict=True)]


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
    search = Search(shape, everything, batch_size, optimizer or optax.adam(1e-4), executor, assumed, software)
    if search.analysis(choice) is None:
        raise ValueError(why_nothing(search, {}))
    priced = search.price(choice)
    assert priced is not None
    return priced


@dataclass
class Search:
    """A search for one model, cluster and batch, which caches analyses and states."""

    shape: ModelShape
    cluster: Cluster
    batch_size: int
    optimizer: Optimizer
    executor: str
    assumed: Assumptions
    software: Software = JAXPAR
    memory_headroom: float = 0.0
    _analyses: dict = field(default_factory=dict)
    _states: dict = field(default_factory=dict)
    refused: dict = field(default_factory=dict)

    @property
    def memory_limit(self) -> float:
        """The bytes of a device that a plan may need."""
        return self.cluster.memory_bytes * (1 - self.memory_headroom)

    def best(self, fixed: dict[str, Any], top: int) -> list[Plan]:
        """Returns the best plan of each mesh, the fastest first."""
        found: dict[tuple, Plan] = {}
        tried: Counter[tuple] = Counter()
        mesh_of = lambda choice: tuple(choice.mesh.shape.values())

        def is_done(seconds: int | float, choice: Choice) -> bool:
            times = sorted(each.step_seconds for each in found.values())
            return tried[mesh_of(choice)] >= TRIES or (len(times) >= top and seconds > SLACK * times[top - 1])

        for likely, choice in likely_choices(self, fixed, is_done):
            if is_done(likely, choice):
                continue
            priced, mesh = self.price(choice, quick=True), mesh_of(choice)
            tried[mesh] += priced is not None
            if priced and (mesh not in found or self._rank(priced) < self._rank(found[mesh])):
                found[mesh] = priced
        quick = sorted(found.values(), key=self._rank)[: top + 2]
        return sorted(filter(None, (self.price(each.choice) for each in quick)), key=self._rank)[:top]

    @staticmethod
    def _rank(plan: Plan) -> tuple:
        """Returns a plan's sort key: its step time to three digits, then its memory."""
        return float(f"{plan.step_seconds:.3g}"), plan.memory_bytes

    def choices(self, fixed: dict[str, Any]) -> Iterator[Choice]:
        """Returns all candidates at ZeRO level 0, with balanced layers."""
        return map(self.balanced, self.divided(fixed))

    def divided(self, fixed: dict[str, Any]) -> Iterator[Choice]:
        """Returns all candidates at ZeRO level 0, with layers spread evenly."""
        return candidates(self.cluster, self.batch_size, self.shape.num_layers, fixed)

    def balanced(self, choice: Choice) -> Choice:
        """Returns the choice with the spread of layers whose busiest stage, the head included, takes the least time."""
        count = choice.stage * choice.num_chunks
        analysis = self.analysis(choice)
        if choice.stage == 1 or analysis is None or self.shape.num_layers < 2 * count:
            return choice
        options = [replace(choice, layers_per_virtual_stage=given) for given in spreads(self.shape.num_layers, count)]
        busiest = lambda option: Prices(option, analysis, self.cluster, self.assumed, self.software).busiest()
        return min(options, key=lambda option: float(f"{busiest(option):.6g}"))

    def analysis(self, choice: Choice) -> Analysis | None:
        """Returns the work of a choice's ops; None where ``tensor`` does not divide the model."""
        rows = self.batch_size // choice.data // choice.num_microbatches
        key = rows, choice.tensor, choice.remat == "dots"
        if key not in self._analyses:
            try:
                self._analyses[key] = Analysis(self.shape, rows, choice.tensor, choice.remat)
            except ValueError as error:
                self._analyses[key] = None
                self.refused[f"tensor={choice.tensor}"] = str(error)
        return self._analyses[key]

    def at_rest(self, choice: Choice) -> AtRest:
        """Returns a choice's state between steps."""
        key = (*choice.mesh.shape.values(), choice.zero, choice.num_chunks, choice.layers_per_virtual_stage)
        if key not in self._states:
            self._states[key] = AtRest(self.shape, self.optimizer, choice)
        return self._states[key]

    def memory(self, choice: Choice, *, quick: bool = False) -> dict[str, int]:
        """Returns the bytes per device of a choice, by kind."""
        analysis = self.analysis(choice)
        assert analysis is not None
        return step_memory(choice, analysis, self.at_rest(choice), quick=quick)

    def price(self, choice: Choice, *, quick: bool = False) -> Plan | None:
        """Returns a choice as a plan; None where it does not fit.

        Args:
            choice: Mesh axes and settings.
            quick: Whether to estimate the slots of long pipelines, and to leave out traffic and the time that is not ranked by.
        """
        analysis, at_rest, memory = self.analysis(choice), self.at_rest(choice), self.memory(choice, quick=quick)
        assert analysis is not None
        if sum(memory.values()) > self.memory_limit:
            return None
        transfers = [] if quick else step_traffic(choice, analysis, at_rest)
        sent = transfers or step_traffic(choice, analysis, at_rest, messages=False)
        prices = Prices(choice, analysis, self.cluster, self.assumed, self.software)
        shards = choice.data if choice.zero in (1, 2) else 1  # which update a share of the params
        state = memory["optimizer"] + (at_rest.trained_bytes + memory["gradients"]) // shards
        is_ideal = self.executor == "mpmd"
        ranked, other = (
            step_time(choice, prices, sent, state, ideal=ideal) if ideal == is_ideal or not quick else None
            for ideal in (is_ideal, not is_ideal)
        )
        assert ranked is not None
        other = other or ranked
        useful, again = self._flops(choice, analysis)
        return Plan(
            choice=choice,
            bytes_per_device=memory,
            bytes_moved=bytes_by_axis(transfers),
            time=other if is_ideal else ranked,
            ideal_time=ranked if is_ideal else other,
            is_ideal=is_ideal,
            tokens=self.batch_size * self.shape.tokens_per_row,
            flops=useful + again,
            useful_flops=useful,
            software=self.software.name,
        )

    def _flops(self, choice: Choice, analysis: Analysis) -> tuple[int | float, int | float]:
        """Returns the operations of a step, averaged over stages: forward and backward pass, and recomputed ones."""
        plain = analysis if choice.remat != "dots" else self.analysis(replace(choice, remat=False))
        assert plain is not None
        layer, backward = plain.work("forward").flops, plain.work("backward").flops
        again = {False: 0, True: layer, "dots": analysis.work("backward").flops - backward}[choice.remat]
        steps = choice.num_microbatches / choice.stage
        useful = self.shape.num_layers * (layer + backward) + analysis.end_works["head"].flops
        return steps * useful, steps * self.shape.num_layers * (again + self.software.recompute * layer)
