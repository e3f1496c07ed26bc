"""Renders the timeline of a schedule as text: time from left to right in units, a row per stage. ``plot.py`` draws it."""

from jaxpar.schedule.simulate import Timeline, simulate
from jaxpar.schedule.table import Op, Schedule

AXIS_STEP = 5


def render(schedule: Schedule, *, timing: str = "free") -> str:
    """Returns the timeline as text, with F = R = B = W = 1, and 2 for an unsplit backward.

    Args:
        schedule: The schedule, which is checked first.
        timing: ``"free"``: each op starts as soon as its inputs are available. ``"lockstep"``: tick by tick, with a bar
            between ticks.

    Example:
        >>> from jaxpar.schedule import make_schedule, render
        >>> print(render(make_schedule("1f1b", 2, 3)))
        1f1b, 2 stages, 3 microbatches, free-running: 12 units of time, 25.0% idle, peak live 2 1
                 0              5              10
        stage 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
        stage 1  .  F0 B0--- F1 B1--- F2 B2--- .  .
        F forward, B backward (gradients of inputs and weights)
    """
    timeline = simulate(schedule, timing=timing)
    cell = 1 + max(len(op_label(schedule, span.op)) for order in timeline.spans for span in order)
    margin = len(f"stage {schedule.num_stages - 1}") + 2
    rows = [f"stage {stage}".ljust(margin) + _row(timeline, stage, cell) for stage in range(schedule.num_stages)]
    axis = " " * margin + "".join(
        str(time).ljust(AXIS_STEP * cell) for time in range(0, int(timeline.makespan) + 1, AXIS_STEP)
    )
    return "\n".join(line.rstrip() for line in (headline(timeline), axis, *rows, legend(schedule)))


def headline(timeline: Timeline) -> str:
    """Returns a line with the description, duration, bubble and peak activations of a timeline."""
    return (
        f"{describe(timeline)}: {timeline.makespan:g} units of time, {timeline.bubble_fraction:.1%} idle, "
        f"peak live {' '.join(map(str, timeline.peak_live))}"
    )


def describe(timeline: Timeline) -> str:
    """Returns the name and sizes of the schedule, and the timing."""
    schedule = timeline.schedule
    sizes = {"stage": schedule.num_stages, "microbatch": schedule.num_microbatches, "chunk": schedule.num_chunks}
    parts = [f"{size} {what}{'es' if what == 'microbatch' else 's'}" for what, size in sizes.items() if size > 1]
    timing = "free-running" if timeline.timing == "free" else f"lock-step, {schedule.num_ticks} ticks"
    return ", ".join([schedule.name, *parts, timing])


def op_label(schedule: Schedule, op: Op) -> str:
    """Returns an op's name in a timeline: F3, or F3b for microbatch 3 on chunk 1 if there are several chunks."""
    return f"{op.kind}{op.microbatch}{_chunk_letter(op.chunk) if schedule.num_chunks > 1 else ''}"


def legend(schedule: Schedule) -> str:
    """Returns the meaning of the letters in a timeline."""
    parts = [f"{kind} {meaning}" for kind, meaning in kind_meanings(schedule).items()]
    if schedule.num_chunks > 1:
        parts.append(", ".join(f"{_chunk_letter(chunk)} chunk {chunk}" for chunk in range(schedule.num_chunks)))
    return ", ".join(parts)


def kind_meanings(schedule: Schedule) -> dict[str, str]:
    """Returns the meaning of each kind of op in the schedule."""
    whole = "backward (gradients of inputs and weights)"
    meanings = {
        "F": "forward",
        "R": "recompute",
        "B": "backward for inputs" if schedule.splits_backward else whole,
        "W": "backward for weights",
    }
    return {kind: meaning for kind, meaning in meanings.items() if kind in schedule.kinds}


def _row(timeline: Timeline, stage: int, cell: int) -> str:
    """Returns the line of one stage: the label of each op, one cell per unit of time, and a dot for an idle unit."""
    row = list(".".ljust(cell) * int(timeline.makespan))
    for span in timeline.spans[stage]:
        start, end = int(span.start) * cell, int(span.end) * cell
        row[start:end] = op_label(timeline.schedule, span.op).ljust(end - start - 1, "-") + " "
    for end in timeline.tick_ends:
        row[int(end) * cell - 1] = "|"
    return "".join(row)


def _chunk_letter(chunk: int) -> str:
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"
