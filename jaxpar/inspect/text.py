"""Figures as text: readable units and aligned columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def unit_of(num_bytes: int | float) -> tuple[int, str]:
    """Returns the bytes of the unit in which ``bytes_text`` writes a size, and the unit's name."""
    size = 1
    *smaller, largest = UNITS
    for unit in smaller:
        if num_bytes < (1024 if size == 1 else 1023.5 * size):
            return size, unit
        size *= 1024
    return size, largest


def bytes_text(num_bytes: int | float | None) -> str:
    """Returns a size in binary units with three figures: `1.50 MiB`."""
    if num_bytes is None:
        return "?"
    size, unit = unit_of(num_bytes)
    number = num_bytes / size
    digits = 0 if size == 1 else 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f} {unit}"


def seconds_text(seconds: float, digits: int = 3) -> str:
    """Returns a time to ``digits`` significant digits, or to all digits before the point: "0.012 s", "1834 s"."""
    is_whole = seconds >= 10 ** (digits - 1)
    return f"{seconds:.0f} s" if is_whole else f"{seconds:.{digits}g} s"


def device_seconds_text(seconds: float) -> str:
    """Returns the time of a step or a part of it with three figures: "7.45 ms", "0.298 s"."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.1 else seconds_text(seconds)


def flops_text(flops: int | float) -> str:
    """Returns operations in decimal units with three figures: `134 MFLOP`."""
    number = float(flops)
    units = ["", "K", "M", "G", "T", "P", "E"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        del units[0]
    return f"{number:.3g} {units[0]}FLOP"


def params_text(count: int) -> str:
    """Returns a number of parameters: `0.1245 billion parameters`, and those of small models in full, `73,920 parameters`."""
    return f"{count:,} parameters" if count < 10**7 else f"{count / 1e9:.4g} billion parameters"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as text with columns aligned; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    header, *others = lines
    rule = "-" * max(map(len, lines))
    return "\n".join([header, rule, *others])


def table_of(items: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """Returns a table with a row for each item; the columns have a name, and what to write there about an item."""
    rows = [tuple(columns)]
    for item in items:
        rows.append(tuple(text(item) for text in columns.values()))
    return table(rows)
