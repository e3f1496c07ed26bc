"""Escapes text from files and from other machines, so that it is safe to print on a terminal."""


def printable(text: str) -> str:
    r"""Returns text with each non-printable character escaped: control characters, line ends, bidirectional marks.

    >>> printable("loss\x1b[2J\n")
    'loss\\x1b[2J\\n'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """Returns a message of several lines with each line escaped by ``printable``."""
    return "\n".join(map(printable, text.split("\n")))
