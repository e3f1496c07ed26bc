"""The charts of the devices: the timeline of a pipeline, and the shards of the arrays."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from jaxpar.inspect.text import bytes_text
from jaxpar.report.chart_layout import GREY, MARGIN, Chart, layout
from jaxpar.schedule.plot import COLOURS as OP_COLOURS
from jaxpar.schedule.plot import LAST_CHUNK_WHITE

SHARD_COLOURS = [[0.0, "#cfe0f3"], [0.34, "#8fca8b"], [0.67, "#f2b45c"], [1.0, "#b07fc7"]]
MAX_LABELLED_OPS = 800  # the number of a microbatch fits into these at a browser's width
MAX_NAMED_DEVICES = 16
ROW = 24  # pixels of an array


def timeline(data: Mapping[str, Any]) -> Chart | None:
    """Returns the ops of a pipeline: a row for each stage, a bar for each op."""
    found = data.get("timeline")
    if not found:
        return None
    groups = sorted({(kind, chunk) for _, kind, _, chunk, *_ in found["ops"]}, key=lambda g: ("FRBW".find(g[0]), g[1]))
    bars = [_ops(found, kind, chunk) for kind, chunk in groups]
    stages = [f"stage {stage}" for stage in range(found["num_stages"])]
    rows = {"tickvals": list(range(len(stages))), "ticktext": stages, "range": [len(stages) - 0.5, -0.5]}
    axes = {
        "xaxis": {"title": {"text": "time; one forward of a stage = 1"}},
        "yaxis": {**rows, "fixedrange": True, "showgrid": False, "zeroline": False},
    }
    height = MARGIN + 60 + 34 * len(stages)
    return {"data": [*_tick_ends(found), *bars], "layout": layout(height, barmode="overlay", bargap=0.14, **axes)}


def _ops(found: Mapping[str, Any], kind: str, chunk: int) -> dict[str, Any]:
    ops = [op for op in found["ops"] if (op[1], op[3]) == (kind, chunk)]
    of_chunk = f", chunk {chunk}" if found["num_chunks"] > 1 else ""
    name = f"{kind} {found['meanings'][kind]}{of_chunk}"
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": escape(name),
        "y": [op[0] for op in ops],
        "base": [op[4] for op in ops],
        "x": [op[5] - op[4] for op in ops],
        "customdata": [[op[2], op[4], op[5]] for op in ops],
        "marker": {"color": _colour(found, kind, chunk), "line": {"color": "white", "width": 0.8}},
        "hovertemplate": f"%{{y}}: {escape(name)}<br>microbatch %{{customdata[0]}}<br>"
        "from %{customdata[1]:.6~g} to %{customdata[2]:.6~g}<extra></extra>",
    }
    if len(found["ops"]) <= MAX_LABELLED_OPS:
        bars |= {"text": [str(op[2]) for op in ops], "textposition": "inside", "insidetextanchor": "middle"}
        bars |= {"textangle": 0, "insidetextfont": {"color": "black"}}
    return bars


def _tick_ends(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a trace of lines between the ticks, all in one path."""
    ends = found["tick_ends"]
    if ends:
        bottom = found["num_stages"] - 0.5
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": "end of a tick",
            "x": [x for end in ends for x in (end, end, None)],
            "y": [y for _ in ends for y in (-0.5, bottom, None)],
            "line": {"color": GREY, "width": 0.6, "dash": "dot"},
            "hoverinfo": "skip",
        }


def _colour(found: Mapping[str, Any], kind: str, chunk: int) -> str:
    """Returns the colour of a kind of op, paler for later chunks."""
    colour = OP_COLOURS["BW" if kind == "B" and not found["splits_backward"] else kind]
    white = LAST_CHUNK_WHITE * chunk / max(1, found["num_chunks"] - 1)
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def shards(data: Mapping[str, Any]) -> Chart | None:
    """Returns the shard of each array that each device holds: a row for each array, a column for each device."""
    found = data.get("shards")
    if not found:
        return None
    arrays, devices = found["arrays"], found["devices"]
    short = len(devices) <= MAX_NAMED_DEVICES
    names = [f"device {at}<br>{_place(place, '<br>')}" for at, place in enumerate(devices)]
    cells = {
        "type": "heatmap",
        "x": list(range(len(devices))),
        "y": list(range(len(arrays))),
        "z": [_shades(array) for array in arrays],
        "customdata": [[_cell(array, at, devices) for at in range(len(devices))] for array in arrays],
        "zmin": 0,
        "zmax": 1,
        "colorscale": SHARD_COLOURS,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    rows = {"tickvals": cells["y"], "ticktext": [escape(array["name"]) for array in arrays], "autorange": "reversed"}
    columns = {"tickvals": cells["x"], "ticktext": names} if short else {"title": {"text": "device"}}
    axes = {
        "xaxis": {**columns, "showgrid": False, "zeroline": False},
        "yaxis": {**rows, "showgrid": False, "zeroline": False, "automargin": True},
    }
    height = MARGIN + 40 * short + ROW * len(arrays)
    return {"data": [cells], "layout": layout(height, **axes) | {"margin": {"t": 30, "r": 20, "b": 40 + 40 * short}}}


def _shades(array: Mapping[str, Any]) -> list[float]:
    last = max(1, len(array["shards"]) - 1)
    return [shard / last for shard in array["held"]]


def _cell(array: Mapping[str, Any], at: int, devices: list[Mapping[str, int]]) -> str:
    held = array["held"][at]
    alike = sum(other == held for other in array["held"])
    copies = f"the same on {alike} of {len(devices)} devices shown" if alike > 1 else "on no other device shown"
    return (
        f"device {at} ({_place(devices[at], ', ')})<br>{escape(array['name'])}{array['shards'][held]}<br>"
        f"{bytes_text(array['device_bytes'])} of {bytes_text(array['bytes'])}<br>{copies}"
    )


def _place(place: Mapping[str, int], between: str) -> str:
    return between.join(f"{axis} {index}" for axis, index in place.items())
