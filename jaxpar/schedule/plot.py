"""Plots the timeline of a schedule: time from left to right, a row per stage, a colour per kind of op. Needs matplotlib."""

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from jaxpar.plot.figure import check_format, figure_to
from jaxpar.schedule.render import describe, kind_meanings
from jaxpar.schedule.simulate import UNIT_COSTS, Costs, Span, Timeline, simulate
from jaxpar.schedule.table import KINDS, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinct in hue, also for the colour-blind, and in lightness, for greyscale print. "BW" is an unsplit backward.
COLOURS = {"F": "#5b92d0", "R": "#bfaede", "B": "#f2b45c", "BW": "#dc8a62", "W": "#8fca8b"}
LAST_CHUNK_WHITE = 0.6  # the share of white in the colour of the last chunk
WIDTH_PER_OP, MAX_WIDTH, HEIGHT_PER_STAGE = 0.25, 40.0, 0.25  # in inches
MIN_LABEL_POINTS, LABEL_POINTS = 3.5, 7.5


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
    timelines = [simulate(each, costs, timing=of) for each, of in zip(schedules, timings, strict=True)]
    style = {"font.size": 8, "hatch.linewidth": 0.5}
    with figure_to(path, _size(timelines), asked_by="plot_timeline", style=style) as figure:
        _draw(figure, timelines, "time; one forward = 1" if costs == UNIT_COSTS else "time, in units of the costs")


def _size(timelines: list[Timeline]) -> tuple[float, float]:
    """Returns the width and height of a figure in inches, with room for a label in the shortest op."""
    durations = {span.end - span.start for timeline in timelines for order in timeline.spans for span in order}
    shortest = min(durations - {0}, default=1)
    width = WIDTH_PER_OP * max(timeline.makespan for timeline in timelines) / shortest
    rows = sum(timeline.schedule.num_stages for timeline in timelines)
    return min(max(width, 5.0) + 0.8, MAX_WIDTH), HEIGHT_PER_STAGE * rows + 0.55 * len(timelines) + 0.5


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
    for stage, order in enumerate(timeline.spans):
        for span in order:
            _draw_op(panel, schedule, stage, span, points_per_unit)
    for end in timeline.tick_ends:
        panel.axvline(float(end), color="0.45", linewidth=0.6, linestyle=(0, (2, 2)), zorder=3)
    figures = f"done at {timeline.makespan:g}, {timeline.bubble_fraction:.1%} idle"
    panel.set_title(f"{describe(timeline)}: {figures}", loc="left", fontsize=9)
    panel.set_ylim(schedule.num_stages - 0.5, -0.5)
    panel.set_yticks(range(schedule.num_stages), [f"stage {stage}" for stage in range(schedule.num_stages)])
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _draw_op(panel: "Axes", schedule: Schedule, stage: int, span: Span, points_per_unit: float) -> None:
    """Draws one op as a bar labelled with its microbatch."""
    duration = span.end - span.start
    colour = _colour(schedule, span.op.kind, span.op.chunk)
    panel.barh(stage, duration, left=span.start, height=0.86, color=colour, edgecolor="white", linewidth=0.8)
    label = str(span.op.microbatch)
    points = min(LABEL_POINTS, duration * points_per_unit / (0.75 * len(label)))
    if points >= MIN_LABEL_POINTS:
        middle = span.start + duration / 2
        panel.text(middle, stage, label, ha="center", va="center_baseline", fontsize=points, color="black")


def _draw_legend(figure: "Figure", timelines: list[Timeline]) -> None:
    """Draws the legend of the colours below the panels."""
    from matplotlib.patches import Patch

    meanings = {}
    for schedule in (timeline.schedule for timeline in timelines):
        for kind, meaning in kind_meanings(schedule).items():
            meanings[KINDS.index(kind), meaning] = Patch(color=_colour(schedule, kind, 0), label=f"{kind}  {meaning}")
    most_chunks = max((timeline.schedule for timeline in timelines), key=lambda schedule: schedule.num_chunks)
    chunks = [
        Patch(color=_colour(most_chunks, "F", chunk), label=f"paler: chunk {chunk}")
        for chunk in range(1, most_chunks.num_chunks)
    ]
    handles = [meanings[key] for key in sorted(meanings)] + chunks
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, handlelength=1.2)


def _colour(schedule: Schedule, kind: str, chunk: int) -> tuple[float, float, float]:
    """Returns the colour of a kind of op, paler for later chunks."""
    from matplotlib.colors import to_rgb

    whole_backward = kind == "B" and not schedule.splits_backward
    red, green, blue = to_rgb(COLOURS["BW" if whole_backward else kind])
    white = LAST_CHUNK_WHITE * chunk / max(1, schedule.num_chunks - 1)
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white
