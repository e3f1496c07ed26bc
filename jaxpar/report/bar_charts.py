"""The bar charts of a report: memory by kind, traffic by axis, the parts of a step's time."""

import math
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from jaxpar.inspect.text import bytes_text
from jaxpar.plot.memory import COLOURS as MEMORY_COLOURS
from jaxpar.plot.memory import OTHERS
from jaxpar.plot.step_time import COLOURS as TIME_COLOURS
from jaxpar.report.chart_layout import GREEN, MARGIN, Chart, layout

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
RED = "#c0392b"
BAR = 26  # pixels


def memory(data: Mapping[str, Any]) -> Chart | None:
    """Returns the bytes of a device by kind, a bar for each stage, and the memory that it has."""
    found = data.get("memory")
    if not found:
        return None
    limit = found["limit_bytes"]
    scale, unit = _unit([found["total_bytes"], limit or 0])
    bars = {name: {kind: size / scale for kind, size in parts.items()} for name, parts in found["bars"].items()}
    colour = lambda kind, at: MEMORY_COLOURS.get(kind) or OTHERS[at % len(OTHERS)]
    chart = _stacks(bars, colour, lambda size: bytes_text(size * scale))
    chart["layout"]["xaxis"]["title"] = {"text": f"{unit} on one device"}
    if limit:
        line = {"color": RED, "dash": "dash", "width": 1.5}
        chart["layout"]["shapes"] = [
            {"type": "line", "x0": limit / scale, "x1": limit / scale, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        ]
        note = {"text": f"a device has {bytes_text(limit)}", "font": {"color": RED}, "showarrow": False}
        chart["layout"]["annotations"] = [
            note | {"x": limit / scale, "y": 1, "yref": "paper", "yshift": 12, "xanchor": "right"}
        ]
    return chart


def _unit(sizes: Iterable[float]) -> tuple[int, str]:
    """Returns the bytes of a unit in which the largest size is a readable number, and its name."""
    exponent = max(0, int(math.log2(max(1, *sizes))) // 10)
    return 1024**exponent, UNITS[exponent]


def step_time(data: Mapping[str, Any]) -> Chart | None:
    """Returns where the time of a step goes, a bar for each plan."""
    found = data.get("step_time")
    if not found:
        return None
    chart = _stacks(found, lambda _, at: TIME_COLOURS[at % len(TIME_COLOURS)], lambda value: f"{value:.3g} s")
    chart["layout"]["xaxis"]["title"] = {"text": "seconds of a step"}
    return chart


def _stacks(
    bars: Mapping[str, Mapping[str, float]], colour: Callable[[str, int], str], text: Callable[[float], str]
) -> Chart:
    """Returns horizontal bars of parts, one above the other; parts that are 0 everywhere are left out."""
    kinds = list(dict.fromkeys(kind for parts in bars.values() for kind in parts))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(kind),
            "y": [escape(name) for name in bars],
            "x": [parts.get(kind, 0) for parts in bars.values()],
            "customdata": [text(parts.get(kind, 0)) for parts in bars.values()],
            "marker": {"color": colour(kind, at), "line": {"color": "white", "width": 1}},
            "hovertemplate": f"%{{y}}: {escape(kind)} %{{customdata}}<extra></extra>",
        }
        for at, kind in enumerate(kinds)
        if any(parts.get(kind) for parts in bars.values())
    ]
    rows = {"autorange": "reversed", "automargin": True}
    look = layout(MARGIN + 40 + BAR * len(bars), barmode="stack", xaxis={}, yaxis=rows)
    look["legend"] |= {"traceorder": "normal"}
    return {"data": traces, "layout": look}


def traffic(data: Mapping[str, Any]) -> Chart | None:
    """Returns the bytes that a device sends in a step, by axis."""
    axes = (data.get("traffic") or {}).get("axes")
    if not axes:
        return None
    scale, unit = _unit(axes.values())
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [escape(name) for name in axes],
        "x": [size / scale for size in axes.values()],
        "text": [bytes_text(size) for size in axes.values()],
        "marker": {"color": GREEN},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    rows = {
        "xaxis": {"title": {"text": f"{unit} that a device sends in a step"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    return {"data": [bars], "layout": layout(MARGIN + BAR * len(axes), **rows)}
