"""Draws the timeline of a schedule: time from left to right, a row per stage, a colour or a letter per kind of op.

render          text
plot_timeline   a picture, by matplotlib
write_trace     a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing
timeline_data   plain values, which a report draws in a browser
"""

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.plot.figure import check_format, figure_to, mix
from jaxpar.schedule.simulate import UNIT_COSTS, Costs, Span, Timeline, simulate
from jaxpar.schedule.table import KINDS, Op, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_STEP = 5  # units of time between two numbers below a text
# Distinct in hue, also for the colour-blind, and in lightness, for greyscale print. "BW" is an unsplit backward.
COLOURS = {"F": "#5b92d0", "R": "#bfaede", "B": "#f2b45c", "BW": "#dc8a62", "W": "#8fca8b"}
LAST_CHUNK_WHITE = 0.6  # the share of white in the colour of the last chunk
WIDTH_PER_OP, MAX_WIDTH, HEIGHT_PER_STAGE = 0.25, 40.0, 0.25  # in inches
MIN_LABEL_POINTS, LABEL_POINTS = 3.5, 7.5
MAX_OPS = 4000  # bars that a browser draws without delay


def describe(timeline: Timeline) -> str:
    """Returns the name and sizes of the schedule, and the timing."""
    schedule = timeline.schedule
    sizes = {
        "stage": schedule.num_stages,
        "microbatch": schedule.num_microbatches,
        "chunk": schedule.num_chunks,
    }
    parts = [
        f"{size} {what}{'es' if what == 'microbatch' else 's'}"
        for what, size in sizes.items()
        if size > 1
    ]
    timing = (
        "free-running" if timeline.timing == "free" else f"lock-step, {schedule.num_ticks} ticks"
    )
    return ", ".join([schedule.name, *parts, timing])


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


def op_colour(kind: str, chunk: int, num_chunks: int, *, splits_backward: bool) -> str:
    """Returns the colour of a kind of op as #rrggbb, paler for later chunks."""
    colour = COLOURS["BW" if kind == "B" and not splits_backward else kind]
    return mix(colour, "#ffffff", LAST_CHUNK_WHITE * chunk / max(1, num_chunks - 1))


def _spans(timeline: Timeline) -> Iterator[tuple[int, Span]]:
    """Yields each op with its stage."""
    return ((stage, span) for stage, order in enumerate(timeline.spans) for span in order)


def _op_label(schedule: Schedule, op: Op) -> str:
    """Returns an op's name in a timeline: F3, or F3b for microbatch 3 on chunk 1 if there are several chunks."""
    return f"{op.kind}{op.microbatch}{_chunk_letter(op.chunk) if schedule.num_chunks > 1 else ''}"


def _chunk_letter(chunk: int) -> str:
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


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
    cell = 1 + max(len(_op_label(schedule, span.op)) for _, span in _spans(timeline))
    margin = len(f"stage {schedule.num_stages - 1}") + 2
    rows = [
        f"stage {stage}".ljust(margin) + _row(timeline, stage, cell)
        for stage in range(schedule.num_stages)
    ]
    times = range(0, int(timeline.makespan) + 1, AXIS_STEP)
    axis = " " * margin + "".join(str(time).ljust(AXIS_STEP * cell) for time in times)
    legend = [f"{kind} {meaning}" for kind, meaning in kind_meanings(schedule).items()]
    if schedule.num_chunks > 1:
        legend += [f"{_chunk_letter(chunk)} chunk {chunk}" for chunk in range(schedule.num_chunks)]
    return "\n".join(
        line.rstrip() for line in (_headline(timeline), axis, *rows, ", ".join(legend))
    )


def _headline(timeline: Timeline) -> str:
    """Returns a line with the description, duration, bubble and peak activations of a timeline."""
    return (
        f"{describe(timeline)}: {timeline.makespan:g} units of time, {timeline.bubble_fraction:.1%} idle, "
        f"peak live {' '.join(map(str, timeline.peak_live))}"
    )


def _row(timeline: Timeline, stage: int, cell: int) -> str:
    """Returns the line of one stage: the label of each op, one cell per unit of time, and a dot for an idle unit."""
    row = list(".".ljust(cell) * int(timeline.makespan))
    for span in timeline.spans[stage]:
        start, end = int(span.start) * cell, int(span.end) * cell
        row[start:end] = _op_label(timeline.schedule, span.op).ljust(end - start - 1, "-") + " "
    for end in timeline.tick_ends:
        row[int(end) * cell - 1] = "|"
    return "".join(row)


