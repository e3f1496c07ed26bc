"""The search over meshes and settings, which returns the best plan of each mesh.

    candidates      (``candidates.py``) meshes, schedules and numbers of microbatches
    Estimator       memory, traffic and time of one of them
    likely_choices  the candidates in the order of a quick estimate of their time, which needs no state and no slots; the memory
                    that a choice needs, the ZeRO level and the recomputation with which it fits, and its collectives over
                    ``data`` are computed only for the few choices whose estimate becomes the lowest
    fitting_plans   visits them until the estimates are far from the plans found, and prices the most promising settings of each
                    mesh
    improved        a plan after the changes of one setting each that make it fastest, to any number of rows in a microbatch
    best_plans      improves the plans of the best meshes, and prices them again in full

To trace a model for a number of rows takes most of the time of a search. So the candidates have few numbers of rows, and
``improved`` tries those between.

gpipe is left out unless it is fixed: 1f1b takes as long and needs less memory.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from jaxpar.dtypes import num_bytes
from jaxpar.mesh import DATA, TENSOR
from jaxpar.planner.candidates import candidates, schedules_of, spreads
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.guesses import guesses_of, uncounted_of
from jaxpar.planner.job import JAXPAR, Assumptions, Choice, Software, divisors, fixed_or
from jaxpar.planner.memory import step_memory
from jaxpar.planner.model_shape import ModelShape
from jaxpar.planner.ops import Analysis
from jaxpar.planner.plans import Plan
from jaxpar.planner.state import AtRest, wide_bytes
from jaxpar.planner.step_time import Prices, step_time
from jaxpar.planner.traffic import Transfer, bytes_by_axis, step_traffic
from jaxpar.step.optimizer_state import Optimizer

SURPLUS = 1.02  # a quick memory estimate up to this factor above the limit may still fit
SLACK, TRIES = 1.1, 2  # trust in the quick estimate; how many settings of a mesh are priced
LEAST_GAIN = 0.001  # the share of the time that a change must save


@dataclass
class Estimator:
    """Estimates the memory and the time of choices for one model, cluster and batch.

    Caches analyses and states, which copies for another cluster or batch share.
    """

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

    def candidates(self, fixed: dict[str, Any]) -> Iterator[Choice]:
        """Yields all candidates at ZeRO level 0 that the executor runs, with layers spread evenly."""
        for each in candidates(self.cluster, self.batch_size, self.shape, fixed):
            is_whole = each.context == 1 and each.experts != DATA and not fixed.get("zero")
            if is_whole or not self.replicates(each):
                yield each

    def replicates(self, choice: Choice) -> bool:
        """Whether the replicas of a choice hold all of its params, optimizer state and sequences, as "mpmd" has them."""
        return self.executor == "mpmd" and choice.stage > 1

    def zero_levels(self, choice: Choice) -> Sequence[int]:
        """Returns the ZeRO levels to try for the mesh and the layers of a choice, those that send the least first."""
        if choice.parts() == 1 or self.replicates(choice):
            return (0,)
        if self.at_rest(replace(choice, zero=1)).shards_nothing:
            return 0, 3  # which may still shard frozen params
        return 1, 2, 3  # level 0 sends as much as level 1 and needs more memory

    def balanced(self, choice: Choice) -> Choice:
        """Returns the choice with the spread of layers whose busiest stage, the head included, takes the least time."""
        count = choice.stage * choice.num_chunks
        if choice.stage == 1 or self.analysis(choice) is None or self.shape.num_layers < 2 * count:
            return choice
        given = spreads(self.shape.num_layers, count, self.shape.num_leading)
        options = [replace(choice, layers_per_virtual_stage=each) for each in given]
        return min(options, key=lambda option: float(f"{self.prices(option).busiest():.6g}"))

    def analysis(self, choice: Choice) -> Analysis | None:
        """Returns the work of a choice's ops; None where ``tensor`` does not divide the model."""
        rows = self.batch_size // choice.num_replicas // choice.num_microbatches
        shape = self.shape.placed(choice.experts)
        over = choice.context, choice.data if shape.over_data else 1
        key = rows, choice.tensor, choice.remat == "dots", choice.experts, *over
        if key not in self._analyses:
            sizes = {"data": choice.data, "context": choice.context}
            try:
                self._analyses[key] = Analysis(shape, rows, choice.tensor, choice.remat, **sizes)
            except ValueError as error:
                self._analyses[key] = None
                self.refused[f"tensor={choice.tensor}"] = str(error)
        return self._analyses[key]

    def may_fit(self, choice: Choice) -> bool:
        """Returns whether the inputs of layers alone fit, by what is traced for microbatches of one row."""
        rows = self.batch_size // choice.num_replicas // choice.num_microbatches
        of_one_row = self.analysis(
            replace(choice, num_microbatches=rows * choice.num_microbatches, remat=False)
        )
        if of_one_row is None:
            return False
        inputs = rows * num_bytes(of_one_row.x) * self.shape.num_layers
        # A stage stores those of its own layers, of at least half as many microbatches as there are stages.
        share = (
            1.0
            if choice.stage == 1
            else min(choice.num_microbatches, choice.stage) / (2 * choice.stage)
        )
        return share * inputs <= self.memory_limit

    def _analysis(self, choice: Choice) -> Analysis:
        """Returns the work of a choice's ops, for a choice whose ``tensor`` divides the model."""
        analysis = self.analysis(choice)
        assert analysis is not None
        return analysis

    def at_rest(self, choice: Choice) -> AtRest:
        """Returns a choice's state between steps."""
        settings = choice.zero, choice.num_chunks, choice.layers_per_virtual_stage, choice.experts
        key = *choice.mesh.shape.values(), *settings
        if key not in self._states:
            self._states[key] = AtRest(self.shape.placed(choice.experts), self.optimizer, choice)
        return self._states[key]

    def in_effect(self, choice: Choice) -> Choice:
        """Returns the choice at the ZeRO level whose step it has: 0 where its own shards nothing."""
        shards = choice.zero > 0 and not self.at_rest(choice).shards_nothing
        return choice if shards else replace(choice, zero=0)

    def memory(self, choice: Choice, *, quick: bool = False) -> dict[str, int]:
        """Returns the bytes per device of a choice, by kind."""
        choice = self.in_effect(choice)
        return step_memory(choice, self._analysis(choice), self.at_rest(choice), quick=quick)

    def quick_bytes(self, choice: Choice) -> int:
        """Returns an estimate of the bytes per device, without the schedule of a long pipeline."""
        return sum(self.memory(choice, quick=True).values())

    def traffic(self, choice: Choice, *, messages: bool = True) -> list[Transfer]:
        """Returns the collectives of a choice; without ``messages``, those that need no compiled schedule."""
        choice = self.in_effect(choice)
        given = choice, self._analysis(choice), self.at_rest(choice)
        return step_traffic(*given, messages=messages, masks=self.software is JAXPAR)

    def prices(self, choice: Choice, *, ranked: bool = True) -> Prices:
        """Returns the seconds of a choice's ops and collectives, with the executor that ranks it or with the other."""
        ideal = (self.executor == "mpmd") == ranked
        return Prices(
            self.in_effect(choice),
            self._analysis(choice),
            self.cluster,
            self.assumed,
            self.software,
            ideal=ideal,
        )

    def seconds_of_data(self, choice: Choice) -> int | float:
        """Returns the exposed seconds of the collectives over ``data``."""
        return self.prices(choice).exposed_data(self.traffic(choice, messages=False))

    def seems_to_fit(self, choice: Choice, share: float) -> bool:
        """Returns whether a choice seems to need no more than a share of the memory."""
        of_state = sum(self.at_rest(choice).bytes.values())
        return (
            of_state <= self.memory_limit and self.quick_bytes(choice) <= share * self.memory_limit
        )

    def price(self, choice: Choice, *, quick: bool = False) -> Plan | None:
        """Returns a choice as a plan; None where it does not fit.

        Args:
            choice: Mesh axes and settings.
            quick: Whether to estimate the slots of long pipelines, and to leave out traffic and the time that is not ranked by.
        """
        memory = self.memory(choice, quick=quick)
        if sum(memory.values()) > self.memory_limit:
            return None
        transfers = [] if quick else self.traffic(choice)
        sent = transfers or self.traffic(choice, messages=False)
        at_rest = self.at_rest(choice)
        state = memory["optimizer"] + at_rest.updated_bytes + wide_bytes(at_rest.grads)
        is_ideal = self.executor == "mpmd"
        ranked = step_time(self.prices(choice), sent, state)
        other = ranked if quick else step_time(self.prices(choice, ranked=False), sent, state)
        useful, again = self._flops(choice)
        return Plan(
            choice=choice,
            bytes_per_device=memory,
            bytes_moved=bytes_by_axis(transfers),
            time=other if is_ideal else ranked,
            ideal_time=ranked if is_ideal else other,
            is_ideal=is_ideal,
            tokens=self.batch_size * self.shape.tokens_per_row,
            tokens_per_row=self.shape.tokens_per_row,
            flops=useful + again,
            useful_flops=useful,
            software=self.software.name,
            zero_shards_nothing=choice.zero > 0 and at_rest.shards_nothing,
            tensor_shards_nothing=choice.tensor > 1 and self._analysis(choice).shards_nothing,
            guesses=() if quick else guesses_of(self._analysis(choice)),
            uncounted=() if quick else uncounted_of(self._analysis(choice)),
        )

    def _flops(self, choice: Choice) -> tuple[int | float, int | float]:
        """Returns the operations of a step, averaged over stages: forward and backward pass, and recomputed ones."""
        analysis = self._analysis(choice)
        plain = analysis if choice.remat != "dots" else self._analysis(replace(choice, remat=False))
        layer, backward = plain.works["forward"].flops, plain.works["backward"].flops
        again = {False: 0, True: layer, "dots": analysis.works["backward"].flops - backward}[
            choice.remat
        ]
        steps = choice.num_microbatches / choice.stage
        # With those of their forward passes.
        of_ends = sum(analysis.end_works[end].flops for end in ("embed_back", "head"))
        useful = self.shape.num_layers * (layer + backward) + of_ends
        return steps * useful, steps * self.shape.num_layers * (
            again + self.software.recompute * layer
        )


