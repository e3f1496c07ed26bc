"""A comparison of ways to reduce gradients, as recipes/all_reduce.py makes it: its data, and its charts."""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import jax

from jaxpar.report.chart_layout import GREY, LINES, Chart, layout


def ways_data(
    ways: Sequence[Mapping[str, Any]],
    staleness: Mapping[str, Mapping[str, Any]],
    *,
    name: str,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the data of a comparison as plain values.

    Args:
        ways: A row for each way on each number of devices: "way", "devices", "link" and "line", the bytes of the busiest link
            and line in units of the gradients' bytes, "link_formula" and "line_formula", "seconds" of a step, and "apart", the
            distance of its final parameters from those of the first way.
        staleness: Runs of a server that does not wait, by name: "seconds" and "losses", a value for each gradient, and "mean",
            the mean staleness.
        name: The name of the comparison.
        config: Its settings.
    """
    own = sys.modules["jaxpar"].__version__  # an import would violate the package's import order
    versions = f"jaxpar {own}, jax {jax.__version__}, Python {platform.python_version()}"
    facts = {
        "devices": ", ".join(map(str, sorted({row["devices"] for row in ways}))),
        "largest difference of parameters": f"{max(row['apart'] for row in ways):.0e}",
        "versions": versions,
    }
    return {
        "kind": "comparison",
        "name": name,
        "facts": facts,
        "ways": list(ways),
        "staleness": dict(staleness),
        "config": config,
        "problems": {},
    }


def line_bytes(data: Mapping[str, Any]) -> Chart | None:
    """Returns the bytes through the busiest device's line by number of devices, counted, and by formula in grey below."""
    counted = _by_devices(data, "line", "lines+markers")
    for at, trace in enumerate(counted):
        # Ways that send as much have one line: the ways drawn first are wider, so that each of them can be seen.
        trace["line"]["width"] = 1.5 * (len(counted) - at)
    distinct = {tuple(trace["y"]): trace for trace in _by_devices(data, "line_formula", "lines")}
    formulas = [
        trace | {"opacity": 0.3, "showlegend": False, "hoverinfo": "skip", "line": {"color": GREY, "width": 18}}
        for trace in distinct.values()
    ]
    return _chart([*formulas, *counted], "devices", "busiest line, times the gradients")


def way_seconds(data: Mapping[str, Any]) -> Chart | None:
    """Returns the time of a step by number of devices."""
    traces = _by_devices(data, "seconds", "lines+markers")
    for trace in traces:
        trace["y"] = [seconds * 1e3 for seconds in trace["y"]]
    return _chart(traces, "devices", "ms, the fastest step")


def staleness(data: Mapping[str, Any]) -> Chart | None:
    """Returns the losses by simulated time of servers that do not wait."""
    traces = [
        _trace(f"{name}: mean staleness {run['mean']:.1f}", run["seconds"], run["losses"], at, "lines")
        for at, (name, run) in enumerate(data.get("staleness", {}).items())
    ]
    chart = _chart(traces, "simulated seconds", "loss on all rows (log scale)")
    if chart is not None:
        chart["layout"]["yaxis"]["type"] = "log"
    return chart


WAY_CHARTS: dict[str, Callable[[Mapping[str, Any]], Chart | None]] = {
    "line-bytes": line_bytes,
    "way-seconds": way_seconds,
    "staleness": staleness,
}


def _by_devices(data: Mapping[str, Any], column: str, mode: str) -> list[dict[str, Any]]:
    rows = data.get("ways", ())
    names = dict.fromkeys(row["way"] for row in rows)
    of = lambda way: [row for row in rows if row["way"] == way]
    return [
        _trace(way, [row["devices"] for row in of(way)], [row[column] for row in of(way)], at, mode)
        for at, way in enumerate(names)
    ]


def _trace(name: str, x: Sequence[float], y: Sequence[float], at: int, mode: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": escape(name),
        "x": list(x),
        "y": list(y),
        "line": {"color": LINES[at % len(LINES)], "width": 1.5},
        "marker": {"size": 6},
        "hovertemplate": "%{y:.4g}",
    }


def _chart(traces: list[dict[str, Any]], across: str, up: str) -> Chart | None:
    if not traces:
        return None
    axes = {"xaxis": {"title": {"text": across}}, "yaxis": {"title": {"text": up}, "rangemode": "tozero"}}
    return {"data": traces, "layout": layout(380, hovermode="x unified", **axes)}
