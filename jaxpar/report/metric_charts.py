"""The charts of a report, as HTML, one for each name. All text goes through ``html.escape``: names come from users."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.report.bar_charts import memory, step_time, traffic
from jaxpar.report.curves import Curve, chart
from jaxpar.report.device_charts import shards, timeline
from jaxpar.report.gradient_reductions import WAY_CHARTS

Maker = Callable[[Mapping[str, Any]], str | None]


def make_charts(data: Mapping[str, Any]) -> dict[str, str]:
    """Returns the charts for which there is data, by name."""
    makers: dict[str, Maker] = {
        **METRIC_CHARTS,
        **WAY_CHARTS,
        "step-time": step_time,
        "timeline": timeline,
        "shards": shards,
        "memory": memory,
        "traffic": traffic,
    }
    return _made(makers, data)


def metric_charts(data: Mapping[str, Any]) -> dict[str, str]:
    """Returns the charts that change while a run trains, by name."""
    return _made(METRIC_CHARTS, data)


def _made(makers: Mapping[str, Maker], data: Mapping[str, Any]) -> dict[str, str]:
    made = {name: make(data) for name, make in makers.items()}
    return {name: html for name, html in made.items() if html is not None}


def loss(data: Mapping[str, Any]) -> str | None:
    """Returns the losses by step."""
    curves = _curves(data, lambda name: name == "loss" or name.endswith("_loss"))
    return chart(curves, title="loss", across=ACROSS, has_log=True)


def rate(data: Mapping[str, Any]) -> str | None:
    """Returns the items per second by step, named as in the facts above the charts."""
    curves = _curves(data, lambda name: name.endswith("_per_second"))
    items = curves[0].name.partition("_per_second")[0] if len(curves) == 1 else "items"
    return chart(curves, title=f"{items}/s", across=ACROSS, from_zero=True, top=_usual(curves))


def _usual(curves: list[Curve]) -> float | None:
    """Returns a value above which there are only single peaks, as after an evaluation; None if there are no such peaks."""
    values = sorted(value for curve in curves for value in curve.y if value is not None)
    usual = values[int(0.95 * (len(values) - 1))] if values else 0
    return 1.5 * usual if values and values[-1] > 2 * usual else None


def grad_norm(data: Mapping[str, Any]) -> str | None:
    """Returns the norm of the gradients by step."""
    curves = _curves(data, lambda name: name == "grad_norm")
    return chart(curves, title="norm of the gradients", across=ACROSS)


ACROSS = "steps taken"
METRIC_CHARTS: dict[str, Maker] = {"loss": loss, "rate": rate, "grad-norm": grad_norm}


def _curves(data: Mapping[str, Any], wanted: Callable[[str], bool]) -> list[Curve]:
    curves = (data.get("metrics") or {}).get("curves", {})
    mean = lambda curve: f", mean of {curve['mean_of']} steps" if curve["mean_of"] > 1 else ""
    return [
        Curve(name + mean(curve), curve["steps"], curve["values"]) for name, curve in curves.items() if wanted(name)
    ]
