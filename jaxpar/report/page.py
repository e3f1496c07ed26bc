"""Renders the data of a report as one HTML page with its styles, charts, tables and script.

`page.html` is the frame of the page, and `page.json` has its sections in order: the title of each, what it says about itself,
its charts and tables from top to bottom, and whether every run has it, even without its data.

The page loads nothing. A Content-Security-Policy in it forbids that, and any script but its own, so text that a user chose
could not run even if it were not escaped; all text goes through ``html.escape`` nevertheless. A page that is served live may
fetch data from its server.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jaxpar.inspect.text import bytes_text, seconds_text
from jaxpar.mesh import AXES
from jaxpar.metrics.status import duration
from jaxpar.planner.plans import remarks, remat_text
from jaxpar.report.charts import make_charts
from jaxpar.runtime.life import RUNNING
from jaxpar.runtime.output import write_whole


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


SECTIONS: dict[str, dict[str, Any]] = json.loads(_read("page.json"))
NUM_COLUMNS = 3  # of settings


def render_page(data: Mapping[str, Any], *, seconds: float | None = None, version: str = "") -> str:
    """Returns the page.

    Args:
        data: Data of a run (``read_run``), of plans (``plan_data``) or of the comparison that ``all_reduce`` makes.
        seconds: For a page that is served live, the time between two updates.
        version: For such a page, a text that changes when it must be loaded again.
    """
    script, is_live, charts = _read("page.js"), bool(seconds), make_charts(data)
    shown = [name for name in SECTIONS if _has(data, name)]
    settings = json.dumps({"seconds": seconds, "version": version})
    return Template(_read("page.html")).substitute(
        policy=policy(script, live=is_live),
        title=escape(f"{data['kind']} {data['name']}"),
        styles=_read("page.css"),
        state=f'<p id="state">{escape(data["life"].text)}</p>' if is_live else "",
        facts=facts(data),
        links="".join(f'<a href="#{name}">{escape(SECTIONS[name]["title"])}</a>' for name in shown),
        sections="\n".join(_section(name, data, charts) for name in shown),
        settings=settings.replace(
            "<", chr(92) + "u003c"
        ),  # in a script "<" could end it or begin a comment
        script=script,
    )


def live_data(data: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Returns the charts and tables that a live page polls for."""
    changing = [name for name in ("metrics", "experts") if _has(data, name)]
    tables = {"facts": facts(data), **{name: _filled(name, data) for name in changing}}
    return {
        "version": version,
        "state": data["life"].text,
        "charts": make_charts({name: data.get(name) for name in changing}),
        "tables": tables,
    }


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
    if name in data:
        return name != "timeline" or data[name] is not None
    return data["kind"] == "run" and SECTIONS[name].get("of_runs", False)


def _section(name: str, data: Mapping[str, Any], charts: Mapping[str, str]) -> str:
    section, lines = SECTIONS[name], []
    if "about" in section and data.get(name):
        lines.append(f"<p>{section['about']}</p>")
    if name in data.get("problems", {}):
        lines.append(
            f'<p class="problem">This data could not be gathered: {escape(data["problems"][name])}</p>'
        )
    elif name not in data and "empty" not in section:
        lines.append("<p>This data is known once the step is compiled.</p>")
    for part in section["parts"]:
        kind, _, of = part.partition("-")
        is_chart = kind == "chart"
        inner, style = (
            (charts.get(of, ""), ' class="chart"') if is_chart else (_filled(of, data), "")
        )
        lines.append(f'<div{style} id="{part}">{inner}</div>')
    return "\n".join(
        [f'<section id="{name}"><h2>{escape(section["title"])}</h2>', *lines, "</section>"]
    )


