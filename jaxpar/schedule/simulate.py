"""Simulates a schedule: how long it takes, how long its stages are idle, and how many activations they hold.

A table has two timings:

    free        each op starts when its stage is free and its inputs are available: stages run independently, and only
                the order of the ops on each stage matters, not the ticks.
    lockstep    a tick starts on all stages at once, when the slowest stage has finished the previous tick and all
                messages have arrived, as in a program in which every stage takes part in every exchange.

``makespan`` gives the free time alone, for many costs: the table is read only once, into a ``Structure``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from jaxpar.fields import check_kind, check_one_of
from jaxpar.schedule.table import Op, Schedule

TIMINGS = ("free", "lockstep")
OfOp = tuple[int, str]  # virtual stage and kind: ops that are alike in both take equally long
Row = tuple[OfOp, ...]  # what a stage does in one tick


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

    def of(self, schedule: Schedule, virtual_stage: int, kind: str) -> int | float:
        """Returns the time of an op of a kind of a virtual stage."""
        scale = self.stage_scale[virtual_stage] if self.stage_scale else 1
        head = self.head if virtual_stage == schedule.num_virtual_stages - 1 else 0
        if kind == "B" and not schedule.splits_backward:
            return scale * (self.b + self.w) + 2 * head
        return scale * getattr(self, kind.lower()) + (0 if kind == "R" else head)


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
    check_one_of(TIMINGS, timing=timing)
    if costs.stage_scale and len(costs.stage_scale) != schedule.num_virtual_stages:
        raise ValueError(
            f"stage_scale must have one factor a virtual stage; got {len(costs.stage_scale)} for {schedule.name} with "
            f"num_stages={schedule.num_stages}, num_chunks={schedule.num_chunks}. Give {schedule.num_virtual_stages}."
        )
    check_kind(
        (Schedule,), "a Schedule", "Make one with jaxpar.schedule.make_schedule.", schedule=schedule
    )
    schedule.check()
    spans, tick_ends = _run(schedule, costs, in_lockstep=timing == "lockstep")
    end = max([*tick_ends, *(order[-1].end for order in spans)])
    of_op = lambda stage, op: costs.of(schedule, schedule.virtual_stage(stage, op.chunk), op.kind)
    work = sum(of_op(stage, span.op) for stage, order in enumerate(spans) for span in order)
    time = schedule.num_stages * end
    return Timeline(
        schedule=schedule,
        timing=timing,
        spans=spans,
        tick_ends=tick_ends,
        makespan=end,
        bubble_fraction=max(0.0, (time - work) / time) if time else 0.0,
        peak_live=_peaks(schedule, "F"),
        peak_residuals=_peaks(schedule, "R" if schedule.recomputes else "F"),
    )


def _run(
    schedule: Schedule, costs: Costs, *, in_lockstep: bool
) -> tuple[tuple[tuple[Span, ...], ...], tuple[int | float, ...]]:
    """Returns the spans of each stage and the ends of ticks, none if stages run freely.

    In lock-step a tick takes as long as its slowest stage and an exchange, by which all inputs of the next tick arrive.
    """
    spans: list[list[Span]] = [[] for _ in range(schedule.num_stages)]
    ends, tick_start, tick_ends = {}, 0, []
    exchange = costs.p2p if schedule.num_stages > 1 else 0
    for tick in schedule.ops:
        for stage, ops in enumerate(tick):
            for op in ops:
                arrivals = [
                    ends[source, needed] + (costs.p2p if source != stage else 0)
                    for source, needed in schedule.inputs_of(stage, op)
                ]
                start = max([tick_start, *(span.end for span in spans[stage][-1:]), *arrivals])
                ends[stage, op] = start + costs.of(
                    schedule, schedule.virtual_stage(stage, op.chunk), op.kind
                )
                spans[stage].append(Span(op, start, ends[stage, op]))
        if in_lockstep:
            tick_start = max([tick_start, *(order[-1].end for order in spans if order)]) + exchange
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


@dataclass(frozen=True)
class Structure:
    """What a schedule's makespan depends on besides costs.

    Attributes:
        schedule: The schedule.
        rows: What stages do without waiting in between, in the order of ticks: stage, ops, and the rows that they need, each
            with the boundary that its result crosses: i between stages i and i + 1, the last one between the last stage and
            the first, -1 within a stage.
        ticks: What the stages do in each tick.
    """

    schedule: Schedule
    rows: tuple[tuple[int, Row, tuple[tuple[int, int], ...]], ...]
    ticks: tuple[frozenset[Row], ...]


def structure_of(schedule: Schedule, *, by_tick: bool = False) -> Structure:
    """Returns the structure of a schedule.

    Args:
        schedule: The schedule.
        by_tick: Whether a stage sends the results of a tick when it has run all its ops of this tick, instead of each op's.
    """
    numbers: dict[tuple[int, Op], int] = {}
    rows, ticks = [], []
    of = lambda stage, op: (schedule.virtual_stage(stage, op.chunk), op.kind)
    for tick in schedule.ops:
        for stage, row in enumerate(tick):
            for ops in [row] * bool(row) if by_tick else [(op,) for op in row]:
                needs = {
                    need
                    for op in ops
                    for need in schedule.inputs_of(stage, op)
                    if need[0] != stage or need[1] not in ops
                }
                arrivals = [
                    (numbers[need], _boundary(need[0], stage, schedule.num_stages))
                    for need in needs
                ]
                numbers |= {(stage, op): len(rows) for op in ops}
                rows.append((stage, tuple(of(stage, op) for op in ops), tuple(arrivals)))
        ticks.append(
            frozenset(tuple(of(stage, op) for op in row) for stage, row in enumerate(tick))
        )
    return Structure(schedule, tuple(rows), tuple(ticks))


def _boundary(source: int, stage: int, num_stages: int) -> int:
    if source == stage:
        return -1
    return min(source, stage) if abs(source - stage) == 1 else num_stages - 1


def makespan(
    structure: Structure,
    costs: Costs,
    messages: Sequence[int | float],
    *,
    blocks: bool = False,
    waits_for_all: bool = True,
) -> int | float:
    """Returns the makespan of a schedule whose stages run freely.

    Args:
        structure: The schedule's structure.
        costs: The times of ops.
        messages: The time of a message over each boundary, as in ``Structure.rows``.
        blocks: Whether a stage computes nothing while it sends; both directions are sent at once.
        waits_for_all: Whether the next step begins when all stages are done. Otherwise each stage begins it when it is done
            itself, and the time from one step to the next is returned: that of the stage which takes the longest.
    """
    schedule = structure.schedule
    rows = {row for _, row, _ in structure.rows}
    seconds = {of: costs.of(schedule, *of) for row in rows for of in row}
    sends = lambda row: max((_sending(schedule, messages, *of) for of in row), default=0)
    of_rows = {row: sum(seconds[of] for of in row) + (sends(row) if blocks else 0) for row in rows}
    waits = (
        *([0] * len(messages) if blocks else messages),
        0,
    )  # until a result arrives; the last is that within a stage
    ends: list[int | float] = []
    begins, free = (
        [at] * schedule.num_stages for at in (-1.0, 0.0)
    )  # of each stage: its first row, and when it is free
    for stage, row, needs in structure.rows:
        start = free[stage]
        for number, boundary in needs:
            arrival = ends[number] + waits[boundary]
            start = arrival if arrival > start else start
        if begins[stage] < 0:
            begins[stage] = start
        free[stage] = start + of_rows[row]
        ends.append(free[stage])
    return (
        max(free)
        if waits_for_all
        else max(end - begin for begin, end in zip(begins, free, strict=True))
    )


def _sending(
    schedule: Schedule, messages: Sequence[int | float], virtual_stage: int, kind: str
) -> int | float:
    """Returns the time in which the result of an op is sent to another stage."""
    to = virtual_stage + {"F": 1, "B": -1}.get(kind, 0)
    if not 0 <= to < schedule.num_virtual_stages:
        return 0
    source, stage = (schedule.stage_and_chunk(each)[0] for each in (virtual_stage, to))
    return 0 if source == stage else messages[_boundary(source, stage, schedule.num_stages)]
