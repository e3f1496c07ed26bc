"""The named schedules: in which order each stage runs its ops. ``table.py`` says what any order must keep.

A name fixes the order; a form fixes how the order is cut into ops and ticks, and so which executor it suits:

    published   one op a tick, in the order of the paper. For stages that run freely, each op as soon as its inputs are
                there. The backward is whole, except in zb-h1 and zb-v, which are made of B and W.
    unit        one op a tick, the backward in B and W, so that the ops of a tick take about equally long. For stages in
                lock-step, where each tick takes as long as its longest op.
    fused       F and B (and R, W) of a tick together, one of each at most. For stages in lock-step too: F costs every
                stage the same, and so does B, and in the steady state every stage does the same in every tick. Fewer
                ticks; more microbatches in flight.

Step time, with F = B = W = 1 and a whole backward of 2, at 4 stages and 32 microbatches, whose work is 96 a stage (192
for the two chunks of interleaved and zb-v), and the activations that the first stage keeps:

    name         form        ticks   free-running   lock-step   peak live
    gpipe        published      70            105         105          32
    gpipe        unit          102            102         102          32
    1f1b         published      70            105         136           4
    1f1b         unit          102            102         102           4
    1f1b         fused          38            105         105           7
    interleaved  published     134            201         260          11 of half a stage
    interleaved  unit          198            198         198          11 of half a stage
    interleaved  fused          74            201         201          11 of half a stage
    zb-h1        published      99             99          99           4
    zb-h1        fused          38             99          99           7
    zb-v         published     195            195         195           8 of half a stage
"""

import difflib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from jaxpar.schedule.table import Op, Schedule, check_sizes

FORMS = ("published", "unit", "fused")

