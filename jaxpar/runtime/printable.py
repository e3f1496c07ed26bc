"""Text from files and from other machines, as a terminal may show it."""


def printable(text: str) -> str:
    r"""Returns text with each character that is not printable as an escape: controls, line ends, marks of writing direction.

    >>> printable("loss\x1b[2J\n")
    'loss\\x1b[2J\\n'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """Returns a message of several lines with all but its line ends ``printable``."""
    return "\n".join(map(printable, text.split("\n")))