def _filled(name: str, data: Mapping[str, Any]) -> str:
    found = data.get(name)
    return TABLES[name](found) if found else SECTIONS[name].get("empty", "")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table; columns of numbers are aligned to the right."""
    rows = list(rows)
    styles = ["".join(_style(row[at]) for row in rows[:1]) for at in range(len(header))]
    head = "".join(
        f"<th{style}>{escape(name)}</th>" for name, style in zip(header, styles, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def table_of(items: Iterable[Any], columns: Mapping[str, Callable[[Any], Any]]) -> str:
    """Returns a table with a row for each item; the columns have a name, and the value of an item."""
    return table(tuple(columns), ([value(item) for value in columns.values()] for item in items))


def _cell(value: Any) -> str:
    text = "" if value is None else _number(value) if isinstance(value, int | float) else str(value)
    return f"<td{_style(value)}>{escape(text)}</td>"


def _style(value: Any) -> str:
    return (
        ' class="number"' if isinstance(value, int | float) and not isinstance(value, bool) else ""
    )


def _number(value: int | float) -> str:
    return (
        str(value)
        if isinstance(value, bool)
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:.6g}"
    )


def facts(data: Mapping[str, Any]) -> str:
    """Returns the most important facts, a box for each."""
    found = {**dict(_progress(data)), **dict(_sizes(data)), **data.get("facts", {})}
    boxes = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(text))}</dd></div>"
        for name, text in found.items()
    )
    return f"<dl>{''.join(boxes)}</dl>"


def _progress(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the steps taken, last losses, rate and time left."""
    found = data.get("metrics")
    if found is None:
        return
    end, rows = data.get("num_steps"), found["rows"]
    done = max(found["num_steps_done"], data.get("first_step") or 0)
    yield "steps", f"{done:,}" + (f" of {end:,}" if end else "")
    state, text = data.get("life", RUNNING)
    if state != "running" and not (state in ("ended", "unknown") and done == end):
        yield "state", text
    if data.get("first_step"):
        yield "resumed", f"from step {data['first_step']:,}"
    if missing := done - found["num_lines"]:
        yield "steps without metrics", f"{missing:,}"
    for name, row in rows.items():
        if row.get("last") is not None and (
            name == "loss" or name in ("test_loss", "test_accuracy")
        ):
            yield name, f"{row['last']:.5g}"
        if name.endswith("_per_second") and row.get("median") is not None:
            yield "rate", f"{row['median']:,.0f} {name.removesuffix('_per_second')}/s (median)"
    if jumps := found.get("jumps"):
        last = (
            f"{each['loss']:.5g} at step {each['step']:,}, after {each['usual']:.5g}"
            for each in jumps
        )
        yield f"jumps of the loss: {found['num_jumps']:,}", "; ".join(last)
    seconds = rows.get("step_seconds", {}).get("median")
    if seconds is not None:
        yield "a step", f"{seconds_text(seconds)} (median)"
        if end and done < end and state == "running":
            yield "left at this pace", duration(seconds * (end - done))