def likely_choices(
    estimator: Estimator, fixed: dict[str, Any], is_done: Callable[[int | float, Choice], bool]
) -> Iterator[tuple[int | float, Choice]]:
    """Yields the choices that seem to fit, each with a quick estimate of its seconds, in ascending order.

    Recomputation is tried only if the choice does not fit without it, and of complete layers only if that of attention
    scores is not enough.

    Args:
        estimator: Estimates memory and time.
        fixed: Fixed settings, by name.
        is_done: Whether the search has no use for a choice that takes at least so many seconds.
    """
    numbers, heap = count(), []

    def push_first(recomputing: list[Choice]) -> None:
        if recomputing and estimator.analysis(recomputing[0]) is not None:
            choice = estimator.balanced(recomputing[0])
            heapq.heappush(
                heap,
                (estimator.prices(choice).likely(), next(numbers), choice, recomputing[1:], False),
            )

    by_rest: dict[Choice, list[Choice]] = {}
    for choice in estimator.candidates(fixed):
        by_rest.setdefault(replace(choice, remat=False), []).append(choice)
    for first, recomputing in by_rest.items():
        if fixed.get("num_microbatches") or estimator.may_fit(first):
            push_first(recomputing)
    while heap:
        seconds, _, choice, others, is_known = heapq.heappop(heap)
        if is_known:
            yield seconds, choice
        elif not is_done(seconds, choice):
            levels = fixed_or(fixed, "zero", estimator.zero_levels(choice))
            tried = [replace(choice, zero=zero) for zero in levels]
            fits = next((each for each in tried if estimator.seems_to_fit(each, SURPLUS)), None)
            if fits:
                heapq.heappush(
                    heap, (seconds + estimator.seconds_of_data(fits), next(numbers), fits, [], True)
                )
            if fits is None or fits != tried[0] or not estimator.seems_to_fit(fits, 1 / SURPLUS):
                push_first(others)


