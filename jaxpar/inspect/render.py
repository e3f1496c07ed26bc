"""Reports as text: aligned columns, units that people read, nothing that needs a terminal."""

import os
from collections.abc import Sequence

from jaxpar.inspect.collectives import Collective
from jaxpar.inspect.report import Comparison, StepReport, axes_text


def render_report(report: StepReport) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in report.axis_sizes)
    title = f"{report.name or 'step'} on {_counted(report.num_devices, 'device')}" + (f", mesh {mesh}" if mesh else "")
    parts = [
        title,
        _collectives_table(report),
        _axes_table(report),
        _memory_table(report),
        _flops_lines(report),
        _whole_table(report),
    ]
    return "\n\n".join(part for part in parts if part)


def render_comparison(comparison: Comparison) -> str:
    if comparison.is_same:
        return "no difference"
    rows = [("what", "before", "after")]
    for (kind, axes), pair in comparison.collectives.items():
        rows.append((f"{kind} over {axes_text(axes)}", *(_runs_and_bytes(*side) for side in pair)))
    for kind, (before, after) in comparison.memory.items():
        rows.append((f"{kind} memory", bytes_text(before), bytes_text(after)))
    if comparison.flops:
        rows.append(("flops", *(flops_text(flops) for flops in comparison.flops)))
    lines = [table(rows)]
    for names, word in zip(comparison.whole_arrays, ("no longer", "newly"), strict=True):
        lines += [f"{word} whole on every device: {name}" for name in names]
    return "\n".join(lines)


def bytes_text(num_bytes: int | float | None) -> str:
    """Returns a size in binary units with three figures: `1.50 MiB`."""
    if num_bytes is None:
        return "?"
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        num_bytes /= 1024
        if num_bytes < 1023.5:
            break
    digits = 2 if num_bytes < 10 else 1 if num_bytes < 100 else 0
    return f"{num_bytes:.{digits}f} {unit}"


def flops_text(flops: int | float) -> str:
    """Returns operations in decimal units with three figures: `134 MFLOP`."""
    number = float(flops)
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if number < 999.5:
            break
        number /= 1000
    return f"{number:.3g} {unit}FLOP"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as text with columns aligned; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])


def _collectives_table(report: StepReport) -> str:
    if not report.collectives:
        return "no collectives"
    rows = [("collective", "axes", "runs", "group", "payload", "sent a step", "link", "arrays", "from")]
    rows += [
        (
            each.kind + (" (async)" if each.asynchronous else ""),
            _place_text(each, bool(report.axis_sizes)),
            _runs_text(each),
            str(each.group_size),
            bytes_text(each.payload_bytes),
            _bounded(each, bytes_text(each.bytes_moved)),
            {None: "-", True: "across", False: "inside"}[each.crosses_nodes],
            _arrays_text(each),
            _origin_text(each),
        )
        for each in report.collectives
    ]
    lines = [table(rows)]
    if any(each.is_bound for each in report.collectives):
        lines.append("<= stands in a branch that is taken at most so often")
    if any(each.times is None for each in report.collectives):
        lines.append("x ? stands in a loop whose trips the compiler does not know")
    return "\n".join(lines)


def _place_text(each: Collective, has_mesh: bool) -> str:
    if not has_mesh:
        return _shortened(each.groups, 28)
    shift = "" if each.shift is None else f" {each.shift:+d}"
    return axes_text(each.axes) + shift + ("" if each.whole_axes else " (part)")


def _runs_text(each: Collective) -> str:
    runs = f"{each.known_times:g}"
    return f"{runs} x ?" if each.times is None else _bounded(each, runs)


def _bounded(each: Collective, text: str) -> str:
    return f"<= {text}" if each.is_bound and each.times is not None else text


def _arrays_text(each: Collective) -> str:
    first = str(each.shapes[0]) if each.shapes else "?"
    return first if len(each.shapes) < 2 else f"{first} + {len(each.shapes) - 1} more"


def _origin_text(each: Collective) -> str:
    return " ".join(part for part in (os.path.basename(each.source), _tail(each.op_name, 48)) if part)


def _axes_table(report: StepReport) -> str:
    """Sums by axes; left out where one of them is unknown, since a sum without it would mislead."""
    if not report.axis_sizes or not report.collectives or any(each.times is None for each in report.collectives):
        return ""
    rows = [("sent a step over", "runs", "bytes")]
    for axes, num_bytes in report.bytes_by_axes().items():
        chosen = [each for each in report.collectives if each.axes == axes]
        bound = "<= " if any(each.is_bound for each in chosen) else ""
        runs = sum(each.known_times for each in chosen)
        rows.append((axes_text(axes), f"{bound}{runs:g}", bound + bytes_text(num_bytes)))
    return table(rows)


def _memory_table(report: StepReport) -> str:
    rows = [("memory on each device", "bytes")]
    return table(rows + [(kind, bytes_text(size)) for kind, size in report.memory.by_kind().items()])


def _flops_lines(report: StepReport) -> str:
    lines = [f"matrix products and convolutions on each device: {flops_text(report.flops)}"]
    if report.flops_least != report.flops:
        lines[0] += f" at most, {flops_text(report.flops_least)} at least (branches)"
    lines += [
        f"one trip counted of a loop whose trips the compiler does not know: {loop}" for loop in report.unknown_loops
    ]
    lines += [f"not counted: custom call {target}" for target in report.uncounted_calls]
    return "\n".join(lines)


def _whole_table(report: StepReport) -> str:
    if not report.whole_arrays:
        return ""
    rows = [(f"whole on every device though {bytes_text(report.large_bytes)} or more", "array", "bytes", "devices")]
    rows += [
        (
            each.name,
            f"{each.dtype}[{','.join(map(str, each.shape))}]",
            bytes_text(each.num_bytes),
            str(each.num_devices),
        )
        for each in report.whole_arrays
    ]
    return table(rows)


def _runs_and_bytes(runs: int | float | None, num_bytes: int | None) -> str:
    if runs is None:
        return "unknown runs"
    return f"{runs:g} x, {bytes_text(num_bytes)}" if runs else "none"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]
