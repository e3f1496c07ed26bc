"""Estimates of choices for one model, cluster and batch: memory, and as a `Plan` also traffic and step time."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpar.optimizer_state import Optimizer
from jaxpar.planner.at_rest import AtRest
from jaxpar.planner.candidates import candidates, spreads
from jaxpar.planner.choice import Choice
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.memory import step_memory
from jaxpar.planner.model_shape import ModelShape
from jaxpar.planner.op_costs import Analysis
from jaxpar.planner.op_times import Assumptions
from jaxpar.planner.plans import Plan
from jaxpar.planner.software import JAXPAR, Software
from jaxpar.planner.step_time import Prices, step_time
from jaxpar.planner.traffic import Transfer, bytes_by_axis, step_traffic


@dataclass
class Estimator:
    """Estimates the memory and the time of choices for one model, cluster and batch; caches analyses and states."""

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

    def choices(self, fixed: dict[str, Any]) -> Iterator[Choice]:
        """Returns all candidates at ZeRO level 0, with balanced layers."""
        return map(self.balanced, self.divided(fixed))

    def divided(self, fixed: dict[str, Any]) -> Iterator[Choice]:
        """Returns all candidates at ZeRO level 0, with layers spread evenly."""
        return candidates(self.cluster, self.batch_size, self.shape.num_layers, fixed)

    def balanced(self, choice: Choice) -> Choice:
        """Returns the choice with the spread of layers whose busiest stage, the head included, takes the least time."""
        count = choice.stage * choice.num_chunks
        if choice.stage == 1 or self.analysis(choice) is None or self.shape.num_layers < 2 * count:
            return choice
        options = [replace(choice, layers_per_virtual_stage=given) for given in spreads(self.shape.num_layers, count)]
        return min(options, key=lambda option: float(f"{self.prices(option).busiest():.6g}"))

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

    def _analysis(self, choice: Choice) -> Analysis:
        """Returns the work of a choice's ops, for a choice whose ``tensor`` divides the model."""
        analysis = self.analysis(choice)
        assert analysis is not None
        return analysis

    def at_rest(self, choice: Choice) -> AtRest:
        """Returns a choice's state between steps."""
        key = (*choice.mesh.shape.values(), choice.zero, choice.num_chunks, choice.layers_per_virtual_stage)
        if key not in self._states:
            self._states[key] = AtRest(self.shape, self.optimizer, choice)
        return self._states[key]

    def memory(self, choice: Choice, *, quick: bool = False) -> dict[str, int]:
        """Returns the bytes per device of a choice, by kind."""
        return step_memory(choice, self._analysis(choice), self.at_rest(choice), quick=quick)

    def traffic(self, choice: Choice, *, messages: bool = True) -> list[Transfer]:
        """Returns the collectives of a choice; without ``messages``, those that need no compiled schedule."""
        return step_traffic(choice, self._analysis(choice), self.at_rest(choice), messages=messages)

    def prices(self, choice: Choice) -> Prices:
        """Returns the seconds of a choice's ops, messages and collectives."""
        return Prices(choice, self._analysis(choice), self.cluster, self.assumed, self.software)

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
        sent, prices = transfers or self.traffic(choice, messages=False), self.prices(choice)
        shards = choice.data if choice.zero in (1, 2) else 1  # which update a share of the params
        state = memory["optimizer"] + (self.at_rest(choice).trained_bytes + memory["gradients"]) // shards
        is_ideal = self.executor == "mpmd"
        ranked, other = (
            step_time(choice, prices, sent, state, ideal=ideal) if ideal == is_ideal or not quick else None
            for ideal in (is_ideal, not is_ideal)
        )
        assert ranked is not None
        other = other or ranked
        useful, again = self._flops(choice)
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

    def _flops(self, choice: Choice) -> tuple[int | float, int | float]:
        """Returns the operations of a step, averaged over stages: forward and backward pass, and recomputed ones."""
        analysis = self._analysis(choice)
        plain = analysis if choice.remat != "dots" else self._analysis(replace(choice, remat=False))
        layer, backward = plain.work("forward").flops, plain.work("backward").flops
        again = {False: 0, True: layer, "dots": analysis.work("backward").flops - backward}[choice.remat]
        steps = choice.num_microbatches / choice.stage
        useful = self.shape.num_layers * (layer + backward) + analysis.end_works["head"].flops
        return steps * useful, steps * self.shape.num_layers * (again + self.software.recompute * layer)