def fitting_plans(estimator: Estimator, fixed: dict[str, Any], top: int) -> list[Plan]:
    """Returns the plans of the fastest meshes among the candidates, about ``top``, the fastest first; priced quickly."""
    found: dict[tuple, Plan] = {}
    tried: Counter[tuple] = Counter()

    def is_done(seconds: int | float, choice: Choice) -> bool:
        times = sorted(each.step_seconds for each in found.values())
        return tried[_mesh_of(choice)] >= TRIES or (
            len(times) >= top and seconds > SLACK * times[top - 1]
        )

    for likely, choice in likely_choices(estimator, fixed, is_done):
        if is_done(likely, choice):
            continue
        priced, mesh = estimator.price(choice, quick=True), _mesh_of(choice)
        tried[mesh] += priced is not None
        if priced and (mesh not in found or _rank(priced) < _rank(found[mesh])):
            found[mesh] = priced
    return sorted(found.values(), key=_rank)


def best_plans(estimator: Estimator, fixed: dict[str, Any], top: int) -> list[Plan]:
    """Returns the plans of the fastest meshes, at most ``top``, the fastest first.

    No change of one setting makes the first of them faster. Of the others, no change to the next number of rows does.
    """
    quick = fitting_plans(estimator, fixed, top)[: top + 2]
    quick = sorted((improved(estimator, fixed, each, reach=1) for each in quick), key=_rank)
    plans = sorted(filter(None, (estimator.price(each.choice) for each in quick)), key=_rank)[:top]
    if plans:
        best = estimator.price(
            improved(estimator, fixed, plans[0], reach=estimator.batch_size).choice
        )
        plans[0] = best or plans[0]
    return plans


