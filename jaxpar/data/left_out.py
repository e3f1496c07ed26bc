"""The messages that a chat template left out: those without a place of their own in the text of their conversation."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

NEARBY = 4096  # characters that a template may write between two messages


def roles_left_out(messages: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """Returns the roles of messages that a conversation's text does not have as they are, but for spaces around them.

    Each message needs a place of its own, which the longest ones take first: an answer may quote another message. Templates
    order messages in their own way. A text in their order is read about once, and once more for each role that is returned.

    Args:
        messages: The messages, each with a text as its ``content``.
        text: What the template wrote of them.
    """
    contents = [message["content"].strip() for message in messages]
    places, left_out = _Places(text), dict[str, int]()
    longest_first = sorted(
        range(len(contents)),
        key=lambda number: -len(contents[number]),
    )
    for number in longest_first:
        content = contents[number]
        role = messages[number]["role"]
        is_told = role in left_out  # and its other messages are not looked for everywhere
        has_place = not content or places.take(number, content, is_nearby=is_told)
        if not has_place and not is_told:
            left_out[role] = number
    return sorted(left_out, key=left_out.__getitem__)


class _Places:
    """The places of messages in a text, which do not overlap."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts: list[int] = []  # in the order of the text
        self._ends: list[int] = []
        self._taken: list[tuple[int, int, int]] = []  # in the order of messages: number, start, end

    def take(self, number: int, content: str, *, is_nearby: bool) -> bool:
        """Returns whether there is a place for a message, which is taken then.

        It is looked for between the places of the messages before and after it first, where most templates write it.

        Args:
            number: The number of the message.
            content: Its text.
            is_nearby: Whether it is looked for beside these two places alone.
        """
        after = bisect_left(self._taken, (number,))
        first = self._taken[after - 1][2] if after else 0
        last = self._taken[after][1] if after < len(self._taken) else len(self._text)
        near = len(content) + NEARBY
        looked_in = [
            (first, min(last, first + near)),
            (max(first, last - near), last),
        ]
        if not is_nearby:
            looked_in += [(first, last), (0, len(self._text))]
        found = (self._find(content, *each) for each in looked_in)
        start = next((start for start in found if start >= 0), None)
        if start is None:
            return False
        end = start + len(content)
        insort(self._starts, start)
        insort(self._ends, end)
        insort(self._taken, (number, start, end))
        return True

    def _find(self, content: str, first: int, last: int) -> int:
        """Returns the first place of a text from ``first`` to ``last`` that is not taken; -1 if there is none."""
        start = self._text.find(content, first, last)
        while start >= 0:
            before = bisect_left(self._starts, start + len(content))
            if not before or self._ends[before - 1] <= start:
                return start
            start = self._text.find(content, self._ends[before - 1], last)
        return -1