def timeline_data(
    schedule: Schedule | None, *, timing: str = "lockstep", of_microbatches: int | None = None
) -> dict[str, Any] | None:
    """Returns the ops of a schedule in time as plain values, with F = R = B = W = 1; None if there is no pipeline.

    Args:
        schedule: The schedule; None for a step without one.
        timing: ``"lockstep"`` or ``"free"``, as in ``simulate``.
        of_microbatches: The microbatches of a step, if the schedule has fewer because its steady state repeats.

    Returns:
        "title" as text; "num_stages", "num_microbatches" and "num_chunks" of the schedule; "of_microbatches" of the step.
        "meanings": a word for each kind of op. "ops": [stage, kind, microbatch, chunk, start, end] of the first ``MAX_OPS``
        ops by their start; "num_ops": how many there are; "tick_ends": the ends of the ticks of these ops, none if ``timing``
        is ``"free"``. "makespan", "bubble_fraction" and "peak_live" of the whole schedule.
    """
    if schedule is None or schedule.num_stages == 1:
        return None
    found = simulate(schedule, timing=timing)
    ops: list[list[Any]] = sorted(
        ([stage, *span.op, span.start, span.end] for stage, span in _spans(found)),
        key=lambda op: (op[-2], op[0]),
    )
    shown = ops[:MAX_OPS]
    until = max(end for *_, end in shown)
    return {
        "title": describe(found),
        **{
            name: getattr(schedule, name)
            for name in ("name", "num_stages", "num_microbatches", "num_chunks")
        },
        "of_microbatches": of_microbatches or schedule.num_microbatches,
        "splits_backward": schedule.splits_backward,
        "meanings": kind_meanings(schedule),
        "makespan": found.makespan,
        "bubble_fraction": found.bubble_fraction,
        "peak_live": list(found.peak_live),
        "tick_ends": [end for end in found.tick_ends if end <= until],
        "ops": shown,
        "num_ops": len(ops),
    }


def plot_timeline(
    schedule: Schedule | Sequence[Schedule],
    path: str | PathLike[str],
    *,
    costs: Costs = UNIT_COSTS,
    timing: str | Sequence[str] = "free",
) -> None:
    """Draws the timeline of a schedule, or of several below one another on one time axis, to a file.

    Each op is labelled with its microbatch if it is wide enough. Chunks after the first are paler.

    Args:
        schedule: The schedule or schedules, which are checked first.
        path: The file. Its suffix selects the format: .svg, .png or .pdf.
        costs: The times of ops and of messages between stages.
        timing: ``"free"``: each op starts as soon as its inputs are available. ``"lockstep"``: tick by tick, with lines
            between ticks. For several schedules it may be one for each.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are not as many timings as schedules, a schedule does not pass ``check``, there is none, or the
            suffix is not a known format.
    """
    check_format(path)
    schedules = [schedule] if isinstance(schedule, Schedule) else list(schedule)
    if not schedules:
        raise ValueError("plot_timeline must get one schedule or more; got none.")
    timings = [timing] * len(schedules) if isinstance(timing, str) else list(timing)
    if len(timings) != len(schedules):
        raise ValueError(
            f"plot_timeline must get one timing, or one for each schedule; got {len(timings)} timings, {len(schedules)} "
            "schedules. Pass as many."
        )
    timelines = [
        simulate(each, costs, timing=of) for each, of in zip(schedules, timings, strict=True)
    ]
    style = {"font.size": 8, "hatch.linewidth": 0.5}
    with figure_to(path, _size(timelines), asked_by="plot_timeline", style=style) as figure:
        _draw(
            figure,
            timelines,
            "time; one forward = 1" if costs == UNIT_COSTS else "time, in units of the costs",
        )


def _size(timelines: list[Timeline]) -> tuple[float, float]:
    """Returns the width and height of a figure in inches, with room for a label in the shortest op."""
    durations = {span.end - span.start for timeline in timelines for _, span in _spans(timeline)}
    shortest = min(durations - {0}, default=1)
    width = WIDTH_PER_OP * max(timeline.makespan for timeline in timelines) / shortest
    rows = sum(timeline.schedule.num_stages for timeline in timelines)
    return min(max(width, 5.0) + 0.8, MAX_WIDTH), HEIGHT_PER_STAGE * rows + 0.55 * len(
        timelines
    ) + 0.5


def _draw(figure: "Figure", timelines: list[Timeline], time: str) -> None:
    """Draws one panel per timeline on one time axis, and one legend."""
    longest = max(timeline.makespan for timeline in timelines)
    points_per_unit = 72 * (figure.get_figwidth() - 0.8) / max(longest, 1e-9)
    panels = figure.subplots(
        len(timelines),
        squeeze=False,
        gridspec_kw={"height_ratios": [timeline.schedule.num_stages for timeline in timelines]},
    )[:, 0]
    for panel, timeline in zip(panels, timelines, strict=True):
        draw_timeline(panel, timeline, points_per_unit)
        panel.set_xlim(0, longest)
    panels[-1].set_xlabel(time)
    _draw_legend(figure, timelines)


