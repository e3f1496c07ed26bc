"""When each op of a schedule runs: its tick, and its phase in the tick, in which a stage runs F, R, B, any W, then receives."""

from collections import Counter
from typing import NamedTuple

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
