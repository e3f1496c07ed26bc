"""The bar charts of a report: memory by kind, traffic by axis, the parts of a step's time."""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from jaxpar.inspect.text import bytes_text, unit_of
from jaxpar.plot.memory import COLOURS as MEMORY_COLOURS
from jaxpar.plot.memory import OTHERS
from jaxpar.plot.step_time import COLOURS as TIME_COLOURS
from jaxpar.report.frame import LINES, Scale, bars, frame, percent, stretched

BAR = 26  # pixels


def memory(data: Mapping[str, Any]) -> str | None:
    """Returns the bytes of a device by kind, a bar for each stage, and the memory that it has."""
    found = data.get("memory")
    if not found:
        return None
    limit = found["limit_bytes"]
    scale, unit = unit_of(found["total_bytes"])
    sizes = {name: {kind: size / scale for kind, size in parts.items()} for name, parts in found["bars"].items()}
    colour = lambda kind, at: MEMORY_COLOURS.get(kind) or OTHERS[at % len(OTHERS)]
    mark = (limit / scale, f"a device has {bytes_text(limit)}") if limit else None
    text = lambda size: bytes_text(size * scale)
    return _stacks(sizes, colour, text, "Memory by kind", f"{unit} on one device", mark)


def step_time(data: Mapping[str, Any]) -> str | None:
    """Returns where the time of a step goes, a bar for each plan."""
    found = data.get("step_time")
    if not found:
        return None
    colour = lambda _, at: TIME_COLOURS[at % len(TIME_COLOURS)]
    return _stacks(found, colour, lambda value: f"{value:.3g} s", "Time by part", "seconds of a step")


def traffic(data: Mapping[str, Any]) -> str | None:
    """Returns the bytes that a device sends in a step, by axis."""
    axes = (data.get("traffic") or {}).get("axes")
    if not axes:
        return None
    scale, unit = unit_of(max(axes.values()))
    sizes = {name: {"": size / scale} for name, size in axes.items()}
    across = f"{unit} that a device sends in a step"
    return _stacks(sizes, lambda *_: LINES[0], lambda size: bytes_text(size * scale), "Traffic by axis", across)


def _stacks(
    found: Mapping[str, Mapping[str, float]],
    colour: Callable[[str, int], str],
    text: Callable[[float], str],
    title: str,
    across: str,
    mark: tuple[float, str] | None = None,
) -> str:
    """Returns horizontal bars of parts, one below the other; parts that are 0 everywhere are left out.

    Args:
        found: For each bar its parts, from left to right.
        colour: The colour of a part, from its name and its place among all parts.
        text: A size as text.
        title: Title of the chart.
        across: What the sizes are.
        mark: A size at which a line is drawn, and its name.
    """
    kinds = list(dict.fromkeys(kind for parts in found.values() for kind in parts))
    used = [(kind, colour(kind, at)) for at, kind in enumerate(kinds) if any(p.get(kind) for p in found.values())]
    scale = Scale.of([*(sum(parts.values()) for parts in found.values()), *(mark or ())[:1]], from_zero=True)
    until = [0.0] * len(found)
    drawn = []
    for kind, of_kind in used:
        row_bars = []
        for row, parts in enumerate(found.values()):
            share = scale.share(parts.get(kind, 0.0))
            row_bars.append((row, until[row], share, text(parts.get(kind, 0.0))))
            until[row] += share
        drawn.append((of_kind, kind, row_bars))
    height = BAR * len(found)
    return frame(
        stretched(bars(drawn), 1, len(found), height) + (_mark(scale.share(mark[0]), height) if mark else ""),
        height,
        kind="rows",
        title=title,
        left=[(1 - (row + 0.5) / len(found), name) for row, name in enumerate(found)],
        below=scale.ticks(),
        across=across + (f"; dashed: {mark[1]}" if mark else ""),
        legend=dict(used) if len(used) > 1 else None,
    )


def _mark(share: float, height: int) -> str:
    at = escape(percent(share))
    return f'<line class="mark" x1="{at}" x2="{at}" y1="0" y2="{height}"/>'
