"""The forms of an example that files have: fields by which it is known, and the form in which it is learned.

text                                  as it is
prompt, completion                    as they are
messages                              as they are: a list of objects with role and content, as OpenAI's API has them
instruction, output, perhaps input    of Alpaca: messages for a tokenizer with a chat template, else prompt and completion
conversations                         of ShareGPT, a list of objects with from and value: messages
"""

from collections.abc import Mapping
from typing import Any

from jaxpar.runtime.printable import printable

KINDS = (("text",), ("prompt", "completion"), ("messages",))
OTHER_KINDS = (("instruction", "output"), ("conversations",))  # looked for where there is none of the above
OPTIONAL = ("input", "system")  # of the others
FIELDS = tuple(dict.fromkeys(name for kind in (*KINDS, *OTHER_KINDS, OPTIONAL) for name in kind))
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    "system": "system",
}


def kind_of(example: Any) -> tuple[str, ...]:
    """Returns the fields by which an example is known; raises ValueError where it has none, or those of two kinds."""
    if not isinstance(example, Mapping):
        raise ValueError(f"an example must be an object with fields; got a {type(example).__name__}. Correct it.")
    for kinds in (KINDS, OTHER_KINDS):
        found = [kind for kind in kinds if set(kind) <= set(example)]
        if len(found) == 1:
            return found[0]
        if found:
            break
    names = ", ".join(sorted(printable(str(name)) for name in example)) or "none"
    raise ValueError(
        'an example must have "text", or "prompt" and "completion", or "messages", or "instruction" and "output", or '
        f'"conversations"; got the fields {names}. Rename or remove fields.'
    )


def as_learned(example: Mapping[str, Any], *, has_chat_template: bool) -> tuple[dict[str, Any], set[str]]:
    """Returns an example in one of the first three forms, and the names of its fields that are not used.

    Args:
        example: The fields.
        has_chat_template: Whether the tokenizer can render messages.

    Raises:
        ValueError: It is of no form, or a message is of an unknown speaker.
    """
    kind = kind_of(example)
    given = {name: value for name, value in example.items() if value is not None}
    ignored = set(example) - set(kind)
    if kind == ("conversations",):
        return {"messages": [*_system(given), *_messages(example["conversations"])]}, ignored - {"system"}
    if kind != ("instruction", "output"):
        return {name: example[name] for name in kind}, ignored
    asked = [example["instruction"], *([given["input"]] if given.get("input") else [])]
    if not all(isinstance(each, str) for each in asked):
        raise ValueError('"instruction" and "input" must be strings; got another kind. Correct the example.')
    if not isinstance(example["output"], str):
        raise ValueError(
            f'"output" must be a string; got a {type(example["output"]).__name__}. Write the answer, or remove the example.'
        )
    if has_chat_template:
        turns = [{"role": "user", "content": "\n\n".join(asked)}, {"role": "assistant", "content": example["output"]}]
        return {"messages": [*_system(given), *turns]}, ignored - set(OPTIONAL)
    return {"prompt": "".join(f"{each}\n\n" for each in asked), "completion": example["output"]}, ignored - {"input"}


def _system(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": given["system"]}] if given.get("system") else []


def _messages(conversation: Any) -> list[Any]:
    """Returns the messages of ShareGPT's conversations, which some files give in OpenAI's form."""
    if not isinstance(conversation, list) or not all(isinstance(turn, Mapping) for turn in conversation):
        raise ValueError(
            '"conversations" must be a list of objects with "from" and "value"; got another form. Correct it.'
        )
    return [_message(turn) for turn in conversation]


def _message(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    if "from" not in turn:
        return turn
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(
            f'"from" must be human, gpt or system; got {printable(repr(speaker))[:80]}. Rename it, or remove the example.'
        )
    return {"role": ROLES[speaker], "content": turn.get("value")}
