"""The charts of a report, as HTML, one for each name. All text goes through ``html.escape``: names come from users."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from jaxpar.inspect.text import bytes_text, unit_of
from jaxpar.plot.charts import MEMORY_COLOURS, OTHERS, TIME_COLOURS
from jaxpar.plot.figure import mix
from jaxpar.report.frame import LINES, ZOOM, Curve, Scale, bars, chart, frame, percent, stretched
from jaxpar.schedule.draw import op_colour

ACROSS = "steps taken"
GREY = "#808080"
Cell = tuple[float, float, float, str]  # row, start, width and tip of a bar
SHARD_COLOURS = ("#cfe0f3", "#8fca8b", "#f2b45c", "#b07fc7")
LABELLED_TIME = 130  # up to which ops have the numbers of their microbatches, at 12 pixels for the time of a forward
STAGE, ARRAY, BAR = 30, 24, 26  # pixels of a row
MAX_NAMED_DEVICES = 16
ROWS_PIXELS, MAX_NAMED_EXPERTS = 480, 16  # of all layers of the chart of experts
# An expert with few tokens, with its share, with many.
LOW, EVEN, HIGH = "#3a6fb0", "#e4e4e4", "#c2462e"
FAR = 4  # times the mean: loads beyond have one colour


def loss(found: Mapping[str, Any]) -> str | None:
    """Returns the losses by step."""
    curves = _curves(found, lambda name: name == "loss" or name.endswith("_loss"))
    return chart(curves, title="loss", across=ACROSS, has_log=True)


def rate(found: Mapping[str, Any]) -> str | None:
    """Returns the items per second by step, named as in the facts above the charts."""
    curves = _curves(found, lambda name: name.endswith("_per_second"))
    items = "items"
    if len(curves) == 1:
        items, *_ = curves[0].name.partition("_per_second")
    return chart(curves, title=f"{items}/s", across=ACROSS, from_zero=True, top=_usual(curves))


def _usual(curves: list[Curve]) -> float | None:
    """Returns a value above which there are only single peaks, as after an evaluation; None if there are no such peaks."""
    values = sorted(value for curve in curves for value in curve.y if value is not None)
    if not values:
        return None
    usual = values[int(0.95 * (len(values) - 1))]
    return 1.5 * usual if values[-1] > 2 * usual else None


def grad_norm(found: Mapping[str, Any]) -> str | None:
    """Returns the norm of the gradients by step."""
    curves = _curves(found, lambda name: name == "grad_norm")
    return chart(curves, title="norm of the gradients", across=ACROSS)


def learning_rate(found: Mapping[str, Any]) -> str | None:
    """Returns the learning rate by step, of a run that logs it."""
    return chart(
        _curves(found, lambda name: name == "learning_rate"),
        title="learning rate",
        across=ACROSS,
        from_zero=True,
    )


def _curves(found: Mapping[str, Any], wanted: Callable[[str], bool]) -> list[Curve]:
    curves = []
    for name, curve in found["curves"].items():
        if wanted(name):
            mean = f", mean of {curve['mean_of']} steps" if curve["mean_of"] > 1 else ""
            curves.append(Curve(name + mean, curve["steps"], curve["values"]))
    return curves


def timeline(found: Mapping[str, Any]) -> str | None:
    """Returns the ops of a pipeline: a row for each stage, a bar for each op."""
    count, num_chunks = found["num_stages"], found["num_chunks"]
    until = max(end for *_, end in found["ops"])
    scale = Scale(0.0, until)
    has_labels = until <= LABELLED_TIME
    ops: dict[tuple[str, int], list[Cell]] = {}
    labels = []
    for stage, kind, microbatch, chunk, start, end in found["ops"]:
        tip = f"stage {stage}, microbatch {microbatch}, from {start:.6g} to {end:.6g}"
        ops.setdefault((kind, chunk), []).append((stage, start, end - start, tip))
        middle = percent(scale.share((start + end) / 2))
        at = f'x="{middle}" y="{STAGE * (stage + 0.5) + 4:g}"'
        labels.append(f'<text class="on" {at}>{escape(str(microbatch))}</text>')
    kinds = []
    for kind, chunk in sorted(ops, key=lambda group: ("FRBW".find(group[0]), group[1])):
        colour = op_colour(kind, chunk, num_chunks, splits_backward=found["splits_backward"])
        name = f"{kind} {found['meanings'][kind]}" + (f", chunk {chunk}" if num_chunks > 1 else "")
        kinds.append((colour, name, ops[kind, chunk]))
    ends = "".join(f"M{end:g} 0V{count}" for end in found["tick_ends"])
    return _rows(
        bars(kinds) + f'<path class="ticks" d="{ends}"/>',
        [f"stage {stage}" for stage in range(count)],
        STAGE,
        until,
        above="".join(labels) if has_labels else "",
        title="Ops of each stage",
        below=scale.ticks(8),
        across="time; one forward of a stage = 1" + (". Dotted: end of a tick" if ends else ""),
        legend={about: colour for colour, about, _ in kinds},
        buttons=ZOOM,
        min_width=int(12 * until) if has_labels else 600,
    )


def _rows(
    plot: str, names: Sequence[str], pixels: int, width: float, *, above: str = "", **about: Any
) -> str:
    """Returns a chart of rows.

    Args:
        plot: The bars of the rows, in coordinates to ``width`` and the number of rows.
        names: The name of each row, "" for none.
        pixels: The height of a row.
        width: The width of the rows in those coordinates.
        above: What is drawn above the rows, in pixels.
        **about: As for ``frame``.
    """
    count = len(names)
    height = pixels * count
    left = [(1 - (row + 0.5) / count, name) for row, name in enumerate(names) if name]
    drawn = stretched(plot, width, count, height) + above
    return frame(drawn, height, kind="rows", left=left, **about)


def shards(found: Mapping[str, Any]) -> str | None:
    """Returns the shard of each array that each device holds: a row for each array, a column for each device."""
    arrays, devices = found["arrays"], found["devices"]
    count = len(devices)
    cells = []
    for row, array in enumerate(arrays):
        for at in range(count):
            cell = row, at + 0.03, 0.94, _cell(array, at, devices)
            cells.append((_shade(array, at), "", [cell]))
    named = count <= MAX_NAMED_DEVICES
    every = 1 if named else -(-count // 8)
    return _rows(
        bars(cells),
        [array["name"] for array in arrays],
        ARRAY,
        count,
        title="Parts of the arrays on the devices",
        below=_columns(count, every),
        across=f"device; {_order(devices)}",
        min_width=22 * count if named else 0,
    )


def _columns(count: int, every: int) -> list[tuple[float, str]]:
    """Returns the numbers below some of the columns, at their shares of the width."""
    return [((at + 0.5) / count, str(at)) for at in range(0, count, every)]


def experts(found: Mapping[str, Any]) -> str | None:
    """Returns the load of each expert: a row for each layer, a column for each expert."""
    loads = found["loads"]
    cells: dict[str, list[Cell]] = {}
    for layer, of_layer in enumerate(loads):
        for expert, load in enumerate(of_layer):
            of_colour = cells.setdefault(_load_colour(load), [])
            tip = f"layer {layer}, expert {expert}: {load:.3g} times the mean"
            of_colour.append((layer, expert + 0.03, 0.94, tip))
    row = min(ARRAY, max(ROWS_PIXELS // len(loads), 4))
    count = len(loads[0])
    every_layer = -(-14 // row)
    return _rows(
        bars((colour, "", of_colour) for colour, of_colour in cells.items()),
        ["" if at % every_layer else f"layer {at}" for at in range(len(loads))],
        row,
        count,
        title="Load of each expert",
        below=_columns(count, -(-count // MAX_NAMED_EXPERTS)),
        across=f"expert; after {found['steps']:,} steps",
        legend={
            f"1/{FAR} of the mean or less": LOW,
            "the mean": EVEN,
            f"{FAR} times the mean or more": HIGH,
        },
    )


def _load_colour(load: float) -> str:
    """Returns the colour of a load in multiples of the mean, one of 17."""
    power = math.log(max(load, 1e-9), FAR)
    share = round(8 * max(-1.0, min(power, 1.0))) / 8
    return mix(EVEN, HIGH if share > 0 else LOW, abs(share))


def _order(devices: list[Mapping[str, int]]) -> str:
    """Returns how devices are numbered, from their places on the mesh."""
    steps = {axis: [place[axis] for place in devices] for axis in devices[0]}
    used = [axis for axis, at in steps.items() if any(at)]
    if not used:
        return "one is all"
    if len(used) == 1:
        return f"one for each index of {used[0]}"
    # The sooner the first device with another index comes, the faster the axis varies.
    fastest, *others = sorted(used, key=lambda axis: steps[axis].index(1))
    return f"{fastest} varies fastest, then {', then '.join(others)}"


def _shade(array: Mapping[str, Any], at: int) -> str:
    """Returns the colour of the part of an array that a device holds."""
    last = max(1, len(array["shards"]) - 1)
    place = array["held"][at] / last * (len(SHARD_COLOURS) - 1)
    low = min(int(place), len(SHARD_COLOURS) - 2)
    return mix(SHARD_COLOURS[low], SHARD_COLOURS[low + 1], place - low)


def _cell(array: Mapping[str, Any], at: int, devices: list[Mapping[str, int]]) -> str:
    held = array["held"][at]
    alike = sum(other == held for other in array["held"])
    copies = (
        f"the same on {alike} of {len(devices)} devices shown"
        if alike > 1
        else "on no other device shown"
    )
    place = ", ".join(f"{axis} {index}" for axis, index in devices[at].items())
    return (
        f"device {at} ({place})\n{array['name']}{array['shards'][held]}\n"
        f"{bytes_text(array['device_bytes'])} of {bytes_text(array['bytes'])}\n{copies}"
    )


def memory(found: Mapping[str, Any]) -> str | None:
    """Returns the bytes of a device by kind, a bar for each stage, and the memory that it has."""
    limit = found["limit_bytes"]
    scale, unit = unit_of(found["total_bytes"])
    sizes = {}
    for name, parts in found["bars"].items():
        sizes[name] = {kind: size / scale for kind, size in parts.items()}
    colour = lambda kind, at: MEMORY_COLOURS.get(kind) or OTHERS[at % len(OTHERS)]
    mark = (limit / scale, f"a device has {bytes_text(limit)}") if limit else None
    text = lambda size: bytes_text(size * scale)
    return _stacks(sizes, colour, text, "Memory by kind", f"{unit} on one device", mark)


def step_time(found: Mapping[str, Any]) -> str | None:
    """Returns where the time of a step goes, a bar for each plan."""
    colour = lambda _, at: TIME_COLOURS[at % len(TIME_COLOURS)]
    text = lambda value: f"{value:.3g} s"
    return _stacks(found, colour, text, "Time by part", "seconds of a step")


def traffic(found: Mapping[str, Any]) -> str | None:
    """Returns the bytes that a device sends in a step, by axis."""
    axes = found["axes"]
    if not axes:
        return None
    scale, unit = unit_of(max(axes.values()))
    sizes = {name: {"": size / scale} for name, size in axes.items()}
    across = f"{unit} that a device sends in a step"
    colour = lambda *_: LINES[0]
    text = lambda size: bytes_text(size * scale)
    return _stacks(sizes, colour, text, "Traffic by axis", across)


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
    sizes = np.array([[parts.get(kind, 0.0) for kind in kinds] for parts in found.values()])
    scale = Scale.of([*sizes.sum(1), *(mark or ())[:1]], from_zero=True)
    shares = sizes / scale.high
    starts = shares.cumsum(1) - shares
    used, of_kinds = {}, []
    for at, kind in enumerate(kinds):
        if sizes[:, at].any():
            used[kind] = colour(kind, at)
            columns = starts[:, at], shares[:, at], map(text, sizes[:, at])
            of_kinds.append((used[kind], kind, [*zip(range(len(found)), *columns, strict=True)]))
    above, height = "", BAR * len(found)
    if mark:
        at = percent(scale.share(mark[0]))
        above = f'<line class="mark" x1="{at}" x2="{at}" y1="0" y2="{height}"/>'
        across += f"; dashed: {mark[1]}"
    return _rows(
        bars(of_kinds),
        list(found),
        BAR,
        1,
        above=above,
        title=title,
        below=scale.ticks(),
        across=across,
        legend=used if len(used) > 1 else None,
    )


def line_bytes(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the bytes through the busiest device's line by number of devices, counted, and by formula in grey below."""
    counted = _by_devices(rows, "line")
    # Ways that send as much have one line: the ways drawn first are wider, so that each of them can be seen.
    counted = [replace(curve, width=1.5 * (len(counted) - at)) for at, curve in enumerate(counted)]
    distinct = {tuple(curve.y): curve for curve in _by_devices(rows, "line_formula")}
    formulas = [replace(curve, width=18, colour=GREY, is_shade=True) for curve in distinct.values()]
    title = "busiest line, times the gradients"
    return chart([*formulas, *counted], title=title, across="devices", from_zero=True)


