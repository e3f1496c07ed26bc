"""The charts of a report, as the plain dicts that plotly.js draws: {"data": [...], "layout": {...}}, one for each name.

Plotly reads some HTML in its labels, so text that a user chose is escaped here, in ``device_charts.py`` and in
``bar_charts.py``.
"""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from jaxpar.report.bar_charts import memory, step_time, traffic
from jaxpar.report.chart_layout import LINES, Chart, layout
from jaxpar.report.device_charts import shards, timeline
from jaxpar.report.gradient_reductions import WAY_CHARTS


def make_charts(data: Mapping[str, Any]) -> dict[str, Chart]:
    """Returns the charts for which there is data, by name."""
    makers: dict[str, Callable[[Mapping[str, Any]], Chart | None]] = {
        **METRIC_CHARTS,
        **WAY_CHARTS,
        "step-time": step_time,
        "timeline": timeline,
        "shards": shards,
        "memory": memory,
        "traffic": traffic,
    }
    made = {name: make(data) for name, make in makers.items()}
    return {name: chart for name, chart in made.items() if chart is not None}


def metric_charts(data: Mapping[str, Any]) -> dict[str, Chart]:
    """Returns the charts that change while a run trains, by name."""
    made = {name: make(data) for name, make in METRIC_CHARTS.items()}
    return {name: chart for name, chart in made.items() if chart is not None}


def loss(data: Mapping[str, Any]) -> Chart | None:
    """Returns the losses by step."""
    chart = _curves(data, lambda name: name == "loss" or name.endswith("_loss"), "loss")
    if chart is not None:
        scale = lambda kind: {"label": f"{kind} scale", "method": "relayout", "args": [{"yaxis.type": kind}]}
        buttons = {"type": "buttons", "direction": "left", "x": 1, "xanchor": "right", "y": -0.1, "yanchor": "top"}
        chart["layout"]["updatemenus"] = [buttons | {"buttons": [scale("linear"), scale("log")]}]
    return chart


def rate(data: Mapping[str, Any]) -> Chart | None:
    """Returns the items per second by step."""
    chart = _curves(data, lambda name: name.endswith("_per_second"), "items per second")
    if chart is not None:
        chart["layout"]["yaxis"] |= {"rangemode": "tozero", **_without_peaks(chart["data"])}
    return chart


def _without_peaks(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a range without single peaks, as after an evaluation; a double click in the chart shows them."""
    values = sorted(value for trace in traces for value in trace["y"] if value is not None)
    usual = values[int(0.95 * (len(values) - 1))] if values else 0
    return {"range": [0, 1.5 * usual]} if values and values[-1] > 2 * usual else {}


def grad_norm(data: Mapping[str, Any]) -> Chart | None:
    """Returns the norm of the gradients by step."""
    return _curves(data, lambda name: name == "grad_norm", "norm of the gradients")


METRIC_CHARTS: dict[str, Callable[[Mapping[str, Any]], Chart | None]] = {
    "loss": loss,
    "rate": rate,
    "grad-norm": grad_norm,
}


def _curves(data: Mapping[str, Any], wanted: Callable[[str], bool], title: str) -> Chart | None:
    curves = (data.get("metrics") or {}).get("curves", {})
    traces = [_line(name, curves[name], at) for at, name in enumerate(filter(wanted, curves))]
    if not traces:
        return None
    axes = {"xaxis": {"title": {"text": "steps taken"}}, "yaxis": {"title": {"text": title}}}
    return {"data": traces, "layout": layout(340, hovermode="x unified", showlegend=len(traces) > 1, **axes)}


def _line(name: str, curve: Mapping[str, Any], at: int) -> dict[str, Any]:
    few = len(curve["steps"]) <= 60
    mean = f", mean of {curve['mean_of']} steps" if curve["mean_of"] > 1 else ""
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": escape(name) + mean,
        "x": curve["steps"],
        "y": curve["values"],
        "line": {"color": LINES[at % len(LINES)], "width": 1.5},
        "marker": {"size": 5},
        "hovertemplate": "%{y:.5g}",
    }
