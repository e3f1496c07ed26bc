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
        more = (f"W{number}" for number in range(2, 1 + max(seen.values())))
        self.names = tuple(name for name in (*KINDS, *more) if name in used)
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
    lives = {"inbox": _messages(timetable, "F")} | {name: [] for name in ("residuals_b", "residuals_w", "cotangents_w")}
    if schedule.is_forward:
        return lives
    lives["inbox"] += _messages(timetable, "B")
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


def _messages(timetable: Timetable, kind: str) -> list[Life]:
    """The inputs of F and R, or of B, from their arrival, or their write on the same stage, to their last use.

    They come from the neighbouring virtual stage, those of the last B from the head, which runs in F. The first F starts from
    the embedding.
    """
    schedule, lives = timetable.schedule, []
    for virtual_stage, m in product(range(schedule.num_virtual_stages), range(schedule.num_microbatches)):
        stage, chunk = schedule.stage_and_chunk(virtual_stage)
        readers = [Op(each, m, chunk) for each in ("FR" if kind == "F" else "B") if each in schedule.kinds]
        senders = [each for each in schedule.inputs_of(stage, readers[0]) if each[1].kind == kind]
        if kind == "B" and not senders:
            senders = [(stage, Op("F", m, chunk))]
        for source, sent in senders:
            written, where = timetable.when(source, sent), timetable.use(source, sent, "out")
            if source != stage:
                tick = timetable.moments[source, sent].tick
                written = timetable.time(tick, "arrival")
                where = ("right" if sends_right(schedule, sent) else "left"), tick
            uses = (timetable.use(stage, reader, "x" if kind == "F" else "ct") for reader in readers)
            lives.append(Life(stage, written, timetable.when(stage, readers[-1]), (where, *uses)))
    return lives


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
