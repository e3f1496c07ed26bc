"""The tables of a report, as HTML. All text goes through ``html.escape``: names and settings come from users."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from jaxpar.inspect.text import bytes_text, seconds_text
from jaxpar.metrics.status import duration
from jaxpar.planner.render import COLUMNS, remat_text

NUM_COLUMNS = 3  # of settings


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table; columns of numbers are aligned to the right."""
    rows = list(rows)
    styles = ["".join(_style(row[at]) for row in rows[:1]) for at in range(len(header))]
    head = "".join(f"<th{style}>{escape(name)}</th>" for name, style in zip(header, styles, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    text = "" if value is None else _number(value) if isinstance(value, int | float) else str(value)
    return f"<td{_style(value)}>{escape(text)}</td>"


def _style(value: Any) -> str:
    return ' class="number"' if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _number(value: int | float) -> str:
    return str(value) if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def facts(data: Mapping[str, Any]) -> str:
    """Returns the most important facts, a box for each."""
    found = {**dict(_progress(data)), **dict(_sizes(data)), **data.get("facts", {})}
    boxes = (f"<div><dt>{escape(name)}</dt><dd>{escape(str(text))}</dd></div>" for name, text in found.items())
    return f"<dl>{''.join(boxes)}</dl>"


def _progress(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the steps taken, last losses, rate and time left."""
    found = data.get("metrics")
    if found is None:
        return
    done, end, rows = found["num_steps_done"], data.get("num_steps"), found["rows"]
    yield "steps", f"{done:,}" + (f" of {end:,}" if end else "")
    if data.get("first_step"):
        yield "resumed", f"from step {data['first_step']:,}"
    for name, row in rows.items():
        if row.get("last") is not None and (name == "loss" or name in ("test_loss", "test_accuracy")):
            yield name, f"{row['last']:.5g}"
        if name.endswith("_per_second") and row.get("median") is not None:
            yield "rate", f"{row['median']:,.0f} {name.removesuffix('_per_second')}/s (median)"
    seconds = rows.get("step_seconds", {}).get("median")
    if seconds is not None:
        yield "a step", f"{seconds_text(seconds)} (median)"
        if end and done < end:
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


def metrics(data: Mapping[str, Any]) -> str:
    """Returns a row for each column of metrics.jsonl."""
    names = "first", "lowest", "at_step", "highest", "median", "last", "num_not_finite"
    rows = (data.get("metrics") or {}).get("rows", {})
    if not rows:
        return "<p>No step has been logged yet.</p>"
    header = "column", *(name.replace("_", " ").replace("num ", "") for name in names)
    return table(header, ([column, *(row.get(name) for name in names)] for column, row in rows.items()))


def plans(data: Mapping[str, Any]) -> str:
    """Returns a row for each plan."""
    found = data.get("plans", ())
    any_why = any(plan["why"] for plan in found)
    rows = (
        (
            rank,
            *(plan[name] for name in ("data", "stage", "tensor")),
            plan["schedule"] if plan["stage"] > 1 else "-",
            plan["num_microbatches"],
            plan["zero"],
            remat_text(plan["remat"]),
            bytes_text(plan["memory_bytes"]),
            seconds_text(plan["step_seconds"]),
            f"{plan['bubble_fraction']:.1%}",
            *([plan["why"]] if any_why else []),
        )
        for rank, plan in enumerate(found, 1)
    )
    return table((*COLUMNS, *(["why"] if any_why else [])), rows)


def ways(data: Mapping[str, Any]) -> str:
    """Returns a row for each way to reduce gradients on each number of devices."""
    names = "link", "link_formula", "line", "line_formula"
    header = "way", "devices", "busiest link", "formula", "busiest line", "formula", "ms a step", "parameters apart"
    rows = (
        (
            row["way"],
            row["devices"],
            *(round(float(row[name]), 3) for name in names),
            round(row["seconds"] * 1e3, 2),
            float(f"{row['apart']:.0e}"),
        )
        for row in data.get("ways", ())
    )
    return table(header, rows)


def timeline(data: Mapping[str, Any]) -> str:
    """Returns the makespan, idle share and peak live microbatches of a timeline, as HTML."""
    found = data.get("timeline")
    if not found:
        return ""
    shown, count, all_ = len(found["ops"]), found["num_microbatches"], found["of_microbatches"]
    few = (
        f" {count} microbatches stand for {all_}, since the steady state repeats: with {all_} a smaller share is idle."
        if count < all_
        else ""
    )
    cut = f" The first {shown:,} of {found['num_ops']:,} ops are shown." if shown < found["num_ops"] else ""
    peak = ", ".join(map(str, found["peak_live"]))
    return (
        f"<p>{escape(found['title'])}: done at {found['makespan']:g}, {found['bubble_fraction']:.1%} idle. Computed from the "
        f"schedule with F = R = B = W = 1, not measured.{few}{cut} Microbatches whose activations each stage "
        f"holds at most: {peak}.</p>"
    )


def shards(data: Mapping[str, Any]) -> str:
    """Returns a row for each array: how it is split, and how many devices hold the same part."""
    found = data.get("shards")
    if not found:
        return ""
    shown = len(found["devices"])
    cut = (
        f"<p>The first {shown} of {found['num_devices']:,} devices are shown.</p>"
        if shown < found["num_devices"]
        else ""
    )
    rows = (
        (
            array["name"],
            f"{array['dtype']}[{', '.join(map(str, array['shape']))}]",
            array["spec"],
            bytes_text(array["bytes"]),
            bytes_text(array["device_bytes"]),
        )
        for array in found["arrays"]
    )
    return cut + table(("array", "shape", "split", "bytes", "bytes on a device"), rows)


def memory(data: Mapping[str, Any]) -> str:
    """Returns the bytes by kind, a column for each stage."""
    found = data.get("memory")
    if not found:
        return ""
    bars = found["bars"]
    kinds = list(dict.fromkeys(kind for parts in bars.values() for kind in parts))
    rows = [[kind, *(bytes_text(parts.get(kind, 0)) for parts in bars.values())] for kind in kinds]
    total = ["sum", *(bytes_text(sum(parts.values())) for parts in bars.values())]
    return table(("kind", *bars), [*rows, total])


def traffic(data: Mapping[str, Any]) -> str:
    """Returns the bytes by axis, and a row for each collective."""
    found = data.get("traffic")
    if not found:
        return ""
    axes = [(axis, bytes_text(size), int(size)) for axis, size in found["axes"].items()]
    unknown = "" if found["is_known"] else "<p>A loop runs an unknown number of times, so there is no sum by axis.</p>"
    summed = (
        table(("axis", "sent by a device in a step", "bytes"), axes) if axes else unknown or "<p>Nothing is sent.</p>"
    )
    return summed + _collectives(found["collectives"])


def _collectives(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return ""
    rows = (
        (
            each["kind"],
            each["axes"],
            f"{'at most ' if each['is_bound'] else ''}{each['runs']:g}",
            bytes_text(each["payload_bytes"]),
            bytes_text(each["bytes"]),
        )
        for each in found
    )
    header = "collective", "axes", "runs a step", "payload", "sent by a device in a step"
    return f"<details><summary>{len(found)} collectives</summary>{table(header, rows)}</details>"


def config(data: Mapping[str, Any]) -> str:
    """Returns every setting, in columns beside one another."""
    rows = list(_flat(data.get("config", {})))
    each = max(1, -(-len(rows) // NUM_COLUMNS))
    parts = [table(("setting", "value"), rows[at : at + each]) for at in range(0, len(rows), each)]
    return f'<div class="columns">{"".join(parts)}</div>' if rows else "<p>There is no config.json.</p>"


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", "not set" if value is None else str(value)
