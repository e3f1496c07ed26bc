"""The arguments of a message's calls of tools: text that is JSON, as OpenAI has them, or the objects that it is of."""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from jaxpar.data.readers import parse_json


def takes_objects(render: Callable[[list[dict[str, Any]]], tuple[str, Any]]) -> bool:
    """Returns whether a chat template takes arguments of calls as objects, not as strings of their JSON.

    Args:
        render: A tokenizer's ``render``, by the template of the conversations that are meant: those with tools may have one.
    """
    as_text, as_object = '{"argument": "value"}', {"argument": "value"}

    def written(arguments: Any) -> str | None:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        }
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        with suppress(ValueError):
            return render([{"role": "user", "content": "a"}, answer])[0]
        return None

    takes_text = as_text in (written(as_text) or "")
    return not takes_text and written(as_object) is not None


def with_arguments_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls of tools have as objects what they have as strings of JSON, as OpenAI has arguments."""
    found = copy.deepcopy(dict(message))
    for call in called_functions(found):
        if isinstance(call.get("arguments"), str):
            call["arguments"] = read_arguments(call["arguments"])
    return found


def called_functions(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the functions that a message calls."""
    calls = message.get("tool_calls")
    calls = [each for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []
    functions = [each.get("function", each) for each in calls]
    return [each for each in functions if isinstance(each, dict)]


def read_arguments(text: str) -> Any:
    """Returns the object of which a text is the JSON; the text if it is not of one."""
    with suppress(ValueError):
        if isinstance(found := parse_json(text.encode(), "arguments"), dict):
            return found
    return text
