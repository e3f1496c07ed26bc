"""The fields of messages that a chat template names and still does not write, which cannot be told from its text.

    {{ message.content }}{{ call.function.name }}    names `name`, and writes that of a function, not that of a message

A conversation is rendered once more without such a field. If its text is the same in every conversation that is tried, the
field is not written.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

TRIED = 100  # conversations for a field of a role, after which it is taken to be unused in all
Key = tuple[str, str, bool]  # the role, the field, and whether the conversation has tools


class UnusedFields:
    """The fields of messages that no conversation has needed so far, by their roles.

    Args:
        render: ``render(messages)`` returns the text of a conversation and its spans; it raises ValueError where it takes none.
    """

    def __init__(self, render: Callable[..., tuple[str, Any]]) -> None:
        self._render = render
        self._written: set[Key] = set()
        self._tried: Counter[Key] = Counter()

    def look_at(
        self,
        messages: Sequence[Mapping[str, Any]],
        names: Collection[str],
        text: str,
        tools: list[Any] | None,
    ) -> None:
        """Tries the fields of a conversation of which it is not known that they are written.

        Args:
            messages: The conversation.
            names: The fields that its template names, and may write.
            text: What the template wrote.
            tools: The tools of the conversation.
        """
        keys = {
            (message["role"], name, bool(tools))
            for message in messages
            for name in names
            if message.get(name)
        }
        for key in keys - self._written:
            if self._tried[key] < TRIED:
                self._tried[key] += 1
                if self._is_written(messages, key, text, tools):
                    self._written.add(key)

    def _is_written(
        self,
        messages: Sequence[Mapping[str, Any]],
        key: Key,
        text: str,
        tools: list[Any] | None,
    ) -> bool:
        role, unused, _ = key
        others = [
            {name: value for name, value in message.items() if name != unused}
            if message["role"] == role
            else message
            for message in messages
        ]
        try:
            return self._render(others, tools=tools)[0] != text
        except ValueError:  # the template needs it
            return True

    def names(self) -> set[str]:
        """Returns the fields that were tried and never written, with their roles."""
        unused = {key[:2] for key in self._tried} - {key[:2] for key in self._written}
        return {f"{name} of messages of the role {role}" for role, name in unused}
