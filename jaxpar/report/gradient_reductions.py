"""A comparison of ways to reduce gradients, as recipes/all_reduce.py makes it: its data, and its charts."""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpar.report.curves import Curve, chart

GREY = "#808080"


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


def line_bytes(data: Mapping[str, Any]) -> str | None:
    """Returns the bytes through the busiest device's line by number of devices, counted, and by formula in grey below."""
    counted = _by_devices(data, "line")
    # Ways that send as much have one line: the ways drawn first are wider, so that each of them can be seen.
    counted = [replace(curve, width=1.5 * (len(counted) - at)) for at, curve in enumerate(counted)]
    distinct = {tuple(curve.y): curve for curve in _by_devices(data, "line_formula")}
    formulas = [replace(curve, width=18, colour=GREY, is_shade=True) for curve in distinct.values()]
    title = "busiest line, times the gradients"
    return chart([*formulas, *counted], title=title, across="devices", from_zero=True)


def way_seconds(data: Mapping[str, Any]) -> str | None:
    """Returns the time of a step by number of devices, in the unit of the table."""
    curves = _by_devices(data, "seconds")
    curves = [replace(curve, y=[seconds * 1e3 for seconds in curve.y if seconds is not None]) for curve in curves]
    return chart(curves, title="ms a step, the fastest", across="devices", from_zero=True)


def staleness(data: Mapping[str, Any]) -> str | None:
    """Returns the losses by simulated time of servers that do not wait."""
    curves = [
        Curve(f"{name}: mean staleness {run['mean']:.1f}", run["seconds"], run["losses"])
        for name, run in data.get("staleness", {}).items()
    ]
    return chart(curves, title="loss on all rows", across="simulated seconds", is_log=True)


WAY_CHARTS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "line-bytes": line_bytes,
    "way-seconds": way_seconds,
    "staleness": staleness,
}


def _by_devices(data: Mapping[str, Any], column: str) -> list[Curve]:
    rows = data.get("ways", ())
    of = lambda way: [row for row in rows if row["way"] == way]
    return [
        Curve(way, [row["devices"] for row in of(way)], [row[column] for row in of(way)])
        for way in dict.fromkeys(row["way"] for row in rows)
    ]
