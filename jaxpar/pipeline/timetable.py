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
        seen: Counter[tuple[int, int, str]] = Counter()
        for (stage, op), (tick, _) in schedule.moments().items():
            seen[stage, tick, op.kind] += 1
            times = seen[stage, tick, op.kind]
            if op.kind != "W" and times > 1:
                raise ValueError(
                    f"a stage can run one {op.kind} in a tick, since it sends one message each way; got a second, {op}, on "
                    f"stage {stage} in tick {tick}. Give it a tick of its own."
                )
            self.moments[stage, op] = Moment(tick, op.kind if times == 1 else f"{op.kind}{times}")
        used = {name for _, name in self.moments.values()}
        more = [f"W{number}" for number in range(2, 1 + max(seen.values()))]
        in_order = *KINDS, *more
        self.names = tuple(name for name in in_order if name in used)
        phases = *self.names, "arrival"
        self._phases = {phase: i for i, phase in enumerate(phases)}

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


@dataclass(frozen=True)
class Life:
    """A value in a slot: the time of its write, the time of its last read, and the tables that hold its slot."""

    stage: int
    start: int
    end: int
    uses: tuple[tuple[str, int], ...]


def lives_of(
    timetable: Timetable,
    masked: Sequence[tuple[int, str]],
    merged: Collection[int] = (),
) -> dict[str, list[Life]]:
    """Returns the values that each buffer holds.

    Args:
        timetable: When each op runs.
        masked: The (tick, op) pairs in which stages where that op is off compute it too.
        merged: The ticks in which B reads the residuals of one layer before F writes those of another.
    """
    schedule = timetable.schedule
    lives: dict[str, list[Life]] = {
        "inbox": _messages(timetable, "F"),
        "residuals_b": [],
        "residuals_w": [],
        "cotangents_w": [],
    }
    if schedule.is_forward:
        return lives
    lives["inbox"] += _messages(timetable, "B")
    writer = "R" if schedule.recomputes else "F"
    users = {
        "residuals_b": (writer, "B"),
        "residuals_w": (writer, "BW" if schedule.splits_backward else "B"),
    }
    if schedule.splits_backward:
        users["cotangents_w"] = "B", "W"
    for buffer, (writer, readers) in users.items():
        held = _all_held(timetable, buffer, writer, readers)
        if writer == "F":
            held = [_until_written_again(timetable, life, merged) for life in held]
        lives[buffer] = held + _discarded(timetable, buffer, writer, masked)
    return lives


def _until_written_again(
    timetable: Timetable,
    life: Life,
    merged: Collection[int],
) -> Life:
    """A value whose last reader is B of a merged tick, in which F may write where B has read."""
    for tick in merged:
        if timetable.time(tick, "B") == life.end:
            return replace(life, end=timetable.time(tick, "F") - 1)
    return life


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


def _messages(timetable: Timetable, kind: str) -> list[Life]:
    """The inputs of F and R, or of B, from their arrival, or their write on the same stage, to their last use.

    They come from the neighbouring virtual stage, those of the last B from the head, which runs in F. The first F starts from
    the embedding.
    """
    schedule, lives = timetable.schedule, []
    kinds = [each for each in ("FR" if kind == "F" else "B") if each in schedule.kinds]
    field = "x" if kind == "F" else "ct"
    virtual_stages = range(schedule.num_virtual_stages)
    for virtual_stage, m in product(virtual_stages, range(schedule.num_microbatches)):
        stage, chunk = schedule.stage_and_chunk(virtual_stage)
        readers = [Op(each, m, chunk) for each in kinds]
        inputs = schedule.inputs_of(stage, readers[0])
        senders = [(source, op) for source, op in inputs if op.kind == kind]
        if kind == "B" and not senders:
            senders = [(stage, Op("F", m, chunk))]
        uses = [timetable.use(stage, reader, field) for reader in readers]
        last = timetable.when(stage, readers[-1])
        for source, sent in senders:
            start, where = _entry(timetable, source, sent, stage)
            lives.append(Life(stage, start, last, (where, *uses)))
    return lives


def _entry(
    timetable: Timetable,
    source: int,
    sent: Op,
    stage: int,
) -> tuple[int, tuple[str, int]]:
    """When a message is written to the inbox of a stage, and the table and tick that say where."""
    if source == stage:
        return timetable.when(source, sent), timetable.use(source, sent, "out")
    tick, _ = timetable.moments[source, sent]
    way = "right" if sends_right(timetable.schedule, sent) else "left"
    return timetable.time(tick, "arrival"), (way, tick)


def _all_held(
    timetable: Timetable,
    buffer: str,
    writer: str,
    readers: str,
) -> list[Life]:
    """The values that are stored on stages, from the op that writes each to the last op that reads it."""
    lives = []
    for stage, op in timetable.moments:
        if op.kind != writer:
            continue
        users = [op, *(Op(kind, op.microbatch, op.chunk) for kind in readers)]
        uses = [timetable.use(stage, user, buffer) for user in users]
        start, end = timetable.when(stage, op), timetable.when(stage, users[-1])
        lives.append(Life(stage, start, end, tuple(uses)))
    return lives


def _discarded(
    timetable: Timetable,
    buffer: str,
    writer: str,
    masked: Sequence[tuple[int, str]],
) -> list[Life]:
    """The results of ops that are off, which need a slot while they are written."""
    on = {(stage, *moment) for (stage, _), moment in timetable.moments.items()}
    stages = range(timetable.schedule.num_stages)
    ticks = [tick for tick, name in masked if name == writer]
    lives = []
    for tick, stage in product(ticks, stages):
        if (stage, tick, writer) not in on:
            now = timetable.time(tick, writer)
            lives.append(Life(stage, now, now, ((f"{writer}_{buffer}", tick),)))
    return lives
