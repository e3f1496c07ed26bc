"""The table of a schedule: which stage runs which op in which tick, and the rules that every table must follow.

A pipeline splits the layers into virtual stages, ``num_chunks`` of them on each stage, and a batch into microbatches. For
each microbatch and virtual stage a schedule runs an op of each kind:

    F  forward                             needs F of the previous virtual stage
    R  recompute of residuals (remat)      needs F
    B  backward                            needs F, R if there is one, and B of the next virtual stage
    W  gradients of the weights            needs B

Without W, B is the complete backward; with W, B computes only the gradients of the inputs. Time is counted in ticks. Every
stage sends its outputs at the end of a tick, so an op can use outputs of other stages from earlier ticks, and outputs of
its own stage from earlier ticks or from earlier ops in the same tick.

The named schedules are in ``orders.py``, and their costs in ``simulate.py``.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, zip_longest
from typing import NamedTuple

from jaxpar.fields import arg, check_one_of

KINDS = ("F", "R", "B", "W")
PLACEMENTS = ("loop", "v")


class Op(NamedTuple):
    """One op of one stage: its kind (F, R, B or W), its microbatch, and the chunk of the stage that it runs."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch}, chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule as plain data, which executors run, ``simulate`` times and ``render`` draws.

    To write your own, pass ``ops`` here, or the order of each stage to ``Schedule.from_orders``, and call ``check`` on it.

    Attributes:
        name: The name in reports and plots.
        num_stages: The number of stages, each on its own devices.
        num_microbatches: The number of microbatches of a batch.
        num_chunks: The number of virtual stages on each stage.
        ops: ``ops[tick][stage]`` is the tuple of the ops that a stage runs in a tick, in that order. It is empty if the
            stage is idle.
        placement: Which virtual stage is chunk c of stage s. ``"loop"``: c * num_stages + s. ``"v"``: the same for even
            chunks; odd ones run back, c * num_stages + (num_stages - 1 - s), so for even num_chunks stage 0 is first and last.

    Raises:
        TypeError: A size is not an integer, or ``ops`` is not a table of ops.
        ValueError: A size is not positive, or there is no such placement.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    ops: tuple[tuple[tuple[Op, ...], ...], ...]
    placement: str = "loop"

    def __post_init__(self):
        check_sizes(
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
        )
        check_one_of(PLACEMENTS, placement=self.placement)
        table = tuple(tuple(tuple(_as_op(op) for op in ops) for ops in tick) for tick in self.ops)
        object.__setattr__(self, "ops", table)

    @classmethod
    def from_orders(
        cls,
        orders: Sequence[Iterable[Op | tuple[Op, ...]]],
        *,
        name: str = "custom",
        placement: str = "loop",
    ) -> "Schedule":
        """Returns the schedule in which each stage runs its ops in the order given, each in the first tick it can.

        Args:
            orders: For each stage its ops. A tuple of ops runs in one tick, a single op in a tick of its own.
            name: The name in reports and plots.
            placement: As in ``Schedule``.

        Example:
            >>> F0, B0 = Op("F", 0), Op("B", 0)
            >>> Schedule.from_orders([[F0, B0], [(F0, B0)]]).num_ticks  # the second stage runs both in one tick
            3

        Raises:
            ValueError: The orders deadlock, or do not pass ``check``.
        """
        steps = [
            [
                (step,) if isinstance(step, Op) else tuple(map(_as_op, step))
                for step in order
                if step
            ]
            for order in orders
        ]
        ops = [op for order in steps for step in order for op in step]
        schedule = cls(
            name=name,
            num_stages=len(steps),
            num_microbatches=1 + max((op.microbatch for op in ops), default=0),
            num_chunks=1 + max((op.chunk for op in ops), default=0),
            ops=tuple(zip_longest(*steps, fillvalue=())),
            placement=placement,
        )
        schedule._check_complete(schedule.moments())
        return replace(schedule, ops=_assign_ticks(schedule, steps))._known_as_checked()

    @property
    def num_ticks(self) -> int:
        """The number of ticks."""
        return len(self.ops)

    @property
    def num_virtual_stages(self) -> int:
        """The number of virtual stages of the model: ``num_stages * num_chunks``."""
        return self.num_stages * self.num_chunks

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of op that occur."""
        return frozenset(op.kind for tick in self.ops for ops in tick for op in ops)

    @property
    def splits_backward(self) -> bool:
        """Whether W ops compute the gradients of the weights. If not, B is the complete backward."""
        return "W" in self.kinds

    @property
    def recomputes(self) -> bool:
        """Whether R ops recompute the residuals that F did not store."""
        return "R" in self.kinds

    @property
    def is_forward(self) -> bool:
        """Whether it has forward passes alone."""
        return self.kinds == {"F"}

    def forward(self) -> "Schedule":
        """Returns the forward passes alone, in the order of each stage, each in the first tick it can.

        ``check`` refuses such a table if it is written by hand: as a schedule of training it would compute no gradients.
        """
        orders = [
            [(op,) for op in self.order(stage) if op.kind == "F"]
            for stage in range(self.num_stages)
        ]
        return replace(
            self, name=f"{self.name}, forward", ops=_assign_ticks(self, orders)
        )._known_as_checked()

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Returns the virtual stage of a chunk of a stage, counted from the input of the model."""
        runs_back = self.placement == "v" and chunk % 2 == 1
        return chunk * self.num_stages + (self.num_stages - 1 - stage if runs_back else stage)

    def stage_and_chunk(self, virtual_stage: int) -> tuple[int, int]:
        """Returns the (stage, chunk) that holds a virtual stage: the inverse of ``virtual_stage``."""
        return stage_and_chunk(virtual_stage, self.num_stages, self.placement)

    def order(self, stage: int) -> tuple[Op, ...]:
        """Returns the ops of one stage in the order in which it runs them."""
        return tuple(op for tick in self.ops for op in tick[stage])

    def inputs_of(self, stage: int, op: Op) -> tuple[tuple[int, Op], ...]:
        """Returns the (stage, op) pairs that must run before this op of this stage."""
        own = {"F": "", "R": "F", "B": "FR" if self.recomputes else "F", "W": "B"}[op.kind]
        inputs = [(stage, Op(kind, op.microbatch, op.chunk)) for kind in own]
        neighbour = self.virtual_stage(stage, op.chunk) + {"F": -1, "B": 1}.get(op.kind, 0)
        if op.kind in "FB" and 0 <= neighbour < self.num_virtual_stages:
            its_stage, chunk = self.stage_and_chunk(neighbour)
            inputs.append((its_stage, Op(op.kind, op.microbatch, chunk)))
        return tuple(inputs)

    def check(self) -> None:
        """Checks that every op occurs once and comes after the ops that it needs.

        Raises:
            ValueError: An op is missing, repeated or too early; the message names the op, its stage and its tick.
        """
        return self._checked

    @cached_property
    def _checked(self) -> None:
        """Runs ``check`` once per schedule, which is immutable; both simulators and executors check theirs."""
        moments = self.moments()
        self._check_complete(moments)
        for (stage, op), moment in moments.items():
            for needed_stage, needed in self.inputs_of(stage, op):
                needed_moment = moments[needed_stage, needed]
                arrived = (
                    needed_moment < moment
                    if needed_stage == stage
                    else needed_moment[0] < moment[0]
                )
                if not arrived:
                    raise ValueError(
                        _late_input(stage, op, moment[0], needed_stage, needed, needed_moment[0])
                    )

    def _known_as_checked(self) -> "Schedule":
        """Returns this schedule, which ``check`` then does not check again: it is complete, and its ticks follow its inputs."""
        self.__dict__["_checked"] = None
        return self

    def moments(self) -> dict[tuple[int, Op], tuple[int, int]]:
        """Returns for each (stage, op) its tick and its index in the tick; raises for an invalid or repeated op."""
        moments = {}
        microbatches, chunks = range(self.num_microbatches), range(self.num_chunks)
        for tick, stages in enumerate(self.ops):
            if len(stages) != self.num_stages:
                raise ValueError(
                    f"a tick must hold one tuple of ops a stage; got {len(stages)} in tick {tick} with "
                    f"num_stages={self.num_stages}. Give idle stages an empty tuple."
                )
            for stage, ops in enumerate(stages):
                for position, op in enumerate(ops):
                    if not (
                        op.kind in KINDS and op.microbatch in microbatches and op.chunk in chunks
                    ):
                        self._refuse_op(op, stage, tick)
                    if (stage, op) in moments:
                        raise ValueError(
                            f"an op must run once; got {op} on stage {stage} in tick {moments[stage, op][0]} and again "
                            f"in tick {tick}. Remove one of the two."
                        )
                    moments[stage, op] = (tick, position)
        return moments

    def _refuse_op(self, op: Op, stage: int, tick: int) -> None:
        """Raises for an op of an unknown kind, microbatch or chunk."""
        known = {
            "kind": KINDS,
            "microbatch": range(self.num_microbatches),
            "chunk": range(self.num_chunks),
        }
        what = next(name for name, value in op._asdict().items() if value not in known[name])
        names = (
            ", ".join(KINDS)
            if what == "kind"
            else f"the schedule's {len(known[what])}, counted from 0"
        )
        raise ValueError(
            f"an op's {what} must be one of {names}; got {tuple(op)} on stage {stage} in tick {tick}."
        )

    def _check_complete(self, moments: dict[tuple[int, Op], tuple[int, int]]) -> None:
        """Raises if an op is missing. R and W must occur for every microbatch or for none."""
        kinds = [kind for kind in KINDS if kind in "FB" or kind in self.kinds]
        expected = product(
            kinds, range(self.num_microbatches), range(self.num_chunks), range(self.num_stages)
        )
        for kind, microbatch, chunk, stage in expected:
            op = Op(kind, microbatch, chunk)
            if (stage, op) not in moments:
                others = f", or take out every {kind}" if kind in "RW" else ""
                raise ValueError(
                    f"every stage must run {kind} once for each microbatch and chunk; got no {op} on stage {stage} in "
                    f"any of {self.num_ticks} ticks. Add it{others}."
                )


