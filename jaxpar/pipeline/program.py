"""A Schedule compiled to integers: the ops of each stage in each tick, and the slots of buffers that they read and write.

A stage has four buffers. A slot holds the values of one microbatch and chunk:

    inbox         an activation or a cotangent, from its arrival (or the write on the same stage) to its last use
    residuals_b   values from the forward pass for B alone       F or R to B
    residuals_w   values from it for W, or for both              F or R to W (to B, if the backward pass is not split)
    cotangents_w  values from B for W                            B to W

Slots are allocated like registers: a buffer has as many as are live at once, independent of the number of microbatches. Where F
and B run in one loop over layers, F writes its residuals where B has just read its own, so the two microbatches need one slot:

    trip            0      1      2      3
    B reads layer   3      2      1      0      of one microbatch
    F writes layer  0      1      2      3      of the other, in its place: the slot then holds the layers in reverse order

The stages that send in each tick are also computed here, so that a link transfers only the messages of the schedule.

An idle stage either skips an op, by a branch, or computes it and discards the result. On a GPU a branch is expensive: the host
waits for its predicate, and no message travels meanwhile. Stages in lock-step wait for the slowest one anyway, so in a tick in
which some stage runs every op of the tick, computing the others costs no time. ``compile_schedule(masks=True)`` marks such
ticks as masked. An idle op then writes to a slot that is free at that time. Some ops may not run on the values of an idle
stage (``is_maskable``), which depends on the model: ``skips`` names those that idle stages skip in masked ticks too.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from jaxpar.pipeline.control_flow import ONCE, Mask
from jaxpar.pipeline.timetable import Timetable, allot, lives_of, sends_right
from jaxpar.schedule import Op, Schedule

NONE = -1
WAYS = ("right", "left")
MAX_SEGMENTS = 8

_FIELDS = {
    "F": ("microbatch", "chunk", "x", "out", "residuals_b", "residuals_w"),
    "R": ("microbatch", "chunk", "x", "residuals_b", "residuals_w"),
    "B": ("microbatch", "chunk", "ct", "out", "residuals_b", "residuals_w", "cotangents_w"),
    "W": ("microbatch", "chunk", "residuals_w", "cotangents_w"),
}


class OpRow(NamedTuple):
    """A row of the tables of one op: what a stage runs of it in a tick. Fields that its kind does not have are None.

    Attributes:
        on: Whether the stage runs it; True if that is known when the step is traced.
        microbatch: Its microbatch.
        chunk: Its chunk of the stage's layers.
        x: The slot of the inbox that holds the input of F and R.
        ct: The slot of the inbox that holds the cotangent that B reads.
        out: The slot of the inbox for what F or B sends to this stage itself, and the head to B.
        residuals_b: Its slot of that buffer; likewise the next two.
        residuals_w: See above.
        cotangents_w: See above.
        reversed: 1 where its slots of residuals hold the layers from the last to the first; None if none ever does.
        reduces: Whether it reduces the gradients of each layer over the replicas (``Program.reduces``).
        last: The row of the last stage, where all stages share the head.
        has_head: Whether some stage runs the head in this tick, or may.
    """

    on: Mask
    microbatch: Any
    chunk: Any
    x: Any = None
    ct: Any = None
    out: Any = None
    residuals_b: Any = None
    residuals_w: Any = None
    cotangents_w: Any = None
    reversed: Any = None
    reduces: bool = False
    last: "OpRow | None" = None
    has_head: bool = True


Row = dict[str, Any]  # a stage's row of all tables, by their names


def op_row(row: Row, name: str) -> OpRow:
    """Returns the part of an op of a row, by its name in the tick."""
    own = {field: row[f"{name}_{field}"] for field in _FIELDS[name[0]]}
    return OpRow(on=row[f"{name}_on"] > 0, **own, reversed=row.get(f"{name}_reversed"))


@dataclass(frozen=True)
class Program:
    """The tables of a schedule.

    Attributes:
        schedule: The compiled schedule.
        ops: The ops that a stage may run in a tick, in this order: F, R, B, W, and W2 and so on if a tick has several W.
        tables: By name an int32 array ``[num_stages, num_ticks]``. ``F_on`` is 1 where a stage runs F, ``F_microbatch`` and
            ``F_chunk`` are its microbatch and chunk, and likewise for other ops; ``F_reversed`` and ``B_reversed``, if any
            slot of residuals holds layers in reverse order, say where; the other tables hold slots, -1 for none.
        num_slots: The number of slots of each buffer.
        sends: By direction, "right" and "left", the stages that send in each tick.
        segments: The ticks in runs, mostly with the same ops; the executor has a loop for each.
        masks: Whether it was compiled with ``masks``.
        skips: The kinds of op, and of "embed", "head" and "embed_back", that idle stages skip in masked ticks too.
        overlaps: Whether the last B shall reduce the gradients of each layer over the replicas while the next one runs. With
            one stage alone: in a pipeline they are complete in the last tick, of which reductions made a loop that took longer
            than reducing them after it.
    """

    schedule: Schedule
    ops: tuple[str, ...]
    tables: dict[str, np.ndarray]
    num_slots: dict[str, int]
    sends: dict[str, "Sends"]
    segments: tuple["Segment", ...]
    masks: bool
    skips: frozenset[str] = frozenset()
    overlaps: bool = False

    @property
    def reduces(self) -> bool:
        """Whether its last B does reduce them: if it ``overlaps``, and need not skip that B."""
        return self.overlaps and self.segments[-1].masks("B")

    def reduces_in(self, segment: "Segment") -> bool:
        """Whether a segment of a merged program is that of the last B, in which one stage runs nothing else."""
        return self.reduces and segment == self.segments[-1]

    @property
    def is_in_turn(self) -> bool:
        """Whether its only stage runs F and the complete B of one microbatch in each tick."""
        in_turn = (((Op("F", number, 0), Op("B", number, 0)),) for number in range(self.schedule.num_microbatches))
        return self.schedule.ops == tuple(in_turn)

    def table(self) -> tuple[list[str], np.ndarray]:
        """Returns the names of the tables, and all as one array ``[num_ticks, num_stages, tables]`` for the executor.

        Messages that no op reads go to a spare slot of the inbox.
        """
        spare, in_inbox = self.num_slots["inbox"], ("right", "left", "x", "out", "ct")
        columns = [
            np.where(table == NONE, spare, table) if name.split("_")[-1] in in_inbox else np.maximum(table, 0)
            for name, table in self.tables.items()
        ]
        return list(self.tables), np.stack([column.T for column in columns], axis=-1)

    def branch_shares(self) -> dict[str, tuple[Fraction, ...]]:
        """Returns how often a step takes each branch of the executor, which ``inspect_step`` cannot read off the program.

        The shares of embedding and head are those on the stages that hold them.
        """
        num_ticks = self.schedule.num_ticks
        off_on = lambda share: (1 - share, share)
        conditional = rf"(cond|{ONCE}/while)"  # control_flow.do_if
        skips = {
            op: [t for each in self.segments if op in each.ops and not each.masks(op) for t in each.ticks]
            for op in self.ops
        }
        # Of all stages: one may divide its Ws differently between W and W2 than another.
        on = {op: self.tables[f"{op}_on"][:, ticks] for op, ticks in skips.items() if ticks}
        shares: dict[str, tuple[Fraction, ...]] = {
            f"/{op}/{conditional}$": off_on(Fraction(int(each.sum()), each.size)) for op, each in on.items()
        }
        # Where a stage skips idle ops, the conditional of an end is inside that of the op.
        for inside in (rf"/[FRB]/{conditional}/.*", ""):
            of_end = lambda end, masked=not inside: off_on(self._share_of_end(end, masked=masked))
            shares |= {f"{inside}/{end}/{conditional}$": of_end(end) for end in ("embed", "head", "embed_back")}
        for way, sends in self.sends.items():
            ticks = [int(np.sum(sends.which == i)) for i in range(len(sends.senders))]
            shares[f"/send_{way}/cond$"] = tuple(Fraction(each, num_ticks) for each in ticks)
        return shares

    def _share_of_end(self, end: str, *, masked: bool) -> Fraction:
        """How often the stage that holds an end of the model runs it, of all times that it reaches its conditional.

        Args:
            end: "embed", "head" or "embed_back".
            masked: Whether in ticks that mask the op with that end; otherwise in those that skip it.
        """
        last = self.schedule.num_virtual_stages - 1
        stage, chunk = self.schedule.stage_and_chunk(last if end == "head" else 0)
        ops = {"embed": {"F", "R"}, "head": {"F"}, "embed_back": {"B"}}[end]
        ticks = [
            self.tables[f"{op}_chunk"][stage, each.start : each.stop]
            for each in self.segments
            for op in ops.intersection(each.ops)
            if each.masks(op) == masked and (each.has_head or not masked or end != "head")
        ]
        chunks = np.concatenate([np.zeros(0, np.int32), *ticks])
        reached = chunks if masked else chunks[chunks != NONE]
        return Fraction(int((reached == chunk).sum()), max(reached.size, 1))


class Segment(NamedTuple):
    """Consecutive ticks with the same ops; a single tick that skips idle ops belongs to those beside it that do so too.

    Attributes:
        start: The first tick.
        stop: The tick after the last.
        ops: The names of the ops that some stage runs.
        masked: Whether idle stages compute these ops and discard the results; otherwise they skip them.
        skips: The kinds of op that they skip all the same.
        merges: Whether F and B run in one loop over the layers (``Stage.forward_and_backward``).
        has_head: Whether some stage runs the head in its ticks; masked ticks before the first head have none.
    """

    start: int
    stop: int
    ops: tuple[str, ...]
    masked: bool
    skips: frozenset[str] = frozenset()
    merges: bool = False
    has_head: bool = True

    def masks(self, op: str) -> bool:
        """Returns whether idle stages compute an op, by its name, and discard the results."""
        return self.masked and op[0] not in self.skips

    @property
    def ticks(self) -> range:
        """All its ticks."""
        return range(self.start, self.stop)


class Sends(NamedTuple):
    """The messages in one direction.

    Attributes:
        senders: The distinct sets of stages that send in the same tick, in ascending order.
        which: int32 ``[num_ticks]``: the index of the set that sends in each tick.
    """

    senders: list[tuple[int, ...]]
    which: np.ndarray


def compile_schedule(schedule: Schedule, *, masks: bool = False, skips: Collection[str] = ()) -> Program:
    """Returns the Program of a schedule, which is checked first.

    Args:
        schedule: The schedule.
        masks: Whether idle stages compute and discard ops where that takes no longer, as on GPUs.
        skips: As for ``Program``.

    Raises:
        ValueError: The schedule violates a dependency, or a stage has two F, R or B, or two messages one way, in one tick.
    """
    schedule.check()
    timetable = Timetable(schedule)
    sends = _sends(timetable)
    fields = [f"{name}_{field}" for name in timetable.names for field in _FIELDS[name[0]]]
    shape = (schedule.num_stages, schedule.num_ticks)
    tables = {name: np.full(shape, NONE, np.int32) for name in (*fields, "right", "left")}
    for (stage, op), (tick, name) in timetable.moments.items():
        tables[f"{name}_microbatch"][stage, tick] = op.microbatch
        tables[f"{name}_chunk"][stage, tick] = op.chunk
    segments = _segments(timetable) if masks else (Segment(0, schedule.num_ticks, timetable.names, False),)
    segments = tuple(each._replace(skips=frozenset(skips)) for each in segments)
    segments = tuple(each._replace(merges=_can_merge(schedule, each)) for each in segments)
    masked = [(tick, op) for each in segments for op in each.ops if each.masks(op) for tick in each.ticks]
    merged = {tick for each in segments if each.merges for tick in each.ticks}
    num_slots = {buffer: allot(lives, tables) for buffer, lives in lives_of(timetable, masked, merged).items()}
    tables |= _orders(tables, num_slots["residuals_w"], merged) if merged else {}
    tables |= {f"{name}_on": (tables[f"{name}_chunk"] != NONE).astype(np.int32) for name in timetable.names}
    return Program(schedule, timetable.names, tables, num_slots, sends, segments, masks, frozenset(skips))


def _orders(tables: dict[str, np.ndarray], num_slots: int, merged: Collection[int]) -> dict[str, np.ndarray]:
    """The tables ``F_reversed`` and ``B_reversed``, if needed: F turns round the order of a slot that it takes from B."""
    written, read = tables["F_residuals_w"], tables["B_residuals_w"]
    of_f, of_b, every = np.zeros_like(written), np.zeros_like(read), np.arange(len(written))
    order = np.zeros((len(written), num_slots + 1), np.int32)  # of each slot, and one for NONE
    for tick, (f, b) in enumerate(zip(written.T, read.T, strict=True)):
        of_b[:, tick] = order[every, b]
        of_f[:, tick] = (tick in merged) & (f == b) & (f != NONE) & (of_b[:, tick] == 0)
        order[every, f] = of_f[:, tick]
    return {"F_reversed": of_f, "B_reversed": of_b} if of_f.any() else {}


def spmd_program(schedule: Schedule, *, masks: bool, overlaps: bool = False, skips: Collection[str] = ()) -> Program:
    """Returns the Program that the SPMD executor runs, in which a B and its W in the same tick are one op.

    Args:
        schedule: The schedule.
        masks: As for ``compile_schedule``.
        overlaps: As for ``Program``.
        skips: As for ``Program``.
    """
    program = compile_schedule(join_backward(schedule), masks=masks, skips=skips)
    return replace(program, overlaps=overlaps)


def join_backward(schedule: Schedule) -> Schedule:
    """Returns the schedule without W ops if each W is in the tick of its B, so that B is the complete backward pass.

    As one op they take less time: B stores no cotangents for W, and values that both recompute from residuals are computed
    once. That no message travels during W costs less: by the roofline of Llama 3.1 8B on data=2, stage=2, tensor=2 (H100) 7.5
    of 1,540 ms, where two ops cost 120.
    """
    of = lambda kind, ops: {(op.microbatch, op.chunk) for op in ops if op.kind == kind}
    if not schedule.splits_backward or any(of("B", ops) != of("W", ops) for tick in schedule.ops for ops in tick):
        return schedule
    without_w = lambda ops: tuple(op for op in ops if op.kind != "W")
    return replace(schedule, ops=tuple(tuple(map(without_w, tick)) for tick in schedule.ops))


def _segments(timetable: Timetable) -> tuple[Segment, ...]:
    """The ticks in runs with the same ops; one run that masks nothing if they would be many, since each is compiled."""
    schedule = timetable.schedule
    in_tick: list[list[set[str]]] = [[set() for _ in range(schedule.num_stages)] for _ in range(schedule.num_ticks)]
    for (stage, _), (tick, name) in timetable.moments.items():
        in_tick[tick][stage].add(name)

    def kind(tick: int) -> tuple[tuple[str, ...], bool]:
        anywhere = set().union(*in_tick[tick])
        units = lambda names: sum(2 if name == "B" and not schedule.splits_backward else 1 for name in names)
        return tuple(n for n in timetable.names if n in anywhere), units(anywhere) == max(map(units, in_tick[tick]))

    segments: list[Segment] = []
    for (ops, masked), run in groupby(range(schedule.num_ticks), kind):
        ticks = list(run)
        here = Segment(ticks[0], ticks[-1] + 1, ops, masked)
        if segments and _belong_together(segments[-1], here):
            before = segments.pop()
            either = tuple(name for name in timetable.names if name in {*before.ops, *ops})
            here = Segment(before.start, here.stop, either, masked)
        segments.append(here)
    if len(segments) > MAX_SEGMENTS:
        return (Segment(0, schedule.num_ticks, timetable.names, False),)
    last = schedule.stage_and_chunk(schedule.num_virtual_stages - 1)
    first_head = min(tick for (stage, op), (tick, _) in timetable.moments.items() if (stage, op.chunk) == last)
    return tuple(part for each in segments for part in _by_head(each, first_head))


def _by_head(segment: Segment, first: int) -> list[Segment]:
    """The ticks of a segment before that of the first head, where none runs if idle stages mask it, and the others."""
    if not segment.masked or segment.start >= first:
        return [segment]
    before = segment._replace(stop=min(segment.stop, first), has_head=False)
    return [before, segment._replace(start=first)] if first < segment.stop else [before]


def _can_merge(schedule: Schedule, segment: Segment) -> bool:
    """Whether F and the complete B of a tick are of different microbatches on every stage, so that neither needs the other."""
    are_masked = all(name in segment.ops and segment.masks(name) for name in "FB")
    if not are_masked or schedule.splits_backward:
        return False
    of = lambda kinds, ops: {(op.microbatch, op.chunk) for op in ops if op.kind in kinds}
    return all(of("F", ops).isdisjoint(of("RB", ops)) for tick in segment.ticks for ops in schedule.ops[tick])


def _belong_together(before: Segment, after: Segment) -> bool:
    """Whether two segments that skip idle ops are one, since XLA inlines a loop of one trip and then copies its rings."""
    return not before.masked and not after.masked and 1 in (len(before.ticks), len(after.ticks))


def _sends(timetable: Timetable) -> dict[str, Sends]:
    """The senders of each tick by direction. In a loop F and B of a tick send in opposite directions; in a V they may not."""
    schedule = timetable.schedule
    sent: dict[str, list[dict[int, Op]]] = {way: [{} for _ in range(schedule.num_ticks)] for way in WAYS}
    for (stage, op), (tick, _) in timetable.moments.items():
        receiver = schedule.virtual_stage(stage, op.chunk) + {"F": 1, "B": -1}.get(op.kind, 0)
        stays = receiver not in range(schedule.num_virtual_stages) or schedule.stage_and_chunk(receiver)[0] == stage
        if op.kind not in "FB" or stays:
            continue
        first = sent["right" if sends_right(schedule, op) else "left"][tick].setdefault(stage, op)
        if first != op:
            raise ValueError(
                f"a stage can send one message each way in a tick; got {first} and {op} on stage {stage} in tick {tick}, "
                f"both for stage {schedule.stage_and_chunk(receiver)[0]}. Give one of them a tick of its own."
            )
    by_tick = {way: [tuple(sorted(stages)) for stages in ticks] for way, ticks in sent.items()}
    senders = {way: sorted(set(ticks)) for way, ticks in by_tick.items()}
    return {
        way: Sends(senders[way], np.array([senders[way].index(stages) for stages in ticks], np.int32))
        for way, ticks in by_tick.items()
    }
