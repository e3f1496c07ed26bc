"""A Schedule compiled to integers: what each stage does in each tick, and which slot of which buffer it reads and writes.

Four kinds of buffer live on a stage. A slot holds what belongs to one microbatch of one chunk:

    inbox     an activation or a cotangent, from its arrival (or the hand-over on the same stage) to its last use
    stored_b  what the forward pass stores for B alone           F or R to B
    stored_w  what it stores for W, or for both                  F or R to W (to B, where the backward pass is whole)
    kept      what B keeps for W                                 B to W

Slots are allotted as registers are: as few as are live at once, however many microbatches there are.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxpar.schedule import Op, Schedule

# In a tick a stage runs its ops in this order; what it sends arrives when all are done.
_PHASES = {"F": 0, "R": 1, "B": 2, "W": 3, "arrival": 4}
NONE = -1


@dataclass(frozen=True)
class Program:
    """The tables of a schedule.

    Attributes:
        schedule: What was compiled.
        num_ticks: Trips of the executor's loop.
        tables: By name an int32 array ``[num_stages, num_ticks]``. ``F_on`` and its like say whether a stage runs an op of
            that kind; ``F_microbatch`` and ``F_chunk`` which; the others are slots, -1 for none.
        num_slots: By buffer, its slots.
    """

    schedule: Schedule
    num_ticks: int
    tables: dict[str, np.ndarray]
    num_slots: dict[str, int]


@dataclass(frozen=True)
class _Life:
    """A value in a slot: written at one time, read for the last time at another, and the tables that name its slot."""

    stage: int
    start: int
    end: int
    uses: tuple[tuple[str, int], ...]


def compile_schedule(schedule: Schedule) -> Program:
    """Returns the tables of a schedule, which is checked first."""
    schedule.check()
    num_ticks = len(schedule.ops)
    names = [f"{kind}_{field}" for kind in "FRBW" for field in ("microbatch", "chunk")]
    names += [f"{k}_{b}" for k in "FR" for b in ("in", "stored_b", "stored_w")] + ["F_out", "B_out", "right", "left"]
    names += [f"B_{b}" for b in ("ct", "stored_b", "stored_w", "kept")] + ["W_stored_w", "W_kept"]
    tables = {name: np.full((schedule.num_stages, num_ticks), NONE, np.int32) for name in names}
    ticks = _ticks(schedule)
    for (stage, op), tick in ticks.items():
        if tables[f"{op.kind}_chunk"][stage, tick] != NONE:
            raise ValueError(
                f"a stage can run one op of a kind in a tick; got a second {op.kind}, {op}, on stage {stage} in tick {tick}. "
                "Give it a tick of its own."
            )
        tables[f"{op.kind}_microbatch"][stage, tick] = op.microbatch
        tables[f"{op.kind}_chunk"][stage, tick] = op.chunk
    lives = {
        "inbox": list(_inbox(schedule, ticks)),
        "stored_b": list(_stored(schedule, ticks, "stored_b")),
        "stored_w": list(_stored(schedule, ticks, "stored_w")),
        "kept": list(_kept(ticks)),
    }
    num_slots = {buffer: _allot(values, tables) for buffer, values in lives.items()}
    tables |= {f"{kind}_on": (tables[f"{kind}_microbatch"] != NONE).astype(np.int32) for kind in "FRBW"}
    return Program(schedule, num_ticks, tables, num_slots)


def _ticks(schedule: Schedule) -> dict[tuple[int, Op], int]:
    return {(stage, op): tick for tick, row in enumerate(schedule.ops) for stage, ops in enumerate(row) for op in ops}


def _time(tick: int, phase: str) -> int:
    return tick * len(_PHASES) + _PHASES[phase]


def _inbox(schedule: Schedule, ticks: dict[tuple[int, Op], int]) -> Iterable[_Life]:
    """What F and R read, and what B reads, each on the stage that reads it."""
    parts = schedule.num_virtual_stages
    place = [schedule.place_of(part) for part in range(parts)]
    for part in range(parts):
        stage, chunk = place[part]
        for m in range(schedule.num_microbatches):
            if part > 0:
                readers = [kind for kind in "FR" if (stage, Op(kind, m, chunk)) in ticks]
                uses = [(f"{kind}_in", ticks[stage, Op(kind, m, chunk)]) for kind in readers]
                yield _message(
                    schedule, ticks, place[part - 1], Op("F", m, place[part - 1][1]), stage, uses, readers[-1]
                )
            # The head hands the last part its cotangent, in the F of that part.
            sender = ("F", part) if part == parts - 1 else ("B", part + 1)
            source = place[sender[1]]
            uses = [("B_ct", ticks[stage, Op("B", m, chunk)])]
            yield _message(schedule, ticks, source, Op(sender[0], m, source[1]), stage, uses, "B")


def _message(
    schedule: Schedule,
    ticks: dict[tuple[int, Op], int],
    source: tuple[int, int],
    sent: Op,
    stage: int,
    uses: list[tuple[str, int]],
    last: str,
) -> _Life:
    tick = ticks[source[0], sent]
    end = _time(uses[-1][1], last)
    if source[0] == stage:
        return _Life(stage, _time(tick, sent.kind), end, ((f"{sent.kind}_out", tick), *uses))
    channel = "right" if sends_right(schedule, sent) else "left"
    return _Life(stage, _time(tick, "arrival"), end, ((channel, tick), *uses))


def sends_right(schedule: Schedule, op: Op) -> bool:
    """Returns whether what an F or B makes goes to the next stage (the first after the last); else to the one before."""
    runs_back = schedule.placement == "v" and op.chunk % 2 == 1
    return (op.kind == "F") != runs_back


def _stored(schedule: Schedule, ticks: dict[tuple[int, Op], int], buffer: str) -> Iterable[_Life]:
    writer = "R" if schedule.recomputes else "F"
    for (stage, op), tick in ticks.items():
        if op.kind != writer:
            continue
        readers = ["B"] + ["W"] * (buffer == "stored_w" and schedule.splits_backward)
        read = [(kind, ticks[stage, Op(kind, op.microbatch, op.chunk)]) for kind in readers]
        uses = ((f"{kind}_{buffer}", tick) for kind, tick in [(writer, tick), *read])
        yield _Life(stage, _time(tick, writer), _time(read[-1][1], read[-1][0]), tuple(uses))


def _kept(ticks: dict[tuple[int, Op], int]) -> Iterable[_Life]:
    for (stage, op), end in ticks.items():
        if op.kind == "W":
            start = ticks[stage, Op("B", op.microbatch, op.chunk)]
            yield _Life(stage, _time(start, "B"), _time(end, "W"), (("B_kept", start), ("W_kept", end)))


def _allot(lives: Iterable[_Life], tables: dict[str, np.ndarray]) -> int:
    """Gives each value the lowest slot that is free when it is written; returns how many slots that takes."""
    free_after: dict[int, list[int]] = {}
    for life in sorted(lives, key=lambda life: life.start):
        slots = free_after.setdefault(life.stage, [])
        slot = next((i for i, end in enumerate(slots) if end < life.start), len(slots))
        slots[slot : slot + 1] = [life.end]
        for table, tick in life.uses:
            tables[table][life.stage, tick] = slot
    return max((len(slots) for slots in free_after.values()), default=0)