def stage_and_chunk(virtual_stage: int, num_stages: int, placement: str) -> tuple[int, int]:
    """Returns the (stage, chunk) that holds a virtual stage in a placement, as ``Schedule`` defines them."""
    chunk, stage = divmod(virtual_stage, num_stages)
    runs_back = placement == "v" and chunk % 2 == 1
    return (num_stages - 1 - stage if runs_back else stage), chunk


def check_sizes(**sizes: object) -> None:
    """Raises if a size is not a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(
                f"{arg(name)} must be an integer; got {arg(**{name: repr(size)})}. For example: {arg(**{name: 4})}."
            )
        if size < 1:
            raise ValueError(
                f"{arg(name)} must be 1 or more; got {arg(**{name: size})}. Choose {arg(**{name: 1})} or more."
            )


def _as_op(op: object) -> Op:
    """Returns an Op, or a plain tuple of its fields, as an Op."""
    if isinstance(op, Op):
        return op
    if not isinstance(op, tuple) or len(op) not in (2, 3):
        raise TypeError(
            f"ops[tick][stage] must be a tuple of Op(kind, microbatch, chunk); got {op!r} in it."
        )
    return Op(*op)


def _late_input(
    stage: int, op: Op, tick: int, needed_stage: int, needed: Op, needed_tick: int
) -> str:
    """Returns the error message for an op that comes before one that it needs."""
    same_stage = stage == needed_stage
    earliest = (
        f"after it in tick {needed_tick}, or later"
        if same_stage
        else f"tick {needed_tick + 1} or later"
    )
    return (
        f"an op must come after what it needs{'' if same_stage else ', a tick after if that is on another stage'}; got "
        f"{op} on stage {stage} in tick {tick}, which needs {needed} on stage {needed_stage}, run in tick {needed_tick}. "
        f"Move it to {earliest}, or what it needs to an earlier tick."
    )


def _assign_ticks(
    schedule: Schedule, orders: list[list[tuple[Op, ...]]]
) -> tuple[tuple[tuple[Op, ...], ...], ...]:
    """Returns the table in which each step of each stage's order runs in the first possible tick."""
    done: set[tuple[int, Op]] = set()
    waiting, table = [deque(order) for order in orders], []
    can_run = lambda stage, order: (
        order and not any(_missing_inputs(schedule, stage, order[0], done))
    )
    while any(waiting):
        runs = [can_run(stage, order) for stage, order in enumerate(waiting)]
        if not any(runs):
            raise ValueError(_deadlock(schedule, waiting, done))
        table.append(
            tuple(order.popleft() if run else () for order, run in zip(waiting, runs, strict=True))
        )
        done.update((stage, op) for stage, step in enumerate(table[-1]) for op in step)
    return tuple(table)


def _missing_inputs(
    schedule: Schedule, stage: int, step: tuple[Op, ...], done: set
) -> Iterator[tuple[Op, int, Op]]:
    """Yields (op, needed_stage, needed) for each op that is needed but neither done nor earlier in the step."""
    for position, op in enumerate(step):
        before = {(stage, earlier) for earlier in step[:position]}
        for needed in schedule.inputs_of(stage, op):
            if needed not in done and needed not in before:
                yield op, *needed


def _deadlock(schedule: Schedule, waiting: list[deque[tuple[Op, ...]]], done: set) -> str:
    """Returns the error message for orders in which no stage can continue: which op waits for which."""
    stage, order = next((stage, order) for stage, order in enumerate(waiting) if order)
    op, needed_stage, needed = next(_missing_inputs(schedule, stage, order[0], done))
    return (
        f"the orders of the stages must not wait for one another; got {op} on stage {stage}, which waits for {needed} on "
        f"stage {needed_stage}, while no stage can continue. Move the awaited op earlier in its stage's order."
    )
