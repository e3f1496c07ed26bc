"""Simulates a schedule: how long it takes, how long its stages are idle, and how many activations they hold.

A table has two timings:

    free        each op starts when its stage is free and its inputs are available: stages run independently, and only
                the order of the ops on each stage matters, not the ticks.
    lockstep    a tick starts on all stages at once, when the slowest stage has finished the previous tick and all
                messages have arrived, as in a program in which every stage takes part in every exchange.
"""

import math
from dataclasses import dataclass, fields

from jaxpar.schedule.table import Op, Schedule

TIMINGS = ("free", "lockstep")


def _check_cost(name: str, cost: object) -> None:
    if not isinstance(cost, int | float) or isinstance(cost, bool):
        raise TypeError(f"a cost must be a number; got {name}={cost!r}.")
    if not 0 <= cost < math.inf:
        raise ValueError(f"a cost must be finite and not negative; got {name}={cost!r}.")


@dataclass(frozen=True)
class Costs:
    """The time of an op, by kind, in any unit of time, such as seconds.

    The costs are those of one op, and hence of one chunk: with twice as many chunks of the same model they are half as large.

    Attributes:
        f: The forward.
        b: The gradients of the inputs. In a schedule without W ops, B computes all gradients and takes ``b + w``.
        w: The gradients of the weights.
        r: The recompute of the residuals that the forward did not store.
        p2p: The time from the end of an op on one stage until another stage can use its output. In lock-step each tick ends
            with one such exchange. Within a stage it is 0.
        head: The time that the model's head adds to each of F, B and W on the last virtual stage.
        stage_scale: One factor per virtual stage for its ops without the head, such as its share of uneven layers.

    Raises:
        TypeError: A cost is not a number.
        ValueError: A cost is negative or not finite.
    """

    f: int | float = 1
    b: int | float = 1
    w: int | float = 1
    r: int | float = 1
    p2p: int | float = 0
    head: int | float = 0
    stage_scale: tuple[int | float, ...] | None = None

    def __post_init__(self):
        for field in fields(self):
            if field.name != "stage_scale":
                _check_cost(field.name, getattr(self, field.name))
        for factor in self.stage_scale or ():
            _check_cost("stage_scale", factor)

    def of(self, schedule: Schedule, stage: int, op: Op) -> int | float:
        """Returns the time of one op of one stage."""
        virtual_stage = schedule.virtual_stage(stage, op.chunk)
        scale = self.stage_scale[virtual_stage] if self.stage_scale else 1
        head = self.head if virtual_stage == schedule.num_virtual_stages - 1 else 0
        whole_backward = op.kind == "B" and not schedule.splits_backward
        if whole_backward:
            return scale * (self.b + self.w) + 2 * head
        return scale * getattr(self, op.kind.lower()) + (0 if op.kind == "R" else head)


UNIT_COSTS = Costs()


