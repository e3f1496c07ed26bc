"""The charts of the devices: the timeline of a pipeline, and the shards of the arrays."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from jaxpar.inspect.text import bytes_text
from jaxpar.report.frame import ZOOM, Scale, bars, frame, percent, stretched
from jaxpar.schedule.plot import COLOURS as OP_COLOURS
from jaxpar.schedule.plot import LAST_CHUNK_WHITE

SHARD_COLOURS = ("#cfe0f3", "#8fca8b", "#f2b45c", "#b07fc7")
LABELLED_TIME = 130  # up to which ops have the numbers of their microbatches, at 12 pixels for the time of a forward
STAGE, ARRAY = 30, 24  # pixels of a row
MAX_NAMED_DEVICES = 16


def timeline(data: Mapping[str, Any]) -> str | None:
    """Returns the ops of a pipeline: a row for each stage, a bar for each op."""
    found = data.get("timeline")
    if not found:
        return None
    groups = sorted({(kind, chunk) for _, kind, _, chunk, *_ in found["ops"]}, key=lambda g: ("FRBW".find(g[0]), g[1]))
    kinds = [_ops(found, kind, chunk) for kind, chunk in groups]
    count, until = found["num_stages"], max(end for *_, end in found["ops"])
    height, scale = STAGE * count, Scale(0.0, until)
    has_labels = until <= LABELLED_TIME
    ends = "".join(f"M{end:g} 0V{count}" for end in found["tick_ends"])
    return frame(
        stretched(bars(kinds) + f'<path class="ticks" d="{ends}"/>', until, count, height)
        + ("".join(_labels(found, scale)) if has_labels else ""),
        height,
        kind="rows",
        title="Ops of each stage",
        left=[(1 - (stage + 0.5) / count, f"stage {stage}") for stage in range(count)],
        below=scale.ticks(8),
        across="time; one forward of a stage = 1. Dotted: end of a tick"
        if ends
        else "time; one forward of a stage = 1",
        legend={about: colour for colour, about, _ in kinds},
        buttons=ZOOM,
        min_width=int(12 * until) if has_labels else 600,
    )


def _ops(found: Mapping[str, Any], kind: str, chunk: int) -> tuple[str, str, list[tuple[float, float, float, str]]]:
    """Returns the colour and the name of a kind of op, and its bars."""
    of_chunk = f", chunk {chunk}" if found["num_chunks"] > 1 else ""
    found_bars = [
        (stage, start, end - start, f"stage {stage}, microbatch {microbatch}, from {start:.6g} to {end:.6g}")
        for stage, a_kind, microbatch, a_chunk, start, end in found["ops"]
        if (a_kind, a_chunk) == (kind, chunk)
    ]
    return _colour(found, kind, chunk), f"{kind} {found['meanings'][kind]}{of_chunk}", found_bars


def _labels(found: Mapping[str, Any], scale: Scale) -> Iterator[str]:
    for stage, _, microbatch, _, start, end in found["ops"]:
        at = percent(scale.share((start + end) / 2))
        yield f'<text class="on" x="{at}" y="{STAGE * (stage + 0.5) + 4:g}">{escape(str(microbatch))}</text>'


def _colour(found: Mapping[str, Any], kind: str, chunk: int) -> str:
    """Returns the colour of a kind of op, paler for later chunks."""
    colour = OP_COLOURS["BW" if kind == "B" and not found["splits_backward"] else kind]
    return _mix(colour, "#ffffff", LAST_CHUNK_WHITE * chunk / max(1, found["num_chunks"] - 1))


def _mix(colour: str, other: str, share: float) -> str:
    """Returns a colour between two, given as #rrggbb."""
    pairs = ((int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def shards(data: Mapping[str, Any]) -> str | None:
    """Returns the shard of each array that each device holds: a row for each array, a column for each device."""
    found = data.get("shards")
    if not found:
        return None
    arrays, devices = found["arrays"], found["devices"]
    cells = [
        (_shade(array, at), "", [(row, at + 0.03, 0.94, _cell(array, at, devices))])
        for row, array in enumerate(arrays)
        for at in range(len(devices))
    ]
    height = ARRAY * len(arrays)
    named = len(devices) <= MAX_NAMED_DEVICES
    every = 1 if named else -(-len(devices) // 8)
    middle = lambda at: (at + 0.5) / len(devices)
    return frame(
        stretched(bars(cells), len(devices), len(arrays), height),
        height,
        kind="rows",
        title="Parts of the arrays on the devices",
        left=[(1 - (row + 0.5) / len(arrays), array["name"]) for row, array in enumerate(arrays)],
        below=[(middle(at), str(at)) for at in range(0, len(devices), every)],
        across=f"device; {_order(devices)}",
        min_width=22 * len(devices) if named else 0,
    )


def _order(devices: list[Mapping[str, int]]) -> str:
    """Returns how devices are numbered, from their places on the mesh."""
    used = [axis for axis in devices[0] if any(place[axis] for place in devices)]
    if len(used) < 2:
        return f"one for each index of {used[0]}" if used else "one is all"
    return f"{used[-1]} varies fastest, then {', then '.join(reversed(used[:-1]))}"


def _shade(array: Mapping[str, Any], at: int) -> str:
    """Returns the colour of the part of an array that a device holds."""
    last = max(1, len(array["shards"]) - 1)
    place = array["held"][at] / last * (len(SHARD_COLOURS) - 1)
    low = min(int(place), len(SHARD_COLOURS) - 2)
    return _mix(SHARD_COLOURS[low], SHARD_COLOURS[low + 1], place - low)


def _cell(array: Mapping[str, Any], at: int, devices: list[Mapping[str, int]]) -> str:
    held = array["held"][at]
    alike = sum(other == held for other in array["held"])
    copies = f"the same on {alike} of {len(devices)} devices shown" if alike > 1 else "on no other device shown"
    place = ", ".join(f"{axis} {index}" for axis, index in devices[at].items())
    return (
        f"device {at} ({place})\n{array['name']}{array['shards'][held]}\n"
        f"{bytes_text(array['device_bytes'])} of {bytes_text(array['bytes'])}\n{copies}"
    )
