"""Prints messages: escapes text from files and other machines, and does not fail if standard error is on a full disk."""

import io
import sys


def printable(text: str) -> str:
    r"""Returns text with each non-printable character escaped: control characters, line ends, bidirectional marks.

    >>> printable("loss\x1b[2J\n")
    'loss\\x1b[2J\\n'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """Returns a message of several lines with each line escaped by ``printable``."""
    return "\n".join(map(printable, text.split("\n")))


def tell(text: str) -> None:
    """Prints a message on standard error; on a full disk the message is lost and the exit code does not change."""
    try:
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write: standard output may share the file
    except OSError:  # a stream with a buffer would fail again with that text, at its end or the process's
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True)