# What a stage runs in turn: each item is what it runs in one tick.
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
        num_stages: Stages of the pipeline.
        num_microbatches: Microbatches that a batch is cut into. Any number runs; bubbles are small from twice the number
            of stages on.
        num_chunks: Parts of the model that each stage holds: any number for interleaved, 2 for zb-v, else 1. By default
            2 for interleaved and zb-v, else 1.
        form: How the order is cut into ops and ticks: published, unit or fused, as this module's head says.
        remat: Adds an op R before each B, which makes again what F did not keep.

    Raises:
        TypeError: A size is not an integer.
        ValueError: There is no such name or form, or the schedule cannot have these chunks.

    Reference:
        gpipe: Huang et al. 2018, arXiv 1811.06965. 1f1b: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1, and
        interleaved, section 2.2.2, there for a multiple of num_stages microbatches only. zb-h1: Qi et al. 2023, arXiv
        2401.10241, section 2.1. zb-v: Qi et al. 2024, arXiv 2405.15362. The fused forms are for executors in lock-step.
    """
    check_schedule_name(name)
    _check_name("form", form, FORMS)
    num_chunks = (2 if name in ("interleaved", "zb-v") else 1) if num_chunks is None else num_chunks
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    _check_chunks(name, num_chunks)
    orders = [_ORDERS[name](stage, num_stages, num_microbatches, num_chunks, form) for stage in range(num_stages)]
    if remat:
        orders = [_recompute(order) for order in orders]
    if form != "fused":
        orders = [[(op,) for step in order for op in step] for order in orders]
    notes = [form] * (form != "published") + ["remat"] * remat
    title = name + (f" ({', '.join(notes)})" if notes else "")
    return Schedule.from_orders(orders, name=title, placement="v" if name == "zb-v" else "loop")


def check_schedule_name(name: object) -> None:
    """Raises unless there is a schedule of that name."""
    _check_name("schedule", name, tuple(_ORDERS))


def _check_name(what: str, name: object, names: tuple[str, ...]) -> None:
    if name not in names:
        near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.4)
        remedy = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} must be one of {', '.join(names)}; got {name!r}.{remedy}")


def _check_chunks(name: str, num_chunks: int) -> None:
    if name == "zb-v" and num_chunks != 2:
        raise ValueError(f"zb-v must have 2 chunks a stage; got num_chunks={num_chunks}. Choose num_chunks=2.")
    if name not in ("interleaved", "zb-v") and num_chunks != 1:
        raise ValueError(
            f"{name} must have 1 chunk a stage; got num_chunks={num_chunks}. Choose num_chunks=1, or "
            f"{'zb-v' if name == 'zb-h1' and num_chunks == 2 else 'interleaved'}, which runs {num_chunks} chunks."
        )


def _gpipe(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """All forwards, then all backwards."""
    forwards = [Op("F", i) for i in range(num_microbatches)]
    backwards = [Op("B", i) for i in range(num_microbatches)]
    return _one_forward_one_backward(forwards, backwards, num_microbatches, split=form == "unit")


def _1f1b(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """Forwards until the first gradient can arrive, then one forward, one backward.

    In lock-step with F and B in one tick, a gradient comes back after twice as many ticks as an activation that runs
    freely needs, so that the fused form starts with twice as many forwards.
    """
    forwards = [Op("F", i) for i in range(num_microbatches)]
    backwards = [Op("B", i) for i in range(num_microbatches)]
    warmup = (num_stages - 1 - stage) * (2 if form == "fused" else 1)
    return _one_forward_one_backward(forwards, backwards, warmup, split=form == "unit")


def _interleaved(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """1F1B over the chunks: a round of microbatches on one chunk, the round on the next chunk, then the next round.

    A microbatch is back at the first stage after num_stages ticks, so that a round has that many microbatches. Where they
    do not divide, rounds grow; where there are too few, the order leaves gaps in the only round.
    """
    forwards, backwards = [], []
    start = 0
    rounds = _rounds(num_microbatches, num_stages)
    for size in rounds:
        microbatches = [i if i < start + size else None for i in range(start, start + max(size, num_stages))]
        for chunk in range(num_chunks):
            forwards += [None if i is None else Op("F", i, chunk) for i in microbatches]
            backwards += [None if i is None else Op("B", i, num_chunks - 1 - chunk) for i in microbatches]
        start += size
    warmup = (num_chunks - 1) * max(rounds[0], num_stages) + 2 * (num_stages - 1 - stage)
    return _one_forward_one_backward(forwards, backwards, warmup, split=form == "unit")


def _rounds(num_microbatches: int, num_stages: int) -> list[int]:
    """Returns the sizes of the rounds, all of at least num_stages microbatches where there are so many, large first."""
    num_rounds = max(1, num_microbatches // num_stages)
    size, larger = divmod(num_microbatches, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)


def _one_forward_one_backward(
    forwards: Sequence[Op | None], backwards: Sequence[Op | None], warmup: int, *, split: bool
) -> Order:
    """Returns the order that runs ``warmup`` forwards alone, then pairs of F and B, then the backwards that are left."""
    idle = [None] * warmup
    pairs = zip([*forwards, *idle], [*idle, *backwards], strict=True)
    order = [tuple(op for op in pair if op) for pair in pairs]
    return [tuple(_split(step)) for step in order] if split else order


def _split(step: Iterable[Op]) -> Iterable[Op]:
    """Yields a W after each B."""
    for op in step:
        yield op
        if op.kind == "B":
            yield op._replace(kind="W")


def _recompute(order: Order) -> Order:
    """Returns the order with an R before each B."""
    return [
        tuple(new for op in step for new in ((op._replace(kind="R"), op) if op.kind == "B" else (op,)))
        for step in order
    ]


def _zb_h1(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """1F1B in which stage s is s microbatches late with W.

    So every stage keeps num_stages microbatches, no more than the first stage of 1f1b, and the Ws that are left over fill
    the time in which gradients come back at the end.
    """
    if form == "fused":
        return _zb_h1_fused(stage, num_stages, num_microbatches)
    warmup = min(num_stages - 1 - stage, num_microbatches)
    order = [(Op("F", i),) for i in range(warmup)]
    for i in range(num_microbatches):
        order += [(Op("F", i + warmup),)] * (i + warmup < num_microbatches)
        order += [(Op("B", i),)]
        order += [(Op("W", i - stage),)] * (i >= stage)
    return order + [(Op("W", i),) for i in range(max(0, num_microbatches - stage), num_microbatches)]


def _zb_h1_fused(stage: int, num_stages: int, num_microbatches: int) -> Order:
    """The fused 1f1b, with Ws where a tick has room for them.

    A tick has room for two ops while some stage has no B yet, or no F any more, and for three between; what does not fit
    is done in the last tick. With twice as many microbatches as stages all Ws fit, and only warm-up leaves stages idle.
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
        if tick == num_microbatches + last_warmup - 1:
            room = len(waiting)
        step += [waiting.popleft() for _ in range(min(room, len(waiting)))]
        order.append(tuple(step))
    return order


def _zb_v(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, form: str) -> Order:
    """Two chunks a stage in a V, so that the first stage also makes the loss; as much memory as 1f1b, next to no bubble.

    The order is that of the least number of microbatches that fill it, without those that are not there.
    """
    if form == "fused":
        raise ValueError(
            "form must be published or unit for zb-v, whose stages send two ways at once when fused; got form='fused'. "
            "Choose form='published', or zb-h1 or interleaved in fused form."
        )
    full = max(num_microbatches, 2 * num_stages - 1)
    kinds = [("F", 0)] * (2 * (num_stages - stage) - 1)
    kinds += [("F", 1), ("F", 0)] * stage
    kinds += [("F", 1), ("B", 1), ("W", 1)] * (num_stages - stage)
    kinds += [("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)] * (full - (2 * num_stages - 1) + stage)
    kinds += [("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1)] * (num_stages - 1 - stage)
    kinds += [("B", 0), ("B", 1)] * stage
    kinds += [("B", 0), ("W", 0)] * (num_stages - stage)
    kinds += [("W", 1)] * stage + [("W", 0)] * stage
    return [(op,) for op in _number(kinds) if op.microbatch < num_microbatches]


def _number(kinds: Iterable[tuple[str, int]]) -> Iterable[Op]:
    """Yields the ops of a list of (kind, chunk), each for the first microbatch that had no such op yet."""
    count = Counter()
    for kind, chunk in kinds:
        yield Op(kind, count[kind, chunk], chunk)
        count[kind, chunk] += 1


_ORDERS: dict[str, Callable[[int, int, int, int, str], Order]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}
SCHEDULES = tuple(_ORDERS)
