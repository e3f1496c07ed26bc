"""The makespan of a schedule for many costs: that of ``jaxpar.schedule.simulate``, but the table is read only once."""

from collections import Counter
from dataclasses import dataclass

from jaxpar.schedule import Costs, Op, Schedule

OfOp = tuple[int, str]  # virtual stage and kind: ops that are alike in both take equally long
Row = tuple[OfOp, ...]  # what a stage does in one tick


@dataclass(frozen=True)
class Structure:
    """What a schedule's makespan depends on besides costs.

    Attributes:
        schedule: The schedule.
        rows: What stages do without waiting in between, in the order of ticks: stage, ops, and the rows that they need, each
            with the boundary that its result crosses: i between stages i and i + 1, the last one between the last stage and
            the first, -1 within a stage.
        ticks: For each kind of tick, which is what each stage does in it, the number of such ticks.
    """

    schedule: Schedule
    rows: tuple[tuple[int, Row, tuple[tuple[int, int], ...]], ...]
    ticks: tuple[tuple[frozenset[Row], int], ...]


def structure_of(schedule: Schedule, *, by_tick: bool = False) -> Structure:
    """Returns the structure of a schedule.

    Args:
        schedule: The schedule.
        by_tick: Whether a stage sends the results of a tick when it has run all its ops of this tick, instead of each op's.
    """
    numbers: dict[tuple[int, Op], int] = {}
    rows, ticks = [], Counter()
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
                arrivals = [(numbers[need], _boundary(need[0], stage, schedule.num_stages)) for need in needs]
                numbers |= {(stage, op): len(rows) for op in ops}
                rows.append((stage, tuple(of(stage, op) for op in ops), tuple(arrivals)))
        ticks[frozenset(tuple(of(stage, op) for op in row) for stage, row in enumerate(tick))] += 1
    return Structure(schedule, tuple(rows), tuple(ticks.items()))


def _boundary(source: int, stage: int, num_stages: int) -> int:
    if source == stage:
        return -1
    return min(source, stage) if abs(source - stage) == 1 else num_stages - 1


@dataclass(frozen=True)
class Messages:
    """The messages of stages that run freely.

    Attributes:
        seconds: The time of one over each boundary, as in ``Structure.rows``.
        blocks: Whether a stage computes nothing while it sends.
    """

    seconds: tuple[int | float, ...]
    blocks: bool = False

    def waits(self) -> tuple[int | float, ...]:
        """Returns the time from the end of a row until its result arrives, by boundary; the last is that within a stage."""
        return (*([0] * len(self.seconds) if self.blocks else self.seconds), 0)

    def sending(self, schedule: Schedule, row: Row) -> int | float:
        """Returns the seconds after a row during which its stage only sends; both directions are sent at once."""
        return max((self._of_op(schedule, *of) for of in row), default=0) if self.blocks else 0

    def _of_op(self, schedule: Schedule, virtual_stage: int, kind: str) -> int | float:
        to = virtual_stage + {"F": 1, "B": -1}.get(kind, 0)
        if not 0 <= to < schedule.num_virtual_stages:
            return 0
        source, stage = (schedule.stage_and_chunk(each)[0] for each in (virtual_stage, to))
        return 0 if source == stage else self.seconds[_boundary(source, stage, schedule.num_stages)]


def makespan(
    structure: Structure, costs: Costs, *, is_free: bool, messages: Messages | None = None, waits_for_all: bool = True
) -> int | float:
    """Returns the makespan of a schedule, with stages that run freely or in lock-step.

    Args:
        structure: The schedule's structure.
        costs: The times of ops and of messages.
        is_free: Whether stages run freely.
        messages: The messages of stages that run freely; by default each takes ``costs.p2p``.
        waits_for_all: Whether the next step begins when all stages are done. Otherwise each stage begins it when it is done
            itself, and the time from one step to the next is returned: that of the stage which takes the longest.
    """
    schedule = structure.schedule
    kinds = {of for _, row, _ in structure.rows for of in row}
    seconds = {of: _cost(schedule, costs, *of) for of in kinds}
    of_row = lambda row: sum(seconds[of] for of in row)
    if not is_free:
        exchange = costs.p2p if schedule.num_stages > 1 else 0
        one = lambda tick: max(map(of_row, tick), default=0)
        return sum(count * (one(tick) + exchange) for tick, count in structure.ticks)
    messages = messages or Messages((costs.p2p,) * schedule.num_stages)
    of_rows = {row: of_row(row) + messages.sending(schedule, row) for row in {row for _, row, _ in structure.rows}}
    begins, free = _run_free(structure, of_rows, messages.waits())
    return max(free) if waits_for_all else max(end - begin for begin, end in zip(begins, free, strict=True))


def _run_free(
    structure: Structure, seconds: dict[Row, int | float], waits: tuple[int | float, ...]
) -> tuple[list[int | float], list[int | float]]:
    """Returns when each stage begins its first row and when it ends its last."""
    ends: list[int | float] = []
    begins, free = ([at] * structure.schedule.num_stages for at in (-1.0, 0.0))
    for stage, row, needs in structure.rows:
        start = free[stage]
        for number, boundary in needs:
            arrival = ends[number] + waits[boundary]
            start = arrival if arrival > start else start
        if begins[stage] < 0:
            begins[stage] = start
        free[stage] = start + seconds[row]
        ends.append(free[stage])
    return begins, free


def _cost(schedule: Schedule, costs: Costs, virtual_stage: int, kind: str) -> int | float:
    stage, chunk = schedule.stage_and_chunk(virtual_stage)
    return costs.of(schedule, stage, Op(kind, 0, chunk))