def way_seconds(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the time of a step by number of devices, in the unit of the table."""
    curves = []
    for curve in _by_devices(rows, "seconds"):
        milliseconds = [seconds * 1e3 for seconds in curve.y if seconds is not None]
        curves.append(replace(curve, y=milliseconds))
    return chart(curves, title="ms a step, the fastest", across="devices", from_zero=True)


def staleness(runs: Mapping[str, Any]) -> str | None:
    """Returns the losses by simulated time of servers that do not wait."""
    curves = []
    for name, run in runs.items():
        label = f"{name}: mean staleness {run['mean']:.1f}"
        curves.append(Curve(label, run["seconds"], run["losses"]))
    return chart(curves, title="loss on all rows", across="simulated seconds", is_log=True)


def _by_devices(rows: Sequence[Mapping[str, Any]], column: str) -> list[Curve]:
    ways: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        ways.setdefault(row["way"], []).append(row)
    curves = []
    for way, of in ways.items():
        devices = [row["devices"] for row in of]
        values = [row[column] for row in of]
        curves.append(Curve(way, devices, values))
    return curves


# The charts of each section of the data; their names in the page have hyphens.
CHARTS: dict[str, tuple[Callable[[Any], str | None], ...]] = {
    "metrics": (loss, rate, grad_norm, learning_rate),
    "experts": (experts,),
    "ways": (line_bytes, way_seconds),
    **{
        each.__name__: (each,) for each in (staleness, step_time, timeline, shards, memory, traffic)
    },
}


def make_charts(data: Mapping[str, Any]) -> dict[str, str]:
    """Returns the charts for which there is data, by name."""
    made = (
        (chart, data[section])
        for section, charts in CHARTS.items()
        if data.get(section)
        for chart in charts
    )
    found = {chart.__name__.replace("_", "-"): chart(part) for chart, part in made}
    return {name: html for name, html in found.items() if html is not None}
