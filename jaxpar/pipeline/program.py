"""A Schedule compiled to integers: the ops of each stage in each tick, and the slots of buffers that they read and write.

A stage has four buffers. A slot holds the values of one microbatch and chunk:

    inbox         an activation or a cotangent, from its arrival (or the write on the same stage) to its last use
    residuals_b   values from the forward pass for B alone       F or R to B
    residuals_w   values from it for W, or for both              F or R to W (to B, if the backward pass is not split)
    cotangents_w  values from B for W                            B to W

Slots are allocated like registers: a buffer has as many as are live at once, independent of the number of microbatches.

The stages that send in each tick are also computed here, so that a link transfers only the messages of the schedule.

An idle stage either skips an op, by a branch, or computes it and discards the result. On a GPU a branch is expensive: the host
waits for its predicate, and no message travels meanwhile. Stages in lock-step wait for the slowest one anyway, so in a tick in
which some stage runs every op of the tick, computing the others costs no time. ``compile_schedule(masks=True)`` marks such
ticks as masked. An idle op then writes to a slot that is free at that time.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, product
from typing import NamedTuple

import numpy as np

from jaxpar.schedule import Op, Schedule

NONE = -1
WAYS = ("right", "left")
MAX_SEGMENTS = 8

# In a tick a stage runs its ops in this order, with any number of W; its messages arrive when all ops are done.
_KINDS = ("F", "R", "B", "W")
_FIELDS = {
    "F": ("microbatch", "chunk", "in", "out", "residuals_b", "residuals_w"),
    "R": ("microbatch", "chunk", "in", "residuals_b", "residuals_w"),
    "B": ("microbatch", "chunk", "ct", "out", "residuals_b", "residuals_w", "cotangents_w"),
    "W": ("microbatch", "chunk", "residuals_w", "cotangents_w"),
}


@dataclass(frozen=True)
class Program:
    """The tables of a schedule.

    Attributes:
        schedule: The compiled schedule.
        ops: The ops that a stage may run in a tick, in this order: F, R, B, W, and W2 and so on if a tick has several W.
        tables: By name an int32 array ``[num_stages, num_ticks]``. ``F_on`` is 1 where a stage runs F, ``F_microbatch`` and
            ``F_chunk`` are its microbatch and chunk, and likewise for other ops; the other tables hold slots, -1 for none.
        num_slots: The number of slots of each buffer.
        sends: By direction, "right" and "left", the stages that send in each tick.
        segments: The ticks in runs that have the same ops; the executor has a loop for each.
        masks: Whether it was compiled with ``masks``.
    """

    schedule: Schedule
    ops: tuple[str, ...]
    tables: dict[str, np.ndarray]
    num_slots: dict[str, int]
    sends: dict[str, "Sends"]
    segments: tuple["Segment", ...]
    masks: bool

    def branch_shares(self) -> dict[str, tuple[Fraction, ...]]:
        """Returns how often a step takes each branch of the executor, which ``inspect_step`` cannot read off the program.

        The shares of embedding and head are those on the stages that hold them.
        """
        num_ticks, num_chunks = self.schedule.num_ticks, self.schedule.num_chunks
        off_on = lambda share: (1 - share, share)
        # On the first stage; any other runs as many, but may divide its Ws differently between W and W2.
        runs = {op: int(self.tables[f"{op}_on"][0].sum()) for op in self.ops}
        shares: dict[str, tuple[Fraction, ...]] = {
            f"/{op}/cond$": off_on(Fraction(times, num_ticks)) for op, times in runs.items()
        }
        shares |= {f"/{end}/cond$": off_on(Fraction(1, num_chunks)) for end in ("embed", "head", "embed_back")}
        for way, sends in self.sends.items():
            ticks = [int(np.sum(sends.which == i)) for i in range(len(sends.senders))]
            shares[f"/send_{way}/cond$"] = tuple(Fraction(each, num_ticks) for each in ticks)
        return shares


class Segment(NamedTuple):
    """Consecutive ticks with the same ops.

    Attributes:
        start: The first tick.
        stop: The tick after the last.
        ops: The names of the ops that some stage runs.
        masked: Whether idle stages compute these ops and discard the results; otherwise they skip them.
    """

    start: int
    stop: int
    ops: tuple[str, ...]
    masked: bool


class Sends(NamedTuple):
    """The messages in one direction.

    Attributes:
        senders: The distinct sets of stages that send in the same tick, in ascending order.
        which: int32 ``[num_ticks]``: the index of the set that sends in each tick.
    """

    senders: list[tuple[int, ...]]
    which: np.ndarray


class _Moment(NamedTuple):
    """The tick of an op, and its name among the ops of that tick."""

    tick: int
    name: str


@dataclass(frozen=True)
class _Life:
    """A value in a slot: the time of its write, the time of its last read, and the tables that hold its slot."""

    stage: int
    start: int
    end: int
    uses: tuple[tuple[str, int], ...]


class _Timetable:
    """The time of each op of each stage."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.moments: dict[tuple[int, Op], _Moment] = {}
        most = Counter({kind: int(kind in schedule.kinds) for kind in _KINDS})
        for tick, row in enumerate(schedule.ops):
            for stage, ops in enumerate(row):
                seen: Counter[str] = Counter()
                for op in ops:
                    seen[op.kind] += 1
                    _check_repeat(op, seen[op.kind], stage, tick)
                    name = op.kind if seen[op.kind] == 1 else f"{op.kind}{seen[op.kind]}"
                    self.moments[stage, op] = _Moment(tick, name)
                most |= seen
        self.names = tuple(kind if i == 0 else f"{kind}{i + 1}" for kind in _KINDS for i in range(most[kind]))
        self._phases = {phase: i for i, phase in enumerate((*self.names, "arrival"))}

    def time(self, tick: int, phase: str) -> int:
        return tick * len(self._phases) + self._phases[phase]

    def when(self, stage: int, op: Op) -> int:
        return self.time(*self.moments[stage, op])

    def use(self, stage: int, op: Op, field: str) -> tuple[str, int]:
        """The table that holds one of an op's slots, and the tick of the op."""
        tick, name = self.moments[stage, op]
        return f"{name}_{field}", tick


