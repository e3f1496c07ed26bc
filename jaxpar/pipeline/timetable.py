"""When each op of a schedule runs, and a slot in the stage's buffers for each value from its write to its last read.

Time is counted in ticks and in phases of a tick, in which a stage runs F, R, B, any W, then receives. Slots are allotted like
registers: a buffer has as many as it holds values at once.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from jaxpar.schedule import Op, Schedule

# In a tick a stage runs its ops in this order, with any number of W; its messages arrive when all ops are done.
KINDS = ("F", "R", "B", "W")


class Moment(NamedTuple):
    """The tick of an op, and its name among the ops of that tick."""

    tick: int
    name: str


class Timetable:
    """The time of each op of each stage."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.moments: dict[tuple[int, Op], Moment] = {}
        most = Counter({kind: int(kind in schedule.kinds) for kind in KINDS})
        for tick, row in enumerate(schedule.ops):
            for stage, ops in enumerate(row):
                seen: Counter[str] = Counter()
                for op in ops:
                    seen[op.kind] += 1
                    _check_repeat(op, seen[op.kind], stage, tick)
                    name = op.kind if seen[op.kind] == 1 else f"{op.kind}{seen[op.kind]}"
                    self.moments[stage, op] = Moment(tick, name)
                most |= seen
        self.names = tuple(kind if i == 0 else f"{kind}{i + 1}" for kind in KINDS for i in range(most[kind]))
        self._phases = {phase: i for i, phase in enumerate((*self.names, "arrival"))}

    def time(self, tick: int, phase: str) -> int:
        """Returns the time of a phase of a tick, in phases."""
        return tick * len(self._phases) + self._phases[phase]

    def when(self, stage: int, op: Op) -> int:
        """Returns the time of an op."""
        return self.time(*self.moments[stage, op])

    def use(self, stage: int, op: Op, field: str) -> tuple[str, int]:
        """Returns the table that holds one of an op's slots, and the tick of the op."""
        tick, name = self.moments[stage, op]
        return f"{name}_{field}", tick


def sends_right(schedule: Schedule, op: Op) -> bool:
    """Returns whether the output of an F or B is sent to the next stage (the first after the last), not the previous one."""
    runs_back = schedule.placement == "v" and op.chunk % 2 == 1
    return (op.kind == "F") != runs_back


def _check_repeat(op: Op, times: int, stage: int, tick: int) -> None:
    if op.kind != "W" and times > 1:
        raise ValueError(
            f"a stage can run one {op.kind} in a tick, since it sends one message each way; got a second, {op}, on stage "
            f"{stage} in tick {tick}. Give it a tick of its own."
        )


@dataclass(frozen=True)
class Life:
    """A value in a slot: the time of its write, the time of its last read, and the tables that hold its slot."""

    stage: int
    start: int
    end: int
    uses: tuple[tuple[str, int], ...]


def lives_of(
    timetable: Timetable, masked: Sequence[tuple[int, str]], merged: Collection[int] = ()
) -> dict[str, list[Life]]:
    """Returns the values that each buffer holds.

    Args:
        timetable: When each op runs.
        masked: The (tick, op) pairs in which stages where that op is off compute it too.
        merged: The ticks in which B reads the residuals of one layer before F writes those of another.
    """
    schedule = timetable.schedule
    lives = {"inbox": _activations(timetable)} | {name: [] for name in ("residuals_b", "residuals_w", "cotangents_w")}
    if schedule.is_forward:
        return lives
    lives["inbox"] += _cotangents(timetable)
    first, splits = "R" if schedule.recomputes else "F", schedule.splits_backward
    of_b = [("residuals_b", first, "B"), ("residuals_w", first, "BW" if splits else "B")]
    for buffer, writer, readers in [*of_b, ("cotangents_w", "B", "W")] if splits else of_b:
        held = [_held(timetable, buffer, stage, op, readers) for stage, op in timetable.moments if op.kind == writer]
        # In a merged tick F may write where B has read.
        before_f = {timetable.time(tick, "B"): timetable.time(tick, "F") - 1 for tick in merged if writer == "F"}
        held = [replace(life, end=before_f.get(life.end, life.end)) for life in held]
        lives[buffer] = held + _discarded(timetable, buffer, writer, masked)
    return lives


