"""The inputs of an estimate, the model and the cluster excepted.

    choice    Choice: the mesh axes, the settings of ``value_and_grad``, and the schedule that results from them
    software  Software: what other training software does differently, to compare a plan with what others report
    assumed   Assumptions: efficiencies that no datasheet states

Memory and traffic are those of jaxpar's step with any ``Software``; only times differ, and a plan says whose they are:

    price(model, machines, choice, batch_size=1536, executor="mpmd", software=Software(name="Megatron-LM", ...))
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from jax.sharding import AbstractMesh

from jaxpar.fields import arg
from jaxpar.mesh import AXES, OF_ZERO, abstract_mesh, shown_sizes
from jaxpar.pipeline import LayerLayout, Program, one_stage, spmd_program
from jaxpar.pipeline.segments import segments_of
from jaxpar.pipeline.timetable import Timetable
from jaxpar.schedule import NAMED, PLACEMENT, Schedule, lockstep_form, make_schedule
from jaxpar.schedule.simulate import Structure, structure_of

EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The arguments of ``make_mesh`` and ``value_and_grad`` for one way to run a model.

    Attributes:
        replica: Groups of replicas, over which gradients alone are summed (HSDP).
        data: Replicas of a group, over which ZeRO shards.
        context: Parts of each sequence, over which it shards too.
        stage: Pipeline stages.
        tensor: Shards of each weight.
        schedule: The pipeline's schedule, by name; ignored where there is one stage.
        num_microbatches: Microbatches of each replica.
        num_chunks: Chunks of each stage.
        zero: The ZeRO level.
        experts: The axis over which the experts of layers are, "tensor" or "data"; None: as ``ModelShape`` says.
        remat: What the backward pass recomputes: False: elementwise operations where that stores fewer bytes. "dots": attention
            scores too, with ``jaxpar.backward.remat.keep_products``. True: complete layers.
        layers_per_virtual_stage: Layers of each virtual stage; None: spread evenly.
    """

    replica: int = 1
    data: int = 1
    context: int = 1
    stage: int = 1
    tensor: int = 1
    schedule: str = "1f1b"
    num_microbatches: int = 1
    num_chunks: int = 1
    zero: int = 0
    remat: bool | str = False
    experts: str | None = None
    layers_per_virtual_stage: tuple[int, ...] | None = None

    @cached_property
    def mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        return abstract_mesh(**{axis: getattr(self, axis) for axis in AXES})

    @property
    def num_replicas(self) -> int:
        """The parts into which the rows of a batch are split."""
        return self.replica * self.data

    def parts(self, axes: Iterable[str] = OF_ZERO) -> int:
        """Returns the number of devices along some axes together, by default of those over which ZeRO shards."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def num_simulated(self) -> int:
        """Microbatches to simulate: beyond two or three times as many as stages, the steady state of a pipeline repeats."""
        return min(
            self.num_microbatches, 3 * self.stage if self.num_chunks > 1 else 2 * self.stage + 4
        )

    @property
    def runs_pipeline(self) -> bool:
        """Whether GPUs run F of a microbatch beside B of another: in stages, and in one stage with a ``tensor`` axis."""
        return self.stage > 1 or (self.tensor > 1 and self.num_microbatches > 1)

    def is_in_turn(self, num_layers: int) -> bool:
        """Returns whether GPUs run F and B of each microbatch of one stage in turn (``one_stage.py``)."""
        if self.stage > 1 or self.tensor > 1:
            return False
        return one_stage.takes(self.zero, num_layers, self.num_microbatches)

    def reduces_beside(self, num_layers: int) -> bool:
        """Returns whether GPUs reduce the gradients of each layer over the replicas in the backward pass of one stage."""
        once = self.zero >= 2 or self.num_microbatches == 1
        return once and self.is_in_turn(num_layers)

    @property
    def form(self) -> str:
        """The form of its schedule's table on GPUs, where stages run in lock-step."""
        return lockstep_form(self.schedule, masks=True)

    @property
    def merges(self) -> bool:
        """Whether GPUs run F of a microbatch and the backward pass of another in one loop over the layers."""
        return self.runs_pipeline and (self.stage == 1 or self.form == "merged")

    def table(self, num_microbatches: int, form: str | None = None) -> Schedule:
        """Returns the schedule's table for a number of microbatches, by default in the form for lock-step on GPUs."""
        return _table(self._scheduled(num_microbatches), form or self.form)

    def structure(
        self, num_microbatches: int, form: str | None = None, *, by_tick: bool = False
    ) -> Structure:
        """Returns the structure of the table, from which its makespan follows for any costs."""
        return _structure(self._scheduled(num_microbatches), form or self.form, by_tick)

    def heads(self, num_microbatches: int) -> tuple[bool, ...]:
        """Returns for each tick of lock-step on GPUs whether every stage runs the head, or a part of it.

        In other ticks the last stage runs it alone, with an F of its last chunk.
        """
        return _heads(self._scheduled(num_microbatches))

    def program(self, num_microbatches: int) -> Program:
        """Returns the compiled schedule for a number of microbatches, as GPUs run it."""
        if self.stage == 1:  # under remat the backward pass of a layer runs it again
            return _program(Choice(num_microbatches=num_microbatches))
        return _program(self._scheduled(num_microbatches))

    def _scheduled(self, num_microbatches: int) -> "Choice":
        """Returns the settings on which the schedule depends and no others, since its tables are cached by them."""
        own: dict[str, Any] = {
            name: getattr(self, name) for name in ("stage", "schedule", "num_chunks")
        }
        return Choice(num_microbatches=num_microbatches, remat=self.remat is True, **own)

    @property
    def splits_backward(self) -> bool:
        """Whether B and W are ops of their own: the schedules without a bubble need it, the others have both in one tick."""
        return self.stage > 1 and NAMED[self.schedule].splits_backward

    @cached_property
    def num_slots(self) -> dict[str, int]:
        """The slots of each buffer: those for the simulated microbatches; gpipe needs one more for each more."""
        slots, more = (
            self.program(self.num_simulated).num_slots,
            self.num_microbatches - self.num_simulated,
        )
        if not more or not NAMED[self.schedule].holds_all:
            return slots
        return _extrapolate(self.program(self.num_simulated - 2).num_slots, slots, more, 2)

    @cached_property
    def likely_slots(self) -> dict[str, int]:
        """An estimate of ``num_slots``, extrapolated from 4 and 8 stages for longer pipelines."""
        if self.stage <= 8:
            return self.num_slots
        microbatches = (
            self.num_microbatches * 8 // self.stage
            if NAMED[self.schedule].holds_all
            else self.num_microbatches
        )
        eight = replace(
            self, stage=8, num_microbatches=max(1, microbatches), layers_per_virtual_stage=None
        )
        four = replace(eight, stage=4, num_microbatches=max(1, microbatches // 2))
        return _extrapolate(four.num_slots, eight.num_slots, self.stage - 8, 4)

    def layout(self, num_layers: int) -> LayerLayout:
        """Returns the layout of the layers over the stages."""
        placement = PLACEMENT[self.schedule]
        return LayerLayout(
            num_layers, self.stage, self.num_chunks, placement, self.layers_per_virtual_stage
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes."""
        return dict(reversed(shown_sizes(self.mesh.shape).items()))

    def axes(self) -> str:
        """Returns the axes as text."""
        return ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())


def fixed_or(fixed: Mapping[str, Any], name: str, otherwise: Sequence) -> Sequence:
    """Returns the one value at which a setting is fixed, or else the values that it may have."""
    return otherwise if fixed.get(name) is None else (fixed[name],)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _extrapolate(
    before: dict[str, int], after: dict[str, int], more: int, step: int
) -> dict[str, int]:
    """Extrapolates linearly from two points that are ``step`` apart."""
    return {
        name: count + max(0, count - before[name]) * more // step for name, count in after.items()
    }


@lru_cache(maxsize=512)
def _table(choice: Choice, form: str) -> Schedule:
    sizes = choice.stage, choice.num_microbatches, choice.num_chunks
    return make_schedule(choice.schedule, *sizes, form=form, remat=choice.remat is True)


@lru_cache(maxsize=512)
def _structure(choice: Choice, form: str, by_tick: bool) -> Structure:
    return structure_of(_table(choice, form), by_tick=by_tick)


@lru_cache(maxsize=512)
def _heads(choice: Choice) -> tuple[bool, ...]:
    heads: list[bool] = []
    timetable = Timetable(_table(choice, choice.form))
    for segment in segments_of(timetable, masks=True, skips=()):
        has_head = segment.masked and segment.has_head and "F" in segment.ops
        heads += [has_head] * len(segment.ticks)
    return tuple(heads)


@lru_cache(maxsize=512)
def _program(choice: Choice) -> Program:
    return spmd_program(_table(choice, choice.form), masks=True)


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a program runs what a ``Choice`` leaves open.

    Attributes:
        name: For display.
        sequence_parallel: Whether activations between pairs of column and row splits are sharded over ``tensor`` (Korthikanti
            et al. 2022, arXiv 2205.05198).
        overlaps: The mesh axes whose collectives run beside computation, as far as there is enough of it; and "experts", the
            all-to-alls over ``data`` of rows to experts and back.
        gradient_bytes: Bytes of each number of a gradient that is reduced over replicas; None: as jaxpar accumulates them.
        param_bytes: Bytes of each number of a param that is gathered from replicas; None: as jaxpar stores them.
        splits_messages: Whether each device of ``tensor`` sends its share of a message between stages, which is then gathered.
        blocks_on_messages: Whether a stage computes nothing while it sends a message to another.
        exchanges_in_pairs: Whether in the interleaved schedule a stage sends after each pair of F and B and waits until the
            messages of both are exchanged, as Megatron-LM does unless it is configured to overlap them.
        message_seconds: Seconds of a message between stages besides those of its bytes and the latency of the link.
        waits_between_steps: Whether stages wait for one another between steps, as jaxpar's do for the norm of the gradients.
            Otherwise each begins the next step when it is done itself, and rolls an update back if the global norm requires it
            (post-validation, Qi et al. 2023, arXiv 2401.10241, section 4).
        fused: Whether chains of elementwise operations run as one kernel, as by XLA; otherwise each is a kernel of its own.
        fused_softmax: Whether attention without a fused kernel keeps its scores in 16 bits and has a kernel for scale, mask and
            softmax together.
        fused_accumulation: Whether the products that compute gradients of weights add to those of earlier microbatches.
        products_alone_in_w: Whether W, where a schedule has it, computes matrix products alone and B the rest, since what W
            reads is stored. In jaxpar W recomputes elementwise operations.
        recompute: The share of a layer's forward products that is recomputed besides what ``Choice.remat`` says.
        folds_experts: Whether each device of ``tensor`` has experts of its own (parallel folding, Liu et al. 2025, arXiv
            2504.14960), so that it receives whole rows.
        expert_imbalance: Rows of the busiest expert over the mean.
        measured_kernels: Whether kernels take the time of jaxpar's own, where the cluster has it measured; otherwise that which
            fits the published steps of others.
        product_rate: Rate of products with weights over that in 16 bits, 2 for FP8 on a GPU that has it.
    """

    name: str = "jaxpar"
    sequence_parallel: bool = False
    overlaps: tuple[str, ...] = ()
    gradient_bytes: int | None = None
    param_bytes: int | None = None
    splits_messages: bool = False
    blocks_on_messages: bool = False
    exchanges_in_pairs: bool = False
    message_seconds: float = 0.0
    waits_between_steps: bool = True
    fused: bool = True
    fused_softmax: bool = False
    fused_accumulation: bool = False
    products_alone_in_w: bool = False
    recompute: float = 0.0
    folds_experts: bool = False
    expert_imbalance: float = 1.0
    measured_kernels: bool = True
    product_rate: float = 1.0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.overlaps) - {*AXES, EXPERTS}):
            raise ValueError(
                f"overlaps must be mesh axes, {', '.join(AXES)}; got {unknown}. Leave them out."
            )
        widths, wide = (None, 1, 2, 4, 8), ("1, 2, 4 or 8", "2 for 16-bit numbers")
        for name, is_allowed, rule, other in (
            ("gradient_bytes", self.gradient_bytes in widths, *wide),
            ("param_bytes", self.param_bytes in widths, *wide),
            ("recompute", 0 <= self.recompute <= 1, "a share, 0 to 1", "0"),
            ("message_seconds", self.message_seconds >= 0, "0 or more", "0"),
            ("expert_imbalance", self.expert_imbalance >= 1, "1 or more", "1 for none"),
            ("product_rate", self.product_rate > 0, "positive", "1 for 16-bit products"),
        ):
            if not is_allowed:
                raise ValueError(
                    f"{name} must be {rule}; got {getattr(self, name)!r}. Choose {other}."
                )


JAXPAR = Software()


@dataclass(frozen=True)
class Assumptions:
    """Efficiencies, which no datasheet states.

    Attributes:
        compute: The share of the peak that a layer reaches in matrix products, the time of other operations included. None:
            the time of each kernel by its shape.
        network: The share of a link's bandwidth that collectives reach.
    """

    compute: int | float | None = None
    network: int | float = 0.7

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if share is not None and not 0 < share <= 1:
                raise ValueError(
                    f"an efficiency must be a share of the datasheet's figure; got {arg(**{name: share})}. Choose more than 0 "
                    "and at most 1, such as 0.5."
                )


def is_round(number: int) -> bool:
    """Whether a number is 1, 3, 5, 7 or 9 times a power of two, as meshes are."""
    odd = number // (number & -number)
    return odd < 10
