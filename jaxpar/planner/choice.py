"""One way to run a model on a mesh: the axes, the settings of ``value_and_grad``, and the schedule that results from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from jax.sharding import AbstractMesh

from jaxpar.mesh import abstract_mesh
from jaxpar.pipeline import LayerLayout, Program, spmd_program
from jaxpar.planner.makespan import Structure, structure_of
from jaxpar.schedule import Schedule, lockstep_form, make_schedule

SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2))  # with default chunks


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The arguments of ``make_mesh`` and ``value_and_grad`` for one way to run a model.

    Attributes:
        data: Replicas.
        stage: Pipeline stages.
        tensor: Shards of each weight.
        schedule: The pipeline's schedule, by name; ignored where there is one stage.
        num_microbatches: Microbatches of each replica.
        num_chunks: Chunks of each stage.
        zero: The ZeRO level.
        remat: What the backward pass recomputes: False: elementwise operations where that stores fewer bytes. "dots": attention
            scores too, with ``jaxpar.backward.remat.keep_products``. True: complete layers.
        layers_per_virtual_stage: Layers of each virtual stage; None: spread evenly.
    """

    data: int = 1
    stage: int = 1
    tensor: int = 1
    schedule: str = "1f1b"
    num_microbatches: int = 1
    num_chunks: int = 1
    zero: int = 0
    remat: bool | str = False
    layers_per_virtual_stage: tuple[int, ...] | None = None

    @cached_property
    def mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        return abstract_mesh(data=self.data, stage=self.stage, tensor=self.tensor)

    @property
    def num_simulated(self) -> int:
        """Microbatches to simulate: beyond two or three times as many as stages, the steady state of a pipeline repeats."""
        return min(self.num_microbatches, 3 * self.stage if self.num_chunks > 1 else 2 * self.stage + 4)

    @property
    def fewer_simulated(self) -> int:
        """A smaller number of microbatches to simulate, for the extrapolation; with chunks it is less by one round."""
        return self.num_simulated - (self.stage if self.num_chunks > 1 else 2)

    def table(self, num_microbatches: int, form: str | None = None) -> Schedule:
        """Returns the schedule's table for a number of microbatches, by default in the form for lock-step."""
        form = form or lockstep_form(self.schedule)
        return _table(self.schedule, self.stage, num_microbatches, self.num_chunks, form, self.remat is True)

    def structure(self, num_microbatches: int, form: str | None = None, *, by_tick: bool = False) -> Structure:
        """Returns the structure of the table, from which its makespan follows for any costs."""
        form = form or lockstep_form(self.schedule)
        return _structure(
            self.schedule, self.stage, num_microbatches, self.num_chunks, form, self.remat is True, by_tick
        )

    def program(self, num_microbatches: int) -> Program:
        """Returns the compiled schedule for a number of microbatches, as GPUs run it."""
        return _program(self.schedule, self.stage, num_microbatches, self.num_chunks, self.remat is True)

    @cached_property
    def num_slots(self) -> dict[str, int]:
        """The slots of each buffer: those for the simulated microbatches, or in gpipe one more for each more microbatch."""
        slots = self.program(self.num_simulated).num_slots
        if self.num_simulated == self.num_microbatches or self.schedule != "gpipe":
            return slots
        return _extrapolate(
            self.program(self.fewer_simulated).num_slots,
            slots,
            self.num_microbatches - self.num_simulated,
            self.num_simulated - self.fewer_simulated,
        )

    @cached_property
    def likely_slots(self) -> dict[str, int]:
        """An estimate of ``num_slots``, extrapolated from 4 and 8 stages for longer pipelines."""
        if self.stage <= 8:
            return self.num_slots
        microbatches = self.num_microbatches * 8 // self.stage if self.schedule == "gpipe" else self.num_microbatches
        eight = replace(self, stage=8, num_microbatches=max(1, microbatches), layers_per_virtual_stage=None)
        four = replace(eight, stage=4, num_microbatches=max(1, microbatches // 2))
        return _extrapolate(four.num_slots, eight.num_slots, self.stage - 8, 4)

    def layout(self, num_layers: int) -> LayerLayout:
        """Returns the layout of the layers over the stages."""
        placement = "v" if self.schedule == "zb-v" else "loop"
        return LayerLayout(num_layers, self.stage, self.num_chunks, placement, self.layers_per_virtual_stage)

    def axes(self) -> str:
        """Returns the axes as text."""
        return f"tensor={self.tensor}, stage={self.stage}, data={self.data}"


def held_or(fixed: Mapping[str, Any], name: str, otherwise: Sequence) -> Sequence:
    """Returns the one value at which a setting is fixed, or else the values that it may have."""
    return otherwise if fixed.get(name) is None else (fixed[name],)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _extrapolate(before: dict[str, int], after: dict[str, int], more: int, step: int) -> dict[str, int]:
    """Extrapolates linearly from two points that are ``step`` apart."""
    return {name: count + max(0, count - before[name]) * more // step for name, count in after.items()}


@lru_cache(maxsize=512)
def _table(name: str, stage: int, num_microbatches: int, num_chunks: int, form: str, remat: bool) -> Schedule:
    return make_schedule(name, stage, num_microbatches, num_chunks, form=form, remat=remat)


@lru_cache(maxsize=512)
def _structure(
    name: str, stage: int, num_microbatches: int, num_chunks: int, form: str, remat: bool, by_tick: bool
) -> Structure:
    return structure_of(_table(name, stage, num_microbatches, num_chunks, form, remat), by_tick=by_tick)


@lru_cache(maxsize=512)
def _program(name: str, stage: int, num_microbatches: int, num_chunks: int, remat: bool) -> Program:
    table = _table(name, stage, num_microbatches, num_chunks, lockstep_form(name), remat)
    return spmd_program(table, masks=True)
