"""The forms of examples, known by their fields. Each is turned into one of the first three.

text                                  as it is
prompt, completion                    as they are; lists of messages, as TRL has them: messages, of which the prompt's are
                                      not learned
messages                              as they are: a list of objects with role and content, as OpenAI's API has them
instruction, output, perhaps input    of Alpaca: messages for a tokenizer with a chat template, else prompt and completion
conversations                         of ShareGPT, a list of objects with from and value: messages
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar import fields
from jaxpar.runtime.output import printable

KINDS = (("text",), ("prompt", "completion"), ("messages",))
OTHER_KINDS = (
    ("instruction", "output"),
    ("conversations",),
)  # looked for where there is none of the above
OPTIONAL = ("input", "system")  # of the others
OF_MESSAGES = ("tools",)  # beside those that messages are made of
FIELDS = tuple(
    dict.fromkeys(name for kind in (*KINDS, *OTHER_KINDS, OPTIONAL, OF_MESSAGES) for name in kind)
)
ASKED = ("prompt", "instruction", "question", "query")  # usual names of strings
ANSWERED = ("completion", "output", "response", "answer")
CONTEXT = ("input", "context")
ROLES = {"human": "user", "user": "user", "system": "system"}
ROLES |= dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant")
NOT_BY_LINE = "A .jsonl has an object a line; if the file is one list of objects, name it .json."


def kind_of(example: Any) -> tuple[str, ...]:
    """Returns the fields by which an example is known; raises ValueError where it has none, or those of two kinds.

    A field that is null counts only where no kind has values in all its fields.
    """
    if not isinstance(example, Mapping):
        remedy = NOT_BY_LINE if str(example).startswith("[{") else "Correct it."
        raise ValueError(
            f"an example must be an object with fields; got {fields.shown(example)}. {remedy}"
        )
    given = {name for name, value in example.items() if value is not None}
    for kinds in (KINDS, OTHER_KINDS):
        found = [kind for kind in kinds if set(kind) <= given]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(_of_several_kinds(found))
    with_nulls = [kind for kind in (*KINDS, *OTHER_KINDS) if set(kind) <= set(example)]
    if with_nulls:  # the value that is missing is named where it is read
        return max(with_nulls, key=lambda kind: len(given & set(kind)))
    names = ", ".join(sorted(printable(str(name)) for name in example)) or "none"
    raise ValueError(
        'an example must have "text", or "prompt" and "completion", or "messages", or "instruction" and "output", or '
        f'"conversations"; got the fields {names}. {_remedy(example)}'
    )


def _of_several_kinds(kinds: Sequence[Sequence[str]]) -> str:
    shown = [" with ".join(f'"{name}"' for name in kind) for kind in kinds]
    return (
        f"an example must have the fields of one kind; got {' and '.join(shown)}. Keep those of one kind, and remove the "
        "others."
    )


def _remedy(example: Mapping[str, Any]) -> str:
    """Returns what to do with an example of no kind."""
    if "input_ids" in example:
        return "Put records of tokens into a folder of their own."
    if {"chosen", "rejected"} <= set(example):
        remedy = _remedy_of_chosen(example)
        return f"Preferences are not trained; to learn the chosen answers alone, {remedy}."
    if renamed := _renamed(example):
        return f"Rename {renamed}."
    others = {name: value for name, value in example.items() if name not in FIELDS}
    for name, value in others.items():
        has_objects = isinstance(value, list) and value and isinstance(value[0], Mapping)
        first = value[0] if has_objects else {}
        if {"role", "from"} & set(first):
            remedy = _remedy_of_turns(example, name)
            return f"{remedy[0].upper()}{remedy[1:]}."
        if any(set(kind) <= set(first) for kind in (*KINDS, *OTHER_KINDS)):
            return f"Write each object of {_shown(name)} on a line of its own, in a .jsonl."
        if renamed := _renamed(first):
            return f"Write each object of {_shown(name)} on a line of its own, in a .jsonl; there rename {renamed}."
    return "Write each example with these fields: strings, or a list of messages."


def _shown(name: object) -> str:
    return f'"{printable(str(name))}"'


def _renamed(example: Mapping[str, Any], answers: Sequence[str] = ANSWERED) -> str:
    """Returns the fields of a question and its answer, with the names under which they are learned; "" if it has none."""
    has = lambda names: [name for name in names if isinstance(example.get(name), str)]
    asked, answered, context = has(ASKED), has(answers), has(CONTEXT)
    if not asked or not answered:
        return ""
    of_trl = {"prompt", "completion"} & {*asked, *answered}
    of_alpaca = {"instruction", "output"} & {*asked, *answered} or context or has(("system",))
    kind = KINDS[1] if of_trl and not of_alpaca else OTHER_KINDS[0]
    wanted = {kind[0]: asked, kind[1]: answered, "input": context}
    new = {name: names for name, names in wanted.items() if names and name not in names}
    in_order = sorted(new, key=lambda name: [*example].index(new[name][0]))
    return ", ".join(_renaming(new[name], name) for name in in_order)


def _renaming(names: Sequence[str], name: str) -> str:
    """Returns one of several names and the one that it is to have."""
    return f'{" or ".join(map(_shown, names))} to "{name}"'


def _remedy_of_chosen(example: Mapping[str, Any]) -> str:
    """Returns how the better answers of preferences are learned, with all that they answer."""
    prompt, chosen = example.get("prompt"), example["chosen"]
    if isinstance(chosen, str):
        if isinstance(prompt, list):
            return 'write "chosen" as a list with a message of the assistant, and rename it to "completion"'
        return f"rename {_renamed(example, ('chosen',)) or _renaming(['chosen'], 'text')}"
    if not isinstance(chosen, list) or not all(isinstance(turn, Mapping) for turn in chosen):
        return "write each example with these fields: strings, or a list of messages"
    return _remedy_of_turns(example, "chosen")


def _remedy_of_turns(example: Mapping[str, Any], name: str) -> str:
    """Returns how the messages of a field are learned, before which texts of other fields may have to be written."""
    turns, prompt = (
        [turn for turn in example[name] if isinstance(turn, Mapping)],
        example.get("prompt"),
    )
    is_sharegpt = any("from" in turn for turn in turns)
    if isinstance(prompt, list) and not is_sharegpt and turns[: len(prompt)] != prompt:
        return f"rename {_renaming([name], 'completion')}"
    texts = [str(turn.get("value" if is_sharegpt else "content")) for turn in turns]
    others = [*(() if is_sharegpt else ("system",)), *ASKED, *CONTEXT]
    has_text = lambda field: isinstance(example.get(field), str) and example[field].strip()
    is_told = lambda field: any(example[field].strip() in text for text in texts)
    missing = [_shown(field) for field in others if has_text(field) and not is_told(field)]
    roles = {ROLES.get(str(turn.get("from" if is_sharegpt else "role")).lower()) for turn in turns}
    if roles == {"assistant"} and not missing:
        missing = ["what is answered"]
    rename = f"rename {_renaming([name], 'conversations' if is_sharegpt else 'messages')}"
    if not missing:
        return rename
    first = ("first turn" if is_sharegpt else "first message") + "s" * (len(missing) > 1)
    return f"write {' and '.join(missing)} as the {first} of {_shown(name)}, and {rename}"


def as_learned(
    example: Mapping[str, Any], *, has_chat_template: bool
) -> tuple[dict[str, Any], set[str]]:
    """Returns an example in one of the first three forms, and the names of its fields that are not used.

    Messages have their ``tools`` beside them.

    Args:
        example: The fields.
        has_chat_template: Whether the tokenizer can render messages.

    Raises:
        ValueError: It is of no form, or a message is of an unknown speaker.
    """
    found, ignored = _as_learned(example, has_chat_template=has_chat_template)
    if "messages" not in found:
        return found, ignored
    return found | {"tools": example.get("tools")}, ignored - {"tools"}


def _as_learned(
    example: Mapping[str, Any], *, has_chat_template: bool
) -> tuple[dict[str, Any], set[str]]:
    kind = kind_of(example)
    given = {name: value for name, value in example.items() if value is not None}
    ignored = set(given) - set(kind)
    if kind == ("conversations",):
        return {"messages": [*_system(given), *_messages(example["conversations"])]}, ignored - {
            "system"
        }
    if kind == ("prompt", "completion") and all(isinstance(example[name], list) for name in kind):
        _check_turns(example, kind)
        return {
            "messages": [*map(_not_learned, example["prompt"]), *example["completion"]]
        }, ignored
    if kind != ("instruction", "output"):
        return {name: example[name] for name in kind}, ignored
    asked = [example["instruction"], *([given["input"]] if given.get("input") else [])]
    if not all(isinstance(each, str) for each in asked):
        raise ValueError(
            '"instruction" and "input" must be strings; got another kind. Correct the example.'
        )
    if not isinstance(example["output"], str):
        raise ValueError(
            f'"output" must be a string; got {fields.shown(example["output"])}. Write the answer, or remove the example.'
        )
    if has_chat_template:
        turns = [
            {"role": "user", "content": "\n\n".join(asked)},
            {"role": "assistant", "content": example["output"]},
        ]
        return {"messages": [*_system(given), *turns]}, ignored - set(OPTIONAL)
    return {
        "prompt": "".join(f"{each}\n\n" for each in asked),
        "completion": example["output"],
    }, ignored - {"input"}


def _check_turns(example: Mapping[str, Any], kind: Sequence[str]) -> None:
    for name in kind:
        if not all(isinstance(turn, Mapping) for turn in example[name]):
            raise ValueError(
                '"prompt" and "completion" must be two strings, or two lists of messages; got '
                f'{fields.shown(example[name])} for "{name}". Correct the example.'
            )


def _not_learned(message: Any) -> Any:
    is_answer = isinstance(message, Mapping) and message.get("role") == "assistant"
    return {**message, "weight": 0} if is_answer else message


def _system(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": given["system"]}] if given.get("system") else []


def _messages(conversation: Any) -> list[Any]:
    """Returns the messages of ShareGPT's conversations, which some files give in OpenAI's form."""
    if not isinstance(conversation, list) or not all(
        isinstance(turn, Mapping) for turn in conversation
    ):
        raise ValueError(
            '"conversations" must be a list of objects with "from" and "value"; got another form. Correct it.'
        )
    return [_message(turn) for turn in conversation]


def _message(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {name: value for name, value in turn.items() if value is not None}
    if "from" not in turn or ("from" not in given and "role" in given):
        return given
    role, got = ROLES.get(str(turn["from"]).lower()), printable(repr(turn["from"]))[:80]
    if role is None:
        raise ValueError(
            f'"from" must be one of {", ".join(ROLES)}; got {got}. Rename it; give calls of tools and what they return as '
            '"messages" (docs/text.md), or remove the example.'
        )
    if not {"value", "content", "tool_calls"} & set(given):
        raise ValueError(
            f'each turn must have a "value"; got one from {got} without it. Correct it.'
        )
    others = {name: value for name, value in given.items() if name not in ("from", "value")}
    return {"role": role, "content": given.get("value"), **others}