@dataclass(frozen=True)
class Span:
    """The time in which a stage runs an op: from ``start`` to ``end``, in the unit of the costs."""

    op: Op
    start: int | float
    end: int | float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Attributes:
        schedule: The simulated schedule.
        timing: ``"free"`` or ``"lockstep"``.
        spans: For each stage the time of each op, in order.
        tick_ends: In lock-step, the end of each tick including its exchange; otherwise empty.
        makespan: The end of the last op; in lock-step of the last tick.
        bubble_fraction: The share of the time of all stages, until the makespan, in which they run no op.
        peak_live: For each stage the peak number of activations: one for each microbatch and chunk whose F has started and
            whose gradients are not complete. With several chunks, each is an activation of one chunk.
        peak_residuals: The same for residuals, which with R ops are stored from R on, not from F on.
    """

    schedule: Schedule
    timing: str
    spans: tuple[tuple[Span, ...], ...]
    tick_ends: tuple[int | float, ...]
    makespan: int | float
    bubble_fraction: float
    peak_live: tuple[int, ...]
    peak_residuals: tuple[int, ...]


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS, *, timing: str = "free") -> Timeline:
    """Returns the timeline of a schedule: the time of each op, the makespan, the bubble and the peak activations.

    Args:
        schedule: A named schedule or a table of your own; it is checked first.
        costs: The times of ops and of messages between stages.
        timing: ``"free"``: each op starts as soon as its inputs are available. ``"lockstep"``: tick by tick.

    Raises:
        ValueError: The schedule does not pass ``check``, there is no such timing, or ``costs.stage_scale`` does not have
            one factor per virtual stage.

    Example:
        >>> from jaxpar.schedule import make_schedule
        >>> timeline = simulate(make_schedule("zb-h1", 4, 32))
        >>> timeline.makespan, timeline.bubble_fraction == 3 / 99, timeline.peak_live
        (99, True, (4, 4, 4, 4))

    Reference:
        With F = B = W stages are idle for (S - 1) / (M + S - 1) of the time in 1f1b (Narayanan et al. 2021, arXiv 2104.04473,
        section 2.2, which divides by the ideal time instead), and for (S - 1) / (3 M + S - 1) in zb-h1 (Qi et al. 2023, arXiv
        2401.10241).
    """
    if timing not in TIMINGS:
        raise ValueError(f"timing must be one of {', '.join(TIMINGS)}; got {timing!r}.")
    if costs.stage_scale and len(costs.stage_scale) != schedule.num_virtual_stages:
        raise ValueError(
            f"stage_scale must have one factor a virtual stage; got {len(costs.stage_scale)} for {schedule.name} with "
            f"num_stages={schedule.num_stages}, num_chunks={schedule.num_chunks}. Give {schedule.num_virtual_stages}."
        )
    schedule.check()
    spans, tick_ends = (_run_free if timing == "free" else _run_lockstep)(schedule, costs)
    makespan = max([*tick_ends, *(order[-1].end for order in spans)])
    work = sum(costs.of(schedule, stage, span.op) for stage, order in enumerate(spans) for span in order)
    time = schedule.num_stages * makespan
    return Timeline(
        schedule=schedule,
        timing=timing,
        spans=spans,
        tick_ends=tick_ends,
        makespan=makespan,
        bubble_fraction=max(0.0, (time - work) / time) if time else 0.0,
        peak_live=_peaks(schedule, "F"),
        peak_residuals=_peaks(schedule, "R" if schedule.recomputes else "F"),
    )


def _run_free(schedule: Schedule, costs: Costs) -> tuple[tuple[tuple[Span, ...], ...], tuple[int | float, ...]]:
    """Returns the spans of each stage, and no ends of ticks, if every op starts as soon as it can."""
    spans = [[] for _ in range(schedule.num_stages)]
    ends = {}
    for tick in schedule.ops:
        for stage, ops in enumerate(tick):
            for op in ops:
                arrivals = [
                    ends[source, needed] + (costs.p2p if source != stage else 0)
                    for source, needed in schedule.inputs_of(stage, op)
                ]
                start = max([spans[stage][-1].end if spans[stage] else 0, *arrivals])
                ends[stage, op] = start + costs.of(schedule, stage, op)
                spans[stage].append(Span(op, start, ends[stage, op]))
    return tuple(map(tuple, spans)), ()


def _run_lockstep(schedule: Schedule, costs: Costs) -> tuple[tuple[tuple[Span, ...], ...], tuple[int | float, ...]]:
    """Returns the spans of each stage and the ends of ticks, if a tick takes as long as its slowest stage and an exchange."""
    spans = [[] for _ in range(schedule.num_stages)]
    tick_start, tick_ends = 0, []
    for tick in schedule.ops:
        tick_end = tick_start
        for stage, ops in enumerate(tick):
            end = tick_start
            for op in ops:
                start, end = end, end + costs.of(schedule, stage, op)
                spans[stage].append(Span(op, start, end))
            tick_end = max(tick_end, end)
        tick_start = tick_end + (costs.p2p if schedule.num_stages > 1 else 0)
        tick_ends.append(tick_start)
    return tuple(map(tuple, spans)), tuple(tick_ends)


def _peaks(schedule: Schedule, first: str) -> tuple[int, ...]:
    """Returns for each stage the peak number of (microbatch, chunk) between the op ``first`` and the last gradient."""
    last = "W" if schedule.splits_backward else "B"
    peaks = []
    for stage in range(schedule.num_stages):
        live = peak = 0
        for op in schedule.order(stage):
            live += op.kind == first
            peak = max(peak, live)
            live -= op.kind == last
        peaks.append(peak)
    return tuple(peaks)