def draw_timeline(panel: "Axes", timeline: Timeline, points_per_unit: float) -> None:
    """Draws one timeline in a panel: its ops, the ends of its ticks, and its duration and bubble in the title.

    Args:
        panel: The matplotlib axes.
        timeline: The timeline, as ``simulate`` returns it.
        points_per_unit: The width of a unit of time in the figure, which limits the size of labels.
    """
    schedule = timeline.schedule
    for stage, span in _spans(timeline):
        duration, colour = span.end - span.start, _colour(schedule, span.op.kind, span.op.chunk)
        panel.barh(
            stage,
            duration,
            left=span.start,
            height=0.86,
            color=colour,
            edgecolor="white",
            linewidth=0.8,
        )
        label = str(span.op.microbatch)
        points = min(LABEL_POINTS, duration * points_per_unit / (0.75 * len(label)))
        if points >= MIN_LABEL_POINTS:
            at = span.start + duration / 2, stage
            panel.text(
                *at, label, ha="center", va="center_baseline", fontsize=points, color="black"
            )
    for end in timeline.tick_ends:
        panel.axvline(float(end), color="0.45", linewidth=0.6, linestyle=(0, (2, 2)), zorder=3)
    figures = f"done at {timeline.makespan:g}, {timeline.bubble_fraction:.1%} idle"
    panel.set_title(f"{describe(timeline)}: {figures}", loc="left", fontsize=9)
    panel.set_ylim(schedule.num_stages - 0.5, -0.5)
    panel.set_yticks(
        range(schedule.num_stages), [f"stage {stage}" for stage in range(schedule.num_stages)]
    )
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(figure: "Figure", timelines: list[Timeline]) -> None:
    """Draws the legend of the colours below the panels."""
    from matplotlib.patches import Patch

    meanings = {}
    for schedule in (timeline.schedule for timeline in timelines):
        for kind, meaning in kind_meanings(schedule).items():
            meanings[KINDS.index(kind), meaning] = Patch(
                color=_colour(schedule, kind, 0), label=f"{kind}  {meaning}"
            )
    most_chunks = max(
        (timeline.schedule for timeline in timelines), key=lambda schedule: schedule.num_chunks
    )
    chunks = [
        Patch(color=_colour(most_chunks, "F", chunk), label=f"paler: chunk {chunk}")
        for chunk in range(1, most_chunks.num_chunks)
    ]
    handles = [meanings[key] for key in sorted(meanings)] + chunks
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles),
        frameon=False,
        handlelength=1.2,
    )


def _colour(schedule: Schedule, kind: str, chunk: int) -> str:
    return op_colour(kind, chunk, schedule.num_chunks, splits_backward=schedule.splits_backward)


def write_trace(
    schedule: Schedule,
    path: str | PathLike[str],
    *,
    costs: Costs = UNIT_COSTS,
    timing: str = "free",
    seconds_per_unit: int | float = 1e-3,
) -> None:
    """Writes the timeline as JSON in the Trace Event Format: a thread per stage, a slice per op, a counter of activations.

    Args:
        schedule: The schedule, which is checked first.
        path: The file, which is overwritten if it exists.
        costs: The times of ops and of messages between stages.
        timing: ``"free"`` or ``"lockstep"``, as in ``simulate``.
        seconds_per_unit: The seconds in the trace of a cost of 1.
    """
    timeline, microseconds = simulate(schedule, costs, timing=timing), 1e6 * seconds_per_unit
    meanings, last = kind_meanings(schedule), "W" if schedule.splits_backward else "B"
    events: list[dict] = [_event("M", "process_name", args={"name": _headline(timeline)})]
    for stage, order in enumerate(timeline.spans):
        events.append(_event("M", "thread_name", tid=stage, args={"name": f"stage {stage}"}))
        events.append(_event("M", "thread_sort_index", tid=stage, args={"sort_index": stage}))
        live = 0
        for span in order:
            op, start, end = span.op, span.start * microseconds, span.end * microseconds
            args = {"microbatch": op.microbatch, "chunk": op.chunk}
            args |= {"virtual_stage": schedule.virtual_stage(stage, op.chunk)}
            what = {"tid": stage, "cat": meanings[op.kind], "args": args}
            events.append(_event("X", _op_label(schedule, op), ts=start, dur=end - start, **what))
            if op.kind in ("F", last):
                live += 1 if op.kind == "F" else -1
                time = start if op.kind == "F" else end
                events.append(
                    _event("C", f"live activations, stage {stage}", ts=time, args={"live": live})
                )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _event(phase: str, name: str, **fields: Any) -> dict:
    """An event of a trace: "M" names a row of the viewer, "X" is an op, "C" how many activations a stage holds."""
    return {"ph": phase, "pid": 0, "name": name, **fields}