def compile_schedule(schedule: Schedule, *, masks: bool = False) -> Program:
    """Returns the Program of a schedule, which is checked first.

    Args:
        schedule: The schedule.
        masks: Whether idle stages compute and discard ops where that takes no longer, as on GPUs.

    Raises:
        ValueError: The schedule violates a dependency, or a stage has two F, R or B, or two messages one way, in one tick.
    """
    schedule.check()
    timetable = _Timetable(schedule)
    sends = _sends(timetable)
    fields = [f"{name}_{field}" for name in timetable.names for field in _FIELDS[name[0]]]
    shape = (schedule.num_stages, schedule.num_ticks)
    tables = {name: np.full(shape, NONE, np.int32) for name in (*fields, "right", "left")}
    for (stage, op), (tick, name) in timetable.moments.items():
        tables[f"{name}_microbatch"][stage, tick] = op.microbatch
        tables[f"{name}_chunk"][stage, tick] = op.chunk
    segments = _segments(timetable) if masks else (Segment(0, schedule.num_ticks, timetable.names, False),)
    lives = {
        "inbox": _activations(timetable) + _cotangents(timetable),
        "residuals_b": _stored(timetable, "residuals_b"),
        "residuals_w": _stored(timetable, "residuals_w"),
        "cotangents_w": _cotangents_w(timetable),
    }
    for buffer, values in lives.items():
        values += _discarded(timetable, segments, buffer, tables)
    num_slots = {buffer: _allot(values, tables) for buffer, values in lives.items()}
    tables |= {f"{name}_on": (tables[f"{name}_chunk"] != NONE).astype(np.int32) for name in timetable.names}
    return Program(schedule, timetable.names, tables, num_slots, sends, segments, masks)


def sends_right(schedule: Schedule, op: Op) -> bool:
    """Returns whether the output of an F or B is sent to the next stage (the first after the last), not the previous one."""
    runs_back = schedule.placement == "v" and op.chunk % 2 == 1
    return (op.kind == "F") != runs_back


def _segments(timetable: _Timetable) -> tuple[Segment, ...]:
    """The ticks in runs with the same ops; one run that masks nothing if they would be many, since each is compiled."""
    schedule = timetable.schedule
    in_tick: list[list[set[str]]] = [[set() for _ in range(schedule.num_stages)] for _ in range(schedule.num_ticks)]
    for (stage, _), (tick, name) in timetable.moments.items():
        in_tick[tick][stage].add(name)

    def kind(tick: int) -> tuple[tuple[str, ...], bool]:
        anywhere = set().union(*in_tick[tick])
        units = lambda names: sum(2 if name == "B" and not schedule.splits_backward else 1 for name in names)
        return tuple(n for n in timetable.names if n in anywhere), units(anywhere) == max(map(units, in_tick[tick]))

    segments = []
    for (ops, masked), run in groupby(range(schedule.num_ticks), kind):
        ticks = list(run)
        segments.append(Segment(ticks[0], ticks[-1] + 1, ops, masked))
    if len(segments) > MAX_SEGMENTS:
        return (Segment(0, schedule.num_ticks, timetable.names, False),)
    return tuple(segments)


def _discarded(
    timetable: _Timetable, segments: Iterable[Segment], buffer: str, tables: dict[str, np.ndarray]
) -> list[_Life]:
    """The results of idle ops in masked ticks, which need a slot while they are written."""
    schedule = timetable.schedule
    writer = {"residuals_b": "R" if schedule.recomputes else "F", "residuals_w": "R" if schedule.recomputes else "F"}
    writes = writer.get(buffer, "B" if buffer == "cotangents_w" and schedule.splits_backward else None)
    return [
        _Life(stage, timetable.time(tick, writes), timetable.time(tick, writes), ((f"{writes}_{buffer}", tick),))
        for segment in segments
        if segment.masked and writes in segment.ops
        for tick, stage in product(range(segment.start, segment.stop), range(schedule.num_stages))
        if tables[f"{writes}_chunk"][stage, tick] == NONE
    ]