def allot(lives: Iterable[Life], tables: dict[str, np.ndarray]) -> int:
    """Assigns to each value the lowest slot that is free when it is written; returns the number of slots."""
    free_after: dict[int, list[int]] = {}
    for life in sorted(lives, key=lambda life: life.start):
        slots = free_after.setdefault(life.stage, [])
        slot = next((i for i, end in enumerate(slots) if end < life.start), len(slots))
        slots[slot : slot + 1] = [life.end]
        for table, tick in life.uses:
            tables[table][life.stage, tick] = slot
    return max((len(slots) for slots in free_after.values()), default=0)


def _activations(timetable: Timetable) -> list[Life]:
    """The inputs of F and R on every virtual stage but the first, which starts from the embedding."""
    schedule, lives = timetable.schedule, []
    for virtual_stage, m in product(range(1, schedule.num_virtual_stages), range(schedule.num_microbatches)):
        stage, chunk = schedule.stage_and_chunk(virtual_stage)
        source, source_chunk = schedule.stage_and_chunk(virtual_stage - 1)
        readers = [Op(kind, m, chunk) for kind in "FR" if kind in schedule.kinds]
        uses = [timetable.use(stage, reader, "x") for reader in readers]
        end = timetable.when(stage, readers[-1])
        lives.append(_message(timetable, source, Op("F", m, source_chunk), stage, end, uses))
    return lives


def _cotangents(timetable: Timetable) -> list[Life]:
    """The inputs of B: from B of the next virtual stage, or from the head, which runs in F of the last one."""
    schedule, lives = timetable.schedule, []
    for virtual_stage, m in product(range(schedule.num_virtual_stages), range(schedule.num_microbatches)):
        stage, chunk = schedule.stage_and_chunk(virtual_stage)
        is_last = virtual_stage == schedule.num_virtual_stages - 1
        source, source_chunk = schedule.stage_and_chunk(virtual_stage if is_last else virtual_stage + 1)
        sender, reader = Op("F" if is_last else "B", m, source_chunk), Op("B", m, chunk)
        uses = [timetable.use(stage, reader, "ct")]
        lives.append(_message(timetable, source, sender, stage, timetable.when(stage, reader), uses))
    return lives


def _message(timetable: Timetable, source: int, sent: Op, stage: int, end: int, uses: list[tuple[str, int]]) -> Life:
    """A message from its arrival, or from its write on the same stage, to its last use."""
    if source == stage:
        return Life(stage, timetable.when(source, sent), end, (timetable.use(source, sent, "out"), *uses))
    tick = timetable.moments[source, sent].tick
    channel = "right" if sends_right(timetable.schedule, sent) else "left"
    return Life(stage, timetable.time(tick, "arrival"), end, ((channel, tick), *uses))


def _held(timetable: Timetable, buffer: str, stage: int, op: Op, readers: str) -> Life:
    """A value that is stored on a stage, from the op that writes it to the last op that reads it."""
    ops = [op, *(Op(kind, op.microbatch, op.chunk) for kind in readers)]
    uses = tuple(timetable.use(stage, user, buffer) for user in ops)
    return Life(stage, timetable.when(stage, op), timetable.when(stage, ops[-1]), uses)


def _discarded(timetable: Timetable, buffer: str, writer: str, masked: Sequence[tuple[int, str]]) -> list[Life]:
    """The results of ops that are off, which need a slot while they are written."""
    on = {(stage, *moment) for (stage, _), moment in timetable.moments.items()}
    return [
        Life(stage, timetable.time(tick, writer), timetable.time(tick, writer), ((f"{writer}_{buffer}", tick),))
        for tick, name in masked
        for stage in range(timetable.schedule.num_stages)
        if name == writer and (stage, tick, name) not in on
    ]
