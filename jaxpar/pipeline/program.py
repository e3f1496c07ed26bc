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
from typing import Any, NamedTuple

import numpy as np

from jaxpar.pipeline.control_flow import ONCE, Mask
from jaxpar.pipeline.segments import Segment, segments_of, work_of
from jaxpar.pipeline.timetable import Timetable, allot, lives_of, sends_right
from jaxpar.schedule import Op, Schedule

NONE = -1
WAYS = ("right", "left")

_FIELDS = {
    "F": ("microbatch", "chunk", "x", "out", "residuals_b", "residuals_w"),
    "R": ("microbatch", "chunk", "x", "residuals_b", "residuals_w"),
    "B": ("microbatch", "chunk", "ct", "out", "residuals_b", "residuals_w", "cotangents_w"),
    "W": ("microbatch", "chunk", "residuals_w", "cotangents_w"),
}


_OPS_OF_ENDS = {"embed": {"F", "R"}, "head": {"F"}, "embed_back": {"B"}}
_IN_INBOX = ("right", "left", "x", "out", "ct")  # the fields that hold slots of the inbox


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
    segments: tuple[Segment, ...]
    masks: bool
    skips: frozenset[str] = frozenset()
    overlaps: bool = False

    @property
    def reduces(self) -> bool:
        """Whether its last B does reduce them: if it ``overlaps``, and need not skip that B."""
        return self.overlaps and self.segments[-1].masks("B")

    def reduces_in(self, segment: Segment) -> bool:
        """Whether a segment of a merged program is that of the last B, in which one stage runs nothing else."""
        return self.reduces and segment == self.segments[-1]

    @property
    def is_in_turn(self) -> bool:
        """Whether its only stage runs F and the complete B of one microbatch in each tick."""
        numbers = range(self.schedule.num_microbatches)
        ticks = [(Op("F", number, 0), Op("B", number, 0)) for number in numbers]
        return self.schedule.ops == tuple((tick,) for tick in ticks)

    def table(self) -> tuple[list[str], np.ndarray]:
        """Returns the names of the tables, and all as one array ``[num_ticks, num_stages, tables]`` for the executor.

        Messages that no op reads go to a spare slot of the inbox.
        """
        spare = self.num_slots["inbox"]
        columns = []
        for name, table in self.tables.items():
            field = name.split("_")[-1]
            unread = spare if field in _IN_INBOX else 0
            columns.append(np.where(table == NONE, unread, table).T)
        return list(self.tables), np.stack(columns, axis=-1)

    def branch_shares(self) -> dict[str, tuple[Fraction, ...]]:
        """Returns how often a step takes each branch of the executor, which ``inspect_step`` cannot read off the program.

        The shares of embedding and head are those on the stages that hold them.
        """
        conditional = rf"(cond|{ONCE}/while)"  # control_flow.do_if
        shares: dict[str, tuple[Fraction, ...]] = {}
        for op in self.ops:
            skipping = [each for each in self.segments if op in each.ops and not each.masks(op)]
            ticks = [tick for each in skipping for tick in each.ticks]
            if ticks:
                # Of all stages: one may divide its Ws differently between W and W2 than another.
                is_on = self.tables[f"{op}_on"][:, ticks]
                shares[f"/{op}/{conditional}$"] = _off_on(int(is_on.sum()), is_on.size)
        # Where a stage skips idle ops, the conditional of an end is inside that of the op.
        for inside in (rf"/[FRB]/{conditional}/.*", ""):
            for end in ("embed", "head", "embed_back"):
                share = self._share_of_end(end, masked=not inside)
                shares[f"{inside}/{end}/{conditional}$"] = share
        for way, sends in self.sends.items():
            times = [int(np.sum(sends.which == i)) for i in range(len(sends.senders))]
            of_each = [Fraction(each, self.schedule.num_ticks) for each in times]
            shares[f"/send_{way}/cond$"] = tuple(of_each)
        return shares

    def _share_of_end(self, end: str, *, masked: bool) -> tuple[Fraction, Fraction]:
        """How often the stage that holds an end of the model skips and runs it, of all times that it reaches its conditional.

        Args:
            end: "embed", "head" or "embed_back".
            masked: Whether in ticks that mask the op with that end; otherwise in those that skip it.
        """
        is_head = end == "head"
        virtual_stage = self.schedule.num_virtual_stages - 1 if is_head else 0
        stage, chunk = self.schedule.stage_and_chunk(virtual_stage)
        reached = []
        for segment in self.segments:
            if is_head and masked and not segment.has_head:
                continue
            for op in _OPS_OF_ENDS[end].intersection(segment.ops):
                if segment.masks(op) == masked:
                    chunks = self.tables[f"{op}_chunk"][stage, segment.ticks]
                    reached += [each for each in chunks if masked or each != NONE]
        times = sum(int(each == chunk) for each in reached)
        return _off_on(times, max(len(reached), 1))


def _off_on(times: int, of: int) -> tuple[Fraction, Fraction]:
    share = Fraction(times, of)
    return 1 - share, share