def _check_repeat(op: Op, times: int, stage: int, tick: int) -> None:
    if op.kind != "W" and times > 1:
        raise ValueError(
            f"a stage can run one {op.kind} in a tick, since it sends one message each way; got a second, {op}, on stage "
            f"{stage} in tick {tick}. Give it a tick of its own."
        )


def _sends(timetable: _Timetable) -> dict[str, Sends]:
    """The senders of each tick by direction. In a loop F and B of a tick send in opposite directions; in a V they may not."""
    schedule, sent = timetable.schedule, {}
    for (stage, op), (tick, _) in timetable.moments.items():
        receiver = schedule.virtual_stage(stage, op.chunk) + {"F": 1, "B": -1}.get(op.kind, 0)
        stays = receiver not in range(schedule.num_virtual_stages) or schedule.stage_and_chunk(receiver)[0] == stage
        if op.kind not in "FB" or stays:
            continue
        first = sent.setdefault(("right" if sends_right(schedule, op) else "left", tick, stage), op)
        if first != op:
            raise ValueError(
                f"a stage can send one message each way in a tick; got {first} and {op} on stage {stage} in tick {tick}, "
                f"both for stage {schedule.stage_and_chunk(receiver)[0]}. Give one of them a tick of its own."
            )
    return {way: _sets_of_senders(schedule.num_ticks, {key[1:] for key in sent if key[0] == way}) for way in WAYS}


def _sets_of_senders(num_ticks: int, sent: set[tuple[int, int]]) -> Sends:
    stages_of: dict[int, list[int]] = {}
    for tick, stage in sorted(sent):
        stages_of.setdefault(tick, []).append(stage)
    by_tick = [tuple(stages_of.get(tick, ())) for tick in range(num_ticks)]
    senders = sorted(set(by_tick))
    return Sends(senders, np.array([senders.index(stages) for stages in by_tick], np.int32))


def _activations(timetable: _Timetable) -> list[_Life]:
    """The inputs of F and R on every virtual stage but the first, which starts from the embedding."""
    schedule, lives = timetable.schedule, []
    for virtual_stage, m in product(range(1, schedule.num_virtual_stages), range(schedule.num_microbatches)):
        stage, chunk = schedule.stage_and_chunk(virtual_stage)
        source, source_chunk = schedule.stage_and_chunk(virtual_stage - 1)
        readers = [Op(kind, m, chunk) for kind in "FR" if kind in schedule.kinds]
        uses = [timetable.use(stage, reader, "in") for reader in readers]
        end = timetable.when(stage, readers[-1])
        lives.append(_message(timetable, source, Op("F", m, source_chunk), stage, end, uses))
    return lives


def _cotangents(timetable: _Timetable) -> list[_Life]:
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


def _message(timetable: _Timetable, source: int, sent: Op, stage: int, end: int, uses: list[tuple[str, int]]) -> _Life:
    """A message from its arrival, or from its write on the same stage, to its last use."""
    if source == stage:
        return _Life(stage, timetable.when(source, sent), end, (timetable.use(source, sent, "out"), *uses))
    tick = timetable.moments[source, sent].tick
    channel = "right" if sends_right(timetable.schedule, sent) else "left"
    return _Life(stage, timetable.time(tick, "arrival"), end, ((channel, tick), *uses))


def _stored(timetable: _Timetable, buffer: str) -> list[_Life]:
    """The residuals that F, or R if there is one, stores until B or W has read them."""
    writer = "R" if timetable.schedule.recomputes else "F"
    readers = "BW" if buffer == "residuals_w" and timetable.schedule.splits_backward else "B"
    return [_held(timetable, buffer, stage, op, readers) for stage, op in timetable.moments if op.kind == writer]


def _cotangents_w(timetable: _Timetable) -> list[_Life]:
    """The cotangents that B stores until W has read them."""
    if not timetable.schedule.splits_backward:
        return []
    return [_held(timetable, "cotangents_w", stage, op, "W") for stage, op in timetable.moments if op.kind == "B"]


def _held(timetable: _Timetable, buffer: str, stage: int, op: Op, readers: str) -> _Life:
    """A value that is stored on a stage, from the op that writes it to the last op that reads it."""
    ops = [op, *(Op(kind, op.microbatch, op.chunk) for kind in readers)]
    uses = tuple(timetable.use(stage, user, buffer) for user in ops)
    return _Life(stage, timetable.when(stage, op), timetable.when(stage, ops[-1]), uses)


def _allot(lives: Iterable[_Life], tables: dict[str, np.ndarray]) -> int:
    """Assigns to each value the lowest slot that is free when it is written; returns the number of slots."""
    free_after: dict[int, list[int]] = {}
    for life in sorted(lives, key=lambda life: life.start):
        slots = free_after.setdefault(life.stage, [])
        slot = next((i for i, end in enumerate(slots) if end < life.start), len(slots))
        slots[slot : slot + 1] = [life.end]
        for table, tick in life.uses:
            tables[table][life.stage, tick] = slot
    return max((len(slots) for slots in free_after.values()), default=0)
