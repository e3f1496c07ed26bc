"""The named schedules: the order in which each stage runs its ops. ``table.py`` defines the rules for any order.

A name fixes the order. A form fixes how the order is divided into ops and ticks, and thereby which executor it suits:

    published   one op per tick, in the order of the paper. For free-running stages, where each op starts as soon as its
                inputs are available. The backward is not split, except in zb-h1 and zb-v, which consist of B and W.
    unit        one op per tick, the backward split into B and W, so that the ops of a tick take about the same time. For
                stages in lock-step, where each tick takes as long as its longest op.
    fused       F, B and W (and R) in one tick, at most one of each. Also for stages in lock-step: in the steady state every
                stage does the same in every tick, so that a GPU needs no branches (``pipeline/program.py``), and messages
                travel while the next op runs. Fewer ticks, but more microbatches in flight.
    merged      fused, with the complete backward pass of one microbatch beside the forward pass of another: the last stage
                runs B a tick after its F, so that no stage has an F and a B of the same microbatch in one tick. A GPU can then
                run both in one loop over its layers, with the collectives of one beside the products of the other. One more
                microbatch is in flight, whose residuals replace those that B has read, and the step takes as long.

Step time with F = B = W = 1 and an unsplit backward of 2, at 4 stages and 32 microbatches, with 96 units of work per stage
(192 for the two chunks of interleaved and zb-v), and the peak number of activations on the first stage:

    name         form        ticks   free-running   lock-step   peak live
    gpipe        published      70            105         105          32
    gpipe        unit          102            102         102          32
    1f1b         published      70            105         136           4
    1f1b         unit          102            102         102           4
    1f1b         fused          38            102         105           7
    1f1b         merged         39            105         105           8
    interleaved  published     134            201         260          11 of half a stage
    interleaved  unit          198            198         198          11 of half a stage
    interleaved  fused          74            198         201          11 of half a stage
    interleaved  merged         75            201         201          12 of half a stage
    zb-h1        published      99             99          99           4
    zb-h1        fused          38             99          99           7
    zb-v         published     195            195         195           8 of half a stage
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from jaxpar.fields import arg, check_one_of
from jaxpar.schedule.table import Op, Schedule, check_sizes

FORMS = ("published", "unit", "fused", "merged")
_WHOLE_BACKWARD = (
    "published",
    "merged",
)  # B is the complete backward pass, except in zb-h1 and zb-v
_IN_ONE_TICK = ("fused", "merged")  # ops share ticks

# The ops of a stage in order: each item holds the ops of one tick.
Order = list[tuple[Op, ...]]


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    *,
    form: str = "published",
    remat: bool = False,
) -> Schedule:
    """Returns a named schedule.

    Args:
        name: gpipe, 1f1b, interleaved, zb-h1 or zb-v.
        num_stages: The number of stages of the pipeline.
        num_microbatches: The number of microbatches. Any number works; the bubble is small for at least twice the number of
            stages.
        num_chunks: The number of chunks on each stage: any number for interleaved, 2 for zb-v, else 1. By default 2 for
            interleaved and zb-v, else 1.
        form: How the order is divided into ops and ticks: published, unit, fused or merged, see the docstring of this module.
        remat: Adds an op R before each B, which recomputes the residuals that F did not store.

    Raises:
        TypeError: A size is not an integer.
        ValueError: There is no such name or form, or the schedule does not support this number of chunks.

    Reference:
        gpipe: Huang et al. 2018, arXiv 1811.06965. 1f1b: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1, and
        interleaved, section 2.2.2, there only for a number of microbatches that num_stages divides. zb-h1: Qi et al. 2023,
        arXiv 2401.10241, section 2.1. zb-v: Qi et al. 2024, arXiv 2405.15362. The fused forms are for executors in lock-step.
    """
    check_schedule_name(name)
    check_one_of(FORMS, form=form)
    named = NAMED[name]
    num_chunks = named.num_chunks if num_chunks is None else num_chunks
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    _check_chunks(name, num_chunks)
    orders = [
        named.order(stage, num_stages, num_microbatches, num_chunks, form)
        for stage in range(num_stages)
    ]
    if remat:
        orders = [_beside_b(order, "R", before=True) for order in orders]
    if form not in _IN_ONE_TICK:
        orders = [[(op,) for step in order for op in step] for order in orders]
    notes = [form] * (form != "published") + ["remat"] * remat
    title = name + (f" ({', '.join(notes)})" if notes else "")
    return Schedule.from_orders(orders, name=title, placement=named.placement)


def lockstep_form(name: str, *, masks: bool = False) -> str:
    """Returns the form of a named schedule for lock-step.

    It is fused, with ``masks`` (on GPUs) merged for 1f1b and interleaved. zb-v has neither; its form is unit.
    """
    check_schedule_name(name)
    return NAMED[name].masked_form if masks else NAMED[name].form


def check_schedule_name(name: object) -> None:
    """Raises unless there is a schedule of that name."""
    check_one_of(SCHEDULES, schedule=name)


def _check_chunks(name: str, num_chunks: int) -> None:
    count = NAMED[name].num_chunks
    if num_chunks != count and not NAMED[name].takes_any_chunks:
        other = "zb-v" if (name, num_chunks) == ("zb-h1", 2) else "interleaved"
        others = f", or {other}, which runs {num_chunks} chunks" if count == 1 else ""
        raise ValueError(
            f"{name} must have {count} chunk{'s' * (count > 1)} a stage; got {arg(num_chunks=num_chunks)}. Choose "
            f"{arg(num_chunks=count)}{others}."
        )


def _gpipe(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """All forwards, then all backwards."""
    return _one_chunk(num_microbatches, num_microbatches, form)


def _1f1b(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """Forwards until the first gradient can arrive, then one forward and one backward in turn.

    In lock-step with F and B in one tick, a gradient returns after twice as many ticks, so the fused form starts with twice
    as many forwards, and the merged form with one more.
    """
    warmup = (num_stages - 1 - stage) * (2 if form in _IN_ONE_TICK else 1) + (form == "merged")
    return _one_chunk(num_microbatches, warmup, form)


def _one_chunk(num_microbatches: int, warmup: int, form: str) -> Order:
    forwards, backwards = ([Op(kind, i) for i in range(num_microbatches)] for kind in "FB")
    return _one_forward_one_backward(forwards, backwards, warmup, form)


def _interleaved(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str
) -> Order:
    """1F1B over the chunks: a round of microbatches on one chunk, the round on the next chunk, then the next round.

    A microbatch returns to the first stage after num_stages ticks, so a round has that many microbatches. If num_stages does
    not divide the number of microbatches, rounds are larger; if there are fewer than num_stages, the only round has gaps.
    """
    forwards, backwards = [], []
    start = 0
    rounds = _rounds(num_microbatches, num_stages)
    for size in rounds:
        microbatches = [
            i if i < start + size else None for i in range(start, start + max(size, num_stages))
        ]
        for chunk in range(num_chunks):
            forwards += [None if i is None else Op("F", i, chunk) for i in microbatches]
            backwards += [
                None if i is None else Op("B", i, num_chunks - 1 - chunk) for i in microbatches
            ]
        start += size
    warmup = (
        (num_chunks - 1) * max(rounds[0], num_stages)
        + 2 * (num_stages - 1 - stage)
        + (form == "merged")
    )
    return _one_forward_one_backward(forwards, backwards, warmup, form)


def _rounds(num_microbatches: int, num_stages: int) -> list[int]:
    """Returns the sizes of the rounds, of at least num_stages microbatches if there are enough, larger ones first."""
    num_rounds = max(1, num_microbatches // num_stages)
    size, larger = divmod(num_microbatches, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)


def _one_forward_one_backward(
    forwards: Sequence[Op | None], backwards: Sequence[Op | None], warmup: int, form: str
) -> Order:
    """Returns the order that runs ``warmup`` forwards alone, then pairs of F and B, then the backwards that are left."""
    idle = [None] * warmup
    pairs = zip([*forwards, *idle], [*idle, *backwards], strict=True)
    order = [tuple(op for op in pair if op) for pair in pairs]
    return order if form in _WHOLE_BACKWARD else _beside_b(order, "W", before=False)


def _beside_b(order: Order, kind: str, *, before: bool) -> Order:
    """Returns the order with an op of a kind right before or right after each B."""

    def ops(op: Op) -> tuple[Op, ...]:
        new = (op._replace(kind=kind),) * (op.kind == "B")
        return (*new, op) if before else (op, *new)

    return [tuple(chain.from_iterable(map(ops, step))) for step in order]


def _zb_h1(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """1F1B in which stage s runs W with a delay of s microbatches.

    Every stage then holds at most num_stages microbatches, as the first stage of 1f1b does, and the remaining Ws fill the time
    in which stages wait for gradients at the end.
    """
    if form == "merged":
        raise ValueError(
            "form must be published, unit or fused for zb-h1, which runs W apart from B; got form='merged'. Choose "
            "form='fused', or 1f1b in merged form."
        )
    if form == "fused":
        return _zb_h1_fused(stage, num_stages, num_microbatches)
    warmup = min(num_stages - 1 - stage, num_microbatches)
    order = [(Op("F", i),) for i in range(warmup)]
    for i in range(num_microbatches):
        order += [(Op("F", i + warmup),)] * (i + warmup < num_microbatches)
        order += [(Op("B", i),)]
        order += [(Op("W", i - stage),)] * (i >= stage)
    return order + [
        (Op("W", i),) for i in range(max(0, num_microbatches - stage), num_microbatches)
    ]


def _zb_h1_fused(stage: int, num_stages: int, num_microbatches: int) -> Order:
    """The fused 1f1b, with Ws in ticks that have room for them.

    A tick has room for two ops while some stage has no B yet or no F left, and for three in between. The remaining Ws have
    ticks of their own. With twice as many microbatches as stages, stages are idle only during warm-up.
    """
    order, waiting = [], deque()
    last_warmup = 2 * (num_stages - 1)
    for tick in range(num_microbatches + last_warmup):
        forward, backward = tick - stage, tick - (last_warmup - stage)
        step = [Op("F", forward)] * (0 <= forward < num_microbatches)
        if 0 <= backward < num_microbatches:
            step.append(Op("B", backward))
            waiting.append(Op("W", backward))
        room = 2 + (last_warmup <= tick < num_microbatches) - len(step)
        step += [waiting.popleft() for _ in range(min(room, len(waiting)))]
        order.append(tuple(step))
    return order + [(op,) for op in waiting]


def _zb_v(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """Two chunks per stage in a V, so that the first stage also computes the loss; the memory of 1f1b, almost no bubble.

    With too few microbatches to fill the V, the order is that of the smallest number that does, without the missing ones.
    """
    if form in _IN_ONE_TICK:
        raise ValueError(
            f"form must be published or unit for zb-v, whose stages send two ways at once when fused; got form={form!r}. "
            "Choose form='published', or zb-h1 or interleaved in fused form."
        )
    full = max(num_microbatches, 2 * num_stages - 1)
    kinds = [("F", 0)] * (2 * (num_stages - stage) - 1)
    kinds += [("F", 1), ("F", 0)] * stage
    kinds += [("F", 1), ("B", 1), ("W", 1)] * (num_stages - stage)
    kinds += [("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)] * (
        full - (2 * num_stages - 1) + stage
    )
    kinds += [("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)] * (num_stages - 1 - stage)
    kinds += [("B", 0), ("B", 1)] * stage
    kinds += [("B", 0), ("W", 0)] * (num_stages - stage)
    kinds += [("W", 1)] * stage + [("W", 0)] * stage
    return [(op,) for op in _number(kinds) if op.microbatch < num_microbatches]


def _number(kinds: Iterable[tuple[str, int]]) -> Iterable[Op]:
    """Yields the ops of a list of (kind, chunk), each for the first microbatch without such an op."""
    count = Counter()
    for kind, chunk in kinds:
        yield Op(kind, count[kind, chunk], chunk)
        count[kind, chunk] += 1


class Named(NamedTuple):
    """A named schedule.

    Attributes:
        order: ``order(stage, num_stages, num_microbatches, num_chunks, form)`` returns the order of a stage.
        form: Its form for stages in lock-step.
        masked_form: The same where idle stages mask ops, on GPUs.
        num_chunks: The number of chunks on each stage, or the usual one.
        takes_any_chunks: Whether it takes any number of them.
        placement: Which virtual stage is which chunk of which stage.
        splits_backward: Whether B and W are apart in each form, since W runs later; else they are joined where they can be.
        holds_all: Whether a stage holds all microbatches at once, so that its memory grows with their number.
    """

    order: Callable[[int, int, int, int, str], Order]
    form: str = "fused"
    masked_form: str = "fused"
    num_chunks: int = 1
    takes_any_chunks: bool = False
    placement: str = "loop"
    splits_backward: bool = False
    holds_all: bool = False


NAMED = {
    "gpipe": Named(_gpipe, holds_all=True),
    "1f1b": Named(_1f1b, masked_form="merged"),
    "interleaved": Named(_interleaved, masked_form="merged", num_chunks=2, takes_any_chunks=True),
    "zb-h1": Named(_zb_h1, splits_backward=True),
    "zb-v": Named(
        _zb_v, form="unit", masked_form="unit", num_chunks=2, placement="v", splits_backward=True
    ),
}
SCHEDULES = tuple(NAMED)
NUM_CHUNKS = {
    name: each.num_chunks for name, each in NAMED.items()
}  # the usual number on each stage
PLACEMENT = {name: each.placement for name, each in NAMED.items()}