def _sizes(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if found := data.get("memory"):
        yield "memory of a device", bytes_text(found["total_bytes"])
    if data.get("plans"):
        best = data["plans"][0]
        yield "a step", seconds_text(best["step_seconds"])
        if best["stage"] > 1:
            yield "idle in the pipeline", f"{best['bubble_fraction']:.1%}"
    elif found := data.get("timeline"):
        yield "idle in the pipeline", f"{found['bubble_fraction']:.1%}"


def metrics(found: Mapping[str, Any]) -> str:
    """Returns a row for each column of metrics.jsonl."""
    names = "first", "lowest", "at_step", "highest", "median", "last", "num_not_finite"
    if not (rows := found["rows"]):
        return SECTIONS["metrics"]["empty"]
    header = "column", *(name.replace("_", " ").replace("num ", "") for name in names)
    return table(
        header, ([column, *(row.get(name) for name in names)] for column, row in rows.items())
    )


def experts(found: Mapping[str, Any]) -> str:
    """Returns a row for each layer: its experts with the most and the fewest tokens."""
    of_layer = lambda loads: (
        at := loads.index(max(loads)),
        loads[at],
        at := loads.index(min(loads)),
        loads[at],
    )
    header = "layer", "busiest expert", "its load", "idlest expert", "its load"
    return table(header, ((layer, *of_layer(loads)) for layer, loads in enumerate(found["loads"])))


def plans(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each plan."""
    is_used = lambda axis: any(plan.get(axis, 1) > 1 for plan in found)
    axes = [axis for axis in AXES if axis in ("data", "stage", "tensor") or is_used(axis)]
    axes += ["experts"] if any(plan.get("experts") for plan in found) else []
    columns: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "": lambda plan: plan["rank"],
        **{axis: lambda plan, axis=axis: plan.get(axis, 1) for axis in axes},
        "schedule": lambda plan: plan["schedule"] if plan["stage"] > 1 else "-",
        "microbatches": lambda plan: plan["num_microbatches"],
        "zero": lambda plan: plan["zero"],
        "remat": lambda plan: remat_text(plan["remat"]),
        "memory": lambda plan: bytes_text(plan["memory_bytes"]),
        "step": lambda plan: seconds_text(plan["step_seconds"]),
        "bubble": lambda plan: f"{plan['bubble_fraction']:.1%}",
    }
    if any(plan["why"] for plan in found):
        columns["why"] = lambda plan: plan["why"]
    rows = [{**plan, "rank": rank} for rank, plan in enumerate(found, 1)]
    return table_of(rows, columns) + "".join(f"<p>{escape(text)}</p>" for text in remarks(found))


def ways(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each way to reduce gradients on each number of devices."""
    names = "link", "link_formula", "line", "line_formula"
    header = (
        "way",
        "devices",
        "busiest link",
        "formula",
        "busiest line",
        "formula",
        "ms a step",
        "parameters apart",
    )
    sent = lambda row: [round(float(row[name]), 3) for name in names]
    times = lambda row: (round(row["seconds"] * 1e3, 2), float(f"{row['apart']:.0e}"))
    return table(header, ([row["way"], row["devices"], *sent(row), *times(row)] for row in found))


def timeline(found: Mapping[str, Any]) -> str:
    """Returns the makespan, idle share and peak live microbatches of a timeline, as HTML."""
    shown, count, all_ = len(found["ops"]), found["num_microbatches"], found["of_microbatches"]
    few = f" {count} microbatches stand for {all_}, since the steady state repeats: with {all_} a smaller share is idle."
    few = few if count < all_ else ""
    cut = (
        f" The first {shown:,} of {found['num_ops']:,} ops are shown."
        if shown < found["num_ops"]
        else ""
    )
    peak = ", ".join(map(str, found["peak_live"]))
    return (
        f"<p>{escape(found['title'])}: done at {found['makespan']:g}, {found['bubble_fraction']:.1%} idle. Computed from the "
        f"schedule with F = R = B = W = 1, not measured.{few}{cut} Microbatches whose activations each stage "
        f"holds at most: {peak}.</p>"
    )


def shards(found: Mapping[str, Any]) -> str:
    """Returns a row for each array: how it is split, and how many devices hold the same part."""
    shown, count = len(found["devices"]), found["num_devices"]
    cut = f"<p>The first {shown} of {count:,} devices are shown.</p>" if shown < count else ""
    columns = {
        "array": lambda array: array["name"],
        "shape": lambda array: f"{array['dtype']}[{', '.join(map(str, array['shape']))}]",
        "split": lambda array: array["spec"],
        "bytes": lambda array: bytes_text(array["bytes"]),
        "bytes on a device": lambda array: bytes_text(array["device_bytes"]),
    }
    return cut + table_of(found["arrays"], columns)


def memory(found: Mapping[str, Any]) -> str:
    """Returns the bytes by kind, a column for each stage."""
    bars = found["bars"]
    kinds = list(dict.fromkeys(kind for parts in bars.values() for kind in parts))
    rows = [[kind, *(bytes_text(parts.get(kind, 0)) for parts in bars.values())] for kind in kinds]
    total = ["sum", *(bytes_text(sum(parts.values())) for parts in bars.values())]
    return table(("kind", *bars), [*rows, total])


def traffic(found: Mapping[str, Any]) -> str:
    """Returns the bytes by axis, and a row for each collective."""
    axes = [(axis, bytes_text(size), int(size)) for axis, size in found["axes"].items()]
    unknown = (
        ""
        if found["is_known"]
        else "<p>A loop runs an unknown number of times, so there is no sum by axis.</p>"
    )
    summed = (
        table(("axis", "sent by a device in a step", "bytes"), axes)
        if axes
        else unknown or "<p>Nothing is sent.</p>"
    )
    return summed + _collectives(found["collectives"])


def _collectives(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return ""
    columns = {
        "collective": lambda each: each["kind"],
        "axes": lambda each: each["axes"],
        "runs a step": lambda each: f"{'at most ' if each['is_bound'] else ''}{each['runs']:g}",
        "payload": lambda each: bytes_text(each["payload_bytes"]),
        "sent by a device in a step": lambda each: bytes_text(each["bytes"]),
    }
    return (
        f"<details><summary>{len(found)} collectives</summary>{table_of(found, columns)}</details>"
    )


def config(found: Mapping[str, Any]) -> str:
    """Returns every setting, in columns beside one another."""
    rows = list(_flat(found))
    each = max(1, -(-len(rows) // NUM_COLUMNS))
    parts = [table(("setting", "value"), rows[at : at + each]) for at in range(0, len(rows), each)]
    return f'<div class="columns">{"".join(parts)}</div>'


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", "not set" if value is None else str(value)


TABLES: dict[str, Callable[[Any], str]] = {
    each.__name__: each
    for each in (metrics, experts, plans, ways, timeline, shards, memory, traffic, config)
}
