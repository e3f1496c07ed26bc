"""Text that fits the terminal's width, or 100 columns where there is no terminal."""

import shutil
import textwrap
from collections.abc import Mapping

LEAST = 40


def width() -> int:
    """Returns the columns of the terminal."""
    return max(LEAST, shutil.get_terminal_size((100, 24)).columns)


def wrapped(text: str) -> str:
    """Returns text with each paragraph wrapped, except those with a command line, which a reader may copy.

    Lines after the first are indented, or tyro would join them again.
    """
    fill = lambda part: textwrap.fill(part, width(), subsequent_indent="  ", break_on_hyphens=False)
    return "\n\n".join(part if "python " in part else fill(part) for part in text.split("\n\n"))


def named(rows: Mapping[str, str]) -> str:
    """Returns a line for each name with what it is, wrapped beside it."""
    first = max(map(len, rows)) + 4
    fill = lambda name, about: textwrap.fill(
        about, width(), initial_indent=f"  {name}".ljust(first), subsequent_indent=" " * first, break_on_hyphens=False
    )
    return "\n".join(fill(name, about) for name, about in rows.items())
