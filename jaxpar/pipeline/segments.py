"""The ticks of a program in runs with the same ops, of which the executor has a loop each.

    tick          0   1   2   3   4   5   6   7
    stage 0       F   F   FB  FB  FB  FB  B   B      segments: F (0, 1), FB (2 to 5), B (6, 7)
    stage 1           F   FB  FB  FB  FB  B

In a tick in which some stage runs every op of the tick, idle stages may compute these ops and discard the results (``masked``).
"""

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

from jaxpar.pipeline.timetable import Timetable
from jaxpar.schedule import Op, Schedule

MAX_SEGMENTS = 8


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


def segments_of(
    timetable: Timetable,
    *,
    masks: bool,
    skips: Collection[str],
) -> tuple[Segment, ...]:
    """Returns the segments of a schedule; one that masks nothing unless the program ``masks``.

    Args:
        timetable: The time of each op.
        masks: Whether idle stages compute and discard ops where that takes no longer.
        skips: The kinds of op that they skip all the same.
    """
    schedule = timetable.schedule
    segments = _masked_segments(timetable) if masks else [_one_segment(timetable)]
    complete = []
    for each in segments:
        segment = each._replace(skips=frozenset(skips))
        complete.append(segment._replace(merges=_can_merge(schedule, segment)))
    return tuple(complete)


def _one_segment(timetable: Timetable) -> Segment:
    return Segment(0, timetable.schedule.num_ticks, timetable.names, masked=False)


def _masked_segments(timetable: Timetable) -> list[Segment]:
    """The ticks in runs with the same ops; one run that masks nothing if they would be many, since each is compiled."""
    names = timetable.names
    kinds = _kinds_of_ticks(timetable)
    segments: list[Segment] = []
    for (ops, masked), run in groupby(range(len(kinds)), kinds.__getitem__):
        ticks = list(run)
        here = Segment(ticks[0], ticks[-1] + 1, ops, masked)
        if segments and _belong_together(segments[-1], here):
            before = segments.pop()
            in_either = {*before.ops, *ops}
            either = tuple(name for name in names if name in in_either)
            here = Segment(before.start, here.stop, either, masked)
        segments.append(here)
    if len(segments) > MAX_SEGMENTS:
        return [_one_segment(timetable)]
    first_head = _tick_of_first_head(timetable)
    parts: list[Segment] = []
    for each in segments:
        parts += _by_head(each, first_head)
    return parts


def _kinds_of_ticks(timetable: Timetable) -> list[tuple[tuple[str, ...], bool]]:
    """For each tick the ops that some stage runs, and whether some stage runs as much as all of them take."""
    schedule = timetable.schedule
    stages = range(schedule.num_stages)
    in_tick = []
    for _ in range(schedule.num_ticks):
        in_tick.append([set() for _ in stages])
    for (stage, _), (tick, name) in timetable.moments.items():
        in_tick[tick][stage].add(name)
    of_backward = 1 if schedule.splits_backward else 2

    def units(ops: set[str]) -> int:
        return sum(of_backward if name == "B" else 1 for name in ops)

    kinds = []
    for of_stages in in_tick:
        anywhere = set().union(*of_stages)
        ops = tuple(name for name in timetable.names if name in anywhere)
        most = max(units(ops) for ops in of_stages)
        kinds.append((ops, units(anywhere) == most))
    return kinds


def _belong_together(before: Segment, after: Segment) -> bool:
    """Whether two segments that skip idle ops are one, since XLA inlines a loop of one trip and then copies its rings."""
    lengths = len(before.ticks), len(after.ticks)
    return not before.masked and not after.masked and 1 in lengths


def _tick_of_first_head(timetable: Timetable) -> int:
    schedule = timetable.schedule
    last = schedule.stage_and_chunk(schedule.num_virtual_stages - 1)
    moments = timetable.moments.items()
    return min(tick for (stage, op), (tick, _) in moments if (stage, op.chunk) == last)


def _by_head(segment: Segment, first: int) -> list[Segment]:
    """The ticks of a segment before that of the first head, where none runs if idle stages mask it, and the others."""
    if not segment.masked or segment.start >= first:
        return [segment]
    before = segment._replace(stop=min(segment.stop, first), has_head=False)
    after = segment._replace(start=first)
    return [before, after] if first < segment.stop else [before]


def _can_merge(schedule: Schedule, segment: Segment) -> bool:
    """Whether F and the complete B of a tick are of different microbatches on every stage, so that neither needs the other."""
    are_masked = all(name in segment.ops and segment.masks(name) for name in "FB")
    if not are_masked or schedule.splits_backward:
        return False
    for tick in segment.ticks:
        for ops in schedule.ops[tick]:
            if work_of("F", ops) & work_of("RB", ops):
                return False
    return True


def work_of(kinds: str, ops: Sequence[Op]) -> set[tuple[int, int]]:
    """Returns the microbatches and chunks of the ops of some kinds."""
    return {(op.microbatch, op.chunk) for op in ops if op.kind in kinds}
