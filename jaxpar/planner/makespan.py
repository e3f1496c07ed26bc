"""The makespan of a schedule for many costs: as ``jaxpar.schedule.simulate`` has it, with the table's structure read once."""

from collections import Counter
from dataclasses import dataclass

from jaxpar.schedule import Costs, Op, Schedule

OfOp = tuple[int, str]  # virtual stage and kind: ops that are alike in both take equally long


@dataclass(frozen=True)
class Structure:
    """What a schedule's makespan depends on besides costs.

    Attributes:
        schedule: The schedule.
        ops: Its ops in the order of ticks: stage, what it is, and the ops that it needs, of which some are on other stages.
        ticks: For each kind of tick, which is what each stage does in it, the number of such ticks.
    """

    schedule: Schedule
    ops: tuple[tuple[int, OfOp, tuple[tuple[int, bool], ...]], ...]
    ticks: tuple[tuple[frozenset[tuple[OfOp, ...]], int], ...]


def structure_of(schedule: Schedule) -> Structure:
    """Returns the structure of a schedule."""
    numbers: dict[tuple[int, Op], int] = {}
    ops, ticks = [], Counter()
    of = lambda stage, op: (schedule.virtual_stage(stage, op.chunk), op.kind)
    for tick in schedule.ops:
        for stage, row in enumerate(tick):
            for op in row:
                needs = schedule.inputs_of(stage, op)
                arrivals = tuple((numbers[need], need[0] != stage) for need in needs)
                numbers[stage, op] = len(ops)
                ops.append((stage, of(stage, op), arrivals))
        ticks[frozenset(tuple(of(stage, op) for op in row) for stage, row in enumerate(tick))] += 1
    return Structure(schedule, tuple(ops), tuple(ticks.items()))


def makespan(structure: Structure, costs: Costs, *, is_free: bool) -> int | float:
    """Returns the makespan of a schedule, with stages that run freely or in lock-step.

    Args:
        structure: The schedule's structure.
        costs: The times of ops and of messages.
        is_free: Whether stages run freely.
    """
    schedule = structure.schedule
    kinds = {of for _, of, _ in structure.ops}
    seconds = {(virtual, kind): _cost(schedule, costs, virtual, kind) for virtual, kind in kinds}
    if not is_free:
        exchange = costs.p2p if schedule.num_stages > 1 else 0
        one = lambda tick: max((sum(seconds[of] for of in row) for row in tick), default=0)
        return sum(count * (one(tick) + exchange) for tick, count in structure.ticks)
    ends: list[int | float] = []
    free = [0.0] * schedule.num_stages
    for stage, of, needs in structure.ops:
        start = free[stage]
        for number, crosses in needs:
            arrival = ends[number] + costs.p2p if crosses else ends[number]
            start = arrival if arrival > start else start
        free[stage] = start + seconds[of]
        ends.append(free[stage])
    return max(ends)


def _cost(schedule: Schedule, costs: Costs, virtual_stage: int, kind: str) -> int | float:
    stage, chunk = schedule.stage_and_chunk(virtual_stage)
    return costs.of(schedule, stage, Op(kind, 0, chunk))
