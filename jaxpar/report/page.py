"""Renders the data of a run or of plans as one HTML page with its styles, charts and script.

The page loads nothing. A Content-Security-Policy in it forbids that, and any script but its own, so text that a user chose
could not run even if it were not escaped. A page that is served live may fetch data from its server.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from jaxpar.report import tables
from jaxpar.report.metric_charts import make_charts, metric_charts
from jaxpar.runtime.files import write_whole

HERE = Path(__file__).parent
# For each section its title, the tables before its charts, the names of its charts, and the tables after them.
SECTIONS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "metrics": ("Loss and rate", (), ("loss", "rate", "grad-norm"), ("metrics",)),
    "plans": ("Plans", ("plans",), ("step-time",), ()),
    "ways": ("Ways to reduce gradients", ("ways",), ("line-bytes", "way-seconds"), ()),
    "staleness": ("Servers that do not wait", (), ("staleness",), ()),
    "timeline": ("Timeline of the pipeline", ("timeline",), ("timeline",), ()),
    "shards": ("Shards of the parameters", (), ("shards",), ("shards",)),
    "memory": ("Memory", (), ("memory",), ("memory",)),
    "traffic": ("Traffic", (), ("traffic",), ("traffic",)),
    "config": ("Configuration", (), (), ("config",)),
}
ABOUT = {
    "metrics": "Point at a curve for its values.",
    "ways": "Bytes are counted in the compiled programs, in units of the bytes of the gradients. A link carries what one "
    "device sends to another; a device's line carries all that it sends and receives. Grey: by the formula. The time is "
    "that of the fastest step; fake devices copy in the memory of one machine, which has no such lines.",
    "staleness": "Simulated: workers of unlike speed send gradients to one server. The bound is how many gradients a worker "
    "may be ahead of the slowest; with bound 0 all wait for it. Staleness: how many updates a gradient missed.",
    "timeline": "Point at an op for its microbatch and time.",
    "shards": "Parameters between two steps. Devices of one colour in a row hold the same part of an array: point at a cell.",
    "memory": "What one device needs during a step.",
    "traffic": "Bytes that the busiest device sends in a step, by ring algorithms.",
}
LIVE_TABLES = "facts", "metrics"
NOT_OF_RUNS = "plans", "ways", "staleness"


def render_page(data: Mapping[str, Any], *, seconds: float | None = None, version: str = "") -> str:
    """Returns the page.

    Args:
        data: Data of a run (``read_run``), of plans (``plan_data``) or of a comparison (``ways_data``).
        seconds: For a page that is served live, the time between two updates.
        version: For such a page, a text that changes when it must be loaded again.
    """
    own, is_live = _read("page.js"), bool(seconds)
    settings = json.dumps({"seconds": seconds, "version": version}).replace("<", chr(92) + "u003c")
    title, charts = f"{data['kind']} {data['name']}", make_charts(data)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(own, live=is_live)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{_read('page.css')}</style>\n</head>\n<body>",
            _header(data, title, live=is_live),
            *(_section(name, data, charts) for name in SECTIONS if _has(data, name)),
            # In a script "<" could end it or begin a comment.
            f'<script type="application/json" id="page">{settings}</script>',
            f"<script>{own}</script>\n</body>\n</html>\n",
        ]
    )


def live_data(data: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Returns the charts and tables that a live page polls for."""
    made = {name: getattr(tables, name)(data) for name in LIVE_TABLES}
    return {"version": version, "charts": metric_charts(data), "tables": made}


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the page to a file.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(path, render_page(data))


def policy(script: str, *, live: bool) -> str:
    """Returns the Content-Security-Policy that allows this script and nothing from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _has(data: Mapping[str, Any], name: str) -> bool:
    """Returns whether a page has a section: a run has those of runs even without their data, but no timeline of one stage."""
    if name in data.get("problems", {}):
        return True
    if name == "timeline" and name in data:
        return data[name] is not None
    return name in data or (name not in NOT_OF_RUNS and data["kind"] == "run")


def _header(data: Mapping[str, Any], title: str, *, live: bool) -> str:
    links = "".join(f'<a href="#{name}">{escape(SECTIONS[name][0])}</a>' for name in SECTIONS if _has(data, name))
    state = '<p id="state">live</p>' if live else ""
    return (
        f'<header><h1>{escape(title)}</h1>{state}<div id="table-facts">{tables.facts(data)}</div>'
        f"<nav>{links}</nav></header>"
    )


def _section(name: str, data: Mapping[str, Any], made: Mapping[str, str]) -> str:
    title, before, charts, after = SECTIONS[name]
    places = [f'<div class="chart" id="chart-{chart}">{made.get(chart, "")}</div>' for chart in charts]
    about = [f"<p>{ABOUT[name]}</p>"] if name in ABOUT and data.get(name) else []
    return "\n".join(
        [
            f'<section id="{name}"><h2>{escape(title)}</h2>',
            *about,
            *_problem(name, data),
            *(_table(each, data) for each in before),
            *places,
            *(_table(each, data) for each in after),
            "</section>",
        ]
    )


def _table(name: str, data: Mapping[str, Any]) -> str:
    return f'<div id="table-{name}">{getattr(tables, name)(data)}</div>'


def _problem(name: str, data: Mapping[str, Any]) -> list[str]:
    if name in data.get("problems", {}):
        return [f'<p class="problem">This data could not be gathered: {escape(data["problems"][name])}</p>']
    if data["kind"] == "run" and name not in data and name not in ("metrics", "config"):
        return ["<p>This data is known once the step is compiled.</p>"]
    return []


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
