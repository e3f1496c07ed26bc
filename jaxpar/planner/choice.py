"""One way to run a model on a mesh: the axes and the settings of ``value_and_grad``, and the schedule that they lead to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from jax.sharding import AbstractMesh

from jaxpar.mesh import abstract_mesh
from jaxpar.pipeline import LayerLayout, Program, compile_schedule
from jaxpar.schedule import Schedule, make_schedule

SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2))  # with their usual chunks


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What ``make_mesh`` and ``value_and_grad`` would be given.

    Attributes:
        data: Replicas.
        stage: Pipeline stages.
        tensor: Shards.
        schedule: The pipeline's schedule, by name; of one stage it means nothing.
        num_microbatches: Parts of each replica's rows.
        num_chunks: Chunks of layers a stage.
        zero: The ZeRO level.
        remat: Whether activations are computed again.
        layers_per_virtual_stage: Layers of each virtual stage; None: spread evenly.
    """

    data: int = 1
    stage: int = 1
    tensor: int = 1
    schedule: str = "1f1b"
    num_microbatches: int = 1
    num_chunks: int = 1
    zero: int = 0
    remat: bool = False
    layers_per_virtual_stage: tuple[int, ...] | None = None

    @cached_property
    def mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        return abstract_mesh(data=self.data, stage=self.stage, tensor=self.tensor)

    @property
    def num_simulated(self) -> int:
        """Microbatches that are simulated: from twice the stages on, the steady state of a pipeline repeats itself."""
        return min(self.num_microbatches, 3 * self.stage if self.num_chunks > 1 else 2 * self.stage + 2)

    @property
    def fewer_simulated(self) -> int:
        """A smaller number of them, by one round with chunks, from which the rest is extrapolated."""
        return self.num_simulated - (self.stage if self.num_chunks > 1 else max(1, self.stage // 2))

    def table(self, num_microbatches: int, form: str = "unit") -> Schedule:
        """Returns the schedule's table for some number of microbatches."""
        return _table(self.schedule, self.stage, num_microbatches, self.num_chunks, form, self.remat)

    def program(self, num_microbatches: int) -> Program:
        """Returns the same compiled."""
        return _program(self.schedule, self.stage, num_microbatches, self.num_chunks, self.remat)

    @cached_property
    def num_slots(self) -> dict[str, int]:
        """The slots of each buffer, extrapolated from the simulated microbatches (gpipe needs a slot for each)."""
        slots = self.program(self.num_simulated).num_slots
        if self.num_simulated == self.num_microbatches:
            return slots
        return _extrapolate(
            self.program(self.fewer_simulated).num_slots,
            slots,
            self.num_microbatches - self.num_simulated,
            self.num_simulated - self.fewer_simulated,
        )

    @cached_property
    def likely_slots(self) -> dict[str, int]:
        """An estimate of the same for long pipelines, extrapolated from 4 and 8 stages."""
        if self.stage <= 8:
            return self.num_slots
        microbatches = self.num_microbatches * 8 // self.stage if self.schedule == "gpipe" else self.num_microbatches
        eight = replace(self, stage=8, num_microbatches=max(1, microbatches), layers_per_virtual_stage=None)
        four = replace(eight, stage=4, num_microbatches=max(1, microbatches // 2))
        return _extrapolate(four.num_slots, eight.num_slots, self.stage - 8, 4)

    def layout(self, num_layers: int) -> LayerLayout:
        """Returns where each layer lives."""
        placement = "v" if self.schedule == "zb-v" else "loop"
        return LayerLayout(num_layers, self.stage, self.num_chunks, placement, self.layers_per_virtual_stage)

    def axes(self) -> str:
        """Returns the axes as text."""
        return f"tensor={self.tensor}, stage={self.stage}, data={self.data}"


def held_or(fixed: Mapping[str, Any], name: str, otherwise: Sequence) -> Sequence:
    """Returns the one value that a setting is held at, or those that it may have otherwise."""
    return otherwise if fixed.get(name) is None else (fixed[name],)


def divisors(number: int) -> list[int]:
    """Returns what divides a number, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _extrapolate(before: dict[str, int], after: dict[str, int], more: int, step: int) -> dict[str, int]:
    """Extrapolates linearly from two points that are ``step`` apart."""
    return {name: count + max(0, count - before[name]) * more // step for name, count in after.items()}


@lru_cache(maxsize=512)
def _table(name: str, stage: int, num_microbatches: int, num_chunks: int, form: str, remat: bool) -> Schedule:
    return make_schedule(name, stage, num_microbatches, num_chunks, form=form, remat=remat)


@lru_cache(maxsize=512)
def _program(name: str, stage: int, num_microbatches: int, num_chunks: int, remat: bool) -> Program:
    return compile_schedule(_table(name, stage, num_microbatches, num_chunks, "unit", remat))
