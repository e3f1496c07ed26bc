"""Figures as text: readable units and aligned columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def unit_of(num_bytes: int | float) -> tuple[int, str]:
    """Returns the bytes of the unit in which ``bytes_text`` writes a size, and the unit's name."""
    exponent = 0
    while (
        num_bytes >= (1024 if exponent == 0 else 1023.5 * 1024**exponent)
        and exponent < len(UNITS) - 1
    ):
        exponent += 1
    return 1024**exponent, UNITS[exponent]


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
    return f"{seconds:.0f} s" if seconds >= 10 ** (digits - 1) else f"{seconds:.{digits}g} s"


def device_seconds_text(seconds: float) -> str:
    """Returns the time of a step or a part of it with three figures: "7.45 ms", "0.298 s"."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.1 else seconds_text(seconds)


def flops_text(flops: int | float) -> str:
    """Returns operations in decimal units with three figures: `134 MFLOP`."""
    number, units = float(flops), ["", "K", "M", "G", "T", "P", "E"]
    while number >= 999.5 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.3g} {units[0]}FLOP"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as text with columns aligned; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])


def table_of(items: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """Returns a table with a row for each item; the columns have a name, and what to write there about an item."""
    return table(
        [tuple(columns), *(tuple(text(item) for text in columns.values()) for item in items)]
    )