class Sends(NamedTuple):
    """The messages in one direction.

    Attributes:
        senders: The distinct sets of stages that send in the same tick, in ascending order.
        which: int32 ``[num_ticks]``: the index of the set that sends in each tick.
    """

    senders: list[tuple[int, ...]]
    which: np.ndarray


def compile_schedule(
    schedule: Schedule, *, masks: bool = False, skips: Collection[str] = ()
) -> Program:
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
    tables = _tables(timetable)
    segments = segments_of(timetable, masks=masks, skips=skips)
    masked, merged = [], set()
    for segment in segments:
        computed = [op for op in segment.ops if segment.masks(op)]
        masked += [(tick, op) for op in computed for tick in segment.ticks]
        if segment.merges:
            merged.update(segment.ticks)
    lives = lives_of(timetable, masked, merged)
    num_slots = {buffer: allot(of_buffer, tables) for buffer, of_buffer in lives.items()}
    if merged:
        tables |= _orders(tables, num_slots["residuals_w"], merged)
    for name in timetable.names:
        is_on = tables[f"{name}_chunk"] != NONE
        tables[f"{name}_on"] = is_on.astype(np.int32)
    return Program(
        schedule,
        timetable.names,
        tables,
        num_slots,
        sends,
        segments,
        masks,
        frozenset(skips),
    )


def _tables(timetable: Timetable) -> dict[str, np.ndarray]:
    """The tables with the microbatch and chunk of each op, and without slots."""
    schedule = timetable.schedule
    names = [f"{name}_{field}" for name in timetable.names for field in _FIELDS[name[0]]]
    shape = schedule.num_stages, schedule.num_ticks
    tables = {name: np.full(shape, NONE, np.int32) for name in (*names, "right", "left")}
    for (stage, op), (tick, name) in timetable.moments.items():
        tables[f"{name}_microbatch"][stage, tick] = op.microbatch
        tables[f"{name}_chunk"][stage, tick] = op.chunk
    return tables


def _orders(
    tables: dict[str, np.ndarray],
    num_slots: int,
    merged: Collection[int],
) -> dict[str, np.ndarray]:
    """The tables ``F_reversed`` and ``B_reversed``, if needed: F turns round the order of a slot that it takes from B."""
    written, read = tables["F_residuals_w"], tables["B_residuals_w"]
    of_f, of_b = np.zeros_like(written), np.zeros_like(read)
    stages = np.arange(len(written))
    order = np.zeros((len(written), num_slots + 1), np.int32)  # of each slot, and one for NONE
    for tick, (f, b) in enumerate(zip(written.T, read.T, strict=True)):
        of_b[:, tick] = order[stages, b]
        takes_from_b = (f == b) & (f != NONE) & (tick in merged)
        of_f[:, tick] = takes_from_b & (of_b[:, tick] == 0)
        order[stages, f] = of_f[:, tick]
    return {"F_reversed": of_f, "B_reversed": of_b} if of_f.any() else {}


def spmd_program(
    schedule: Schedule, *, masks: bool, overlaps: bool = False, skips: Collection[str] = ()
) -> Program:
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
    in_ticks = [ops for tick in schedule.ops for ops in tick]
    are_together = all(work_of("B", ops) == work_of("W", ops) for ops in in_ticks)
    if not schedule.splits_backward or not are_together:
        return schedule
    without_w = lambda ops: tuple(op for op in ops if op.kind != "W")
    ticks = [tuple(map(without_w, tick)) for tick in schedule.ops]
    return replace(schedule, ops=tuple(ticks))


def _sends(timetable: Timetable) -> dict[str, Sends]:
    """The senders of each tick by direction. In a loop F and B of a tick send in opposite directions; in a V they may not."""
    schedule = timetable.schedule
    num_ticks = schedule.num_ticks
    sent: dict[str, list[dict[int, Op]]] = {way: [{} for _ in range(num_ticks)] for way in WAYS}
    for (stage, op), (tick, _) in timetable.moments.items():
        to = _receiver(schedule, stage, op)
        if to is None:
            continue
        way = "right" if sends_right(schedule, op) else "left"
        first = sent[way][tick].setdefault(stage, op)
        if first != op:
            raise ValueError(
                f"a stage can send one message each way in a tick; got {first} and {op} on stage {stage} in tick {tick}, "
                f"both for stage {to}. Give one of them a tick of its own."
            )
    return {way: _sends_of(ticks) for way, ticks in sent.items()}


def _receiver(schedule: Schedule, stage: int, op: Op) -> int | None:
    """The other stage to which an op sends its result, if it sends it to one."""
    if op.kind not in "FB":
        return None
    step = 1 if op.kind == "F" else -1
    receiver = schedule.virtual_stage(stage, op.chunk) + step
    if receiver not in range(schedule.num_virtual_stages):
        return None
    to, _ = schedule.stage_and_chunk(receiver)
    return None if to == stage else to


def _sends_of(ticks: list[dict[int, Op]]) -> Sends:
    by_tick = [tuple(sorted(stages)) for stages in ticks]
    senders = sorted(set(by_tick))
    which = [senders.index(stages) for stages in by_tick]
    return Sends(senders, np.array(which, np.int32))
