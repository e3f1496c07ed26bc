"""Leaves out what Gloo prints: a line for each group of devices, which several threads write piece by piece at once.

    [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1

So a line may begin within another, or within one of the program's; then only numbers and ends of lines are left of the others.
Errors, which jaxlib raises as "Gloo all-reduce failed", have another form and stay.
"""

import re

BEGINS = b"[Gloo] Rank "
MIDDLE = b" is connected to "
ENDS = b" peer ranks. Expected number of connected peer ranks is : "
_PIECES = re.compile(rb"\[Gloo\] Rank \d*| is connected to \d*|" + re.escape(ENDS) + rb"\d*")
_LAST_PIECE = re.compile(re.escape(ENDS) + rb"[\d ]*\n?$")
_NUMBERS = re.compile(rb"\d*\n?")


def _is_numbers(line: bytes) -> bool:
    return _NUMBERS.fullmatch(line) is not None


class Quiet:
    r"""Output of a program without Gloo's lines.

    >>> quiet = Quiet()
    >>> quiet.feed(b"loss 2\n[Gloo] Rank 0 is connected to 1 peer ranks.")
    b'loss 2\n'
    >>> quiet.feed(b" Expected number of connected peer ranks is : 1\nloss 1\n")
    b'loss 1\n'
    """

    def __init__(self) -> None:
        self._held = b""  # the last line, where it may become one of Gloo's
        self._open = 0  # of Gloo's lines, those whose end has not come

    def feed(self, output: bytes) -> bytes:
        """Returns what to show of the output that is held and of this."""
        *lines, last = (self._held + output).split(b"\n")
        shown = b"".join(self._without(line + b"\n") for line in lines)
        self._held = last if self._may_become_one(last) else b""
        return shown + (b"" if self._held else last)

    def end(self) -> bytes:
        """Returns what to show of the output that is held, at its end."""
        held, self._held = self._held, b""
        return self._without(held)

    def _may_become_one(self, last: bytes) -> bool:
        if not last:
            return False
        is_number = self._open > 0 and _is_numbers(last)
        begins = any(last.endswith(BEGINS[:count]) for count in range(1, len(BEGINS)))
        return BEGINS in last or ENDS in last or begins or is_number

    def _without(self, line: bytes) -> bytes:
        is_middle = self._open > 0 and MIDDLE in line
        if BEGINS not in line and ENDS not in line and not is_middle:
            is_rest = self._open > 0 and _is_numbers(line)
            self._open -= is_rest and line.endswith(b"\n")
            return b"" if is_rest else line
        self._open += line.count(BEGINS)
        rest = _PIECES.sub(b"", line)
        if _is_numbers(rest) or _LAST_PIECE.search(line):
            self._open = max(0, self._open - 1)
            rest = rest.removesuffix(b"\n")
        return b"" if _is_numbers(rest) else rest


def without_chatter(output: bytes) -> bytes:
    """Returns complete output without Gloo's lines."""
    quiet = Quiet()
    return quiet.feed(output) + quiet.end()