def improved(estimator: Estimator, fixed: dict[str, Any], plan: Plan, *, reach: int) -> Plan:
    """Returns a plan after changes of one setting each, while one makes it faster; priced quickly if it was changed.

    Args:
        estimator: Estimates memory and time.
        fixed: Fixed settings, by name.
        plan: The plan to begin with.
        reach: How many larger and how many smaller numbers of rows in a microbatch to try.
    """
    tried = {plan.choice}
    while True:
        changes = [
            each for each in _changes(estimator, fixed, plan.choice, reach) if each not in tried
        ]
        tried.update(changes)
        priced = [found for each in changes if (found := estimator.price(each, quick=True))]
        fastest = min(priced, key=lambda found: found.step_seconds, default=plan)
        if fastest.step_seconds > (1 - LEAST_GAIN) * plan.step_seconds:
            return plan
        plan = fastest


def _changes(
    estimator: Estimator, fixed: dict[str, Any], choice: Choice, reach: int
) -> Iterator[Choice]:
    """Yields choices that differ in one setting which is not fixed."""
    yield from _other_rows(estimator, fixed, choice, reach)
    if not estimator.replicates(choice) and choice.parts() > 1:
        for zero in fixed_or(fixed, "zero", estimator.zero_levels(choice)):
            yield replace(choice, zero=zero)
    less = {True: ("dots", False), "dots": (False,)}.get(choice.remat, ())
    for remat in fixed_or(fixed, "remat", less):
        yield replace(choice, remat=remat)
    if choice.stage > 1:
        for name, chunks in schedules_of(choice.stage, estimator.shape.num_layers, fixed):
            changed = replace(
                choice, schedule=name, num_chunks=chunks, layers_per_virtual_stage=None
            )
            yield estimator.balanced(changed)
        given = (
            estimator.shape.num_layers,
            choice.stage * choice.num_chunks,
            estimator.shape.num_leading,
        )
        for layers in spreads(*given):
            yield replace(choice, layers_per_virtual_stage=layers)
    if choice.experts and choice.data > 1 and (estimator.shape.experts or 1) % choice.data == 0:
        for experts in fixed_or(fixed, "experts", list(estimator.shape.placements)):
            if experts == TENSOR or not estimator.replicates(choice):
                yield replace(choice, experts=experts)


def _other_rows(
    estimator: Estimator, fixed: dict[str, Any], choice: Choice, reach: int
) -> Iterator[Choice]:
    """Yields choices with more rows in a microbatch, up to one that does not fit, and with fewer, the nearest first."""
    if fixed.get("num_microbatches"):
        return
    counts = divisors(estimator.batch_size // choice.num_replicas)
    at = counts.index(choice.num_microbatches)
    for fewer in reversed(counts[max(0, at - reach) : at]):
        changed = replace(choice, num_microbatches=fewer)
        if not estimator.may_fit(changed):
            break
        yield changed
        # With stages fewer microbatches can be in flight, and larger ones fit again.
        if choice.stage == 1 and estimator.quick_bytes(changed) > estimator.memory_limit:
            break
    for more in counts[at + 1 : at + 1 + reach]:
        yield replace(choice, num_microbatches=more)


def _mesh_of(choice: Choice) -> tuple:
    return tuple(choice.mesh.shape.values())


def _rank(plan: Plan) -> tuple:
    """Returns a plan's sort key: its step time to three digits, then its memory."""
    return float(f"{plan.step_seconds:.3g}"), plan.memory_bytes
