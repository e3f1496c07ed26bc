"""Text that fits the terminal's width, or 100 columns where there is no terminal."""

import contextlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping

LEAST = 40
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


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


@contextlib.contextmanager
def wrapped_usage() -> Iterator[None]:
    """Wraps the usage, the first line of the help that tyro prints in the ``with`` block, since tyro does not."""
    out, held = sys.stdout, io.StringIO()
    held.isatty = out.isatty  # by which tyro decides about colours
    try:
        with contextlib.redirect_stdout(held):
            yield
    finally:
        first, end, rest = held.getvalue().partition("\n")
        usage = COLOURS.sub("", first)
        if usage.startswith("usage:") and len(usage) > width():
            whole = re.sub(r"\[[^\[\]]*\]", lambda option: option[0].replace(" ", "\0"), usage)
            lines = textwrap.wrap(
                whole, width(), subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
            )
            first = "\n".join(lines).replace("\0", " ")
        out.write(f"{first}{end}{rest}")
