"""The schemas of requests in the form of OpenAI's API.

A field without effect here is accepted only with a value that changes nothing.
"""

from typing import Any

MAX_ROWS = 8  # prompts times n
MAX_STOPS = 4
TEXT = {"type": "string", "minLength": 1, "examples": ["\n"]}

_ONLY = lambda *values: {"enum": [*values, None]}
# Fields that clients send, with the values that change nothing; other values are not supported.
_NEUTRAL = {
    "frequency_penalty": _ONLY(0),
    "presence_penalty": _ONLY(0),
    "logit_bias": _ONLY({}),
    "user": {"type": ["string", "null"]},
}
_OF_COMPLETIONS = {"best_of": _ONLY(1), "echo": _ONLY(False), "logprobs": _ONLY(), "suffix": _ONLY("")}
_OF_CHAT = {
    "logprobs": _ONLY(False),
    "top_logprobs": _ONLY(0),
    "tools": _ONLY([]),
    "tool_choice": _ONLY("none"),
    "response_format": _ONLY({"type": "text"}),
    "modalities": _ONLY(["text"]),
    "store": _ONLY(False),
    "metadata": {"type": ["object", "null"]},
}


def completions(model: str, max_tokens: int, max_context: int) -> dict[str, Any]:
    """Returns the schema of /v1/completions."""
    token = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, "examples": [1]}
    tokens = {"type": "array", "minItems": 1, "maxItems": max_context, "items": token}
    many = {"minItems": 1, "maxItems": MAX_ROWS, "type": "array"}
    prompt = {
        "description": f"a text, tokens (at most {max_context}), or an array of up to {MAX_ROWS} of either",
        "anyOf": [{"type": "string"}, tokens, many | {"items": {"type": "string"}}, many | {"items": tokens}],
        "examples": ["def "],
    }
    return _schema(model, max_tokens, {"prompt": prompt}, _OF_COMPLETIONS)


def chat(model: str, max_tokens: int) -> dict[str, Any]:
    """Returns the schema of /v1/chat/completions."""
    part = _object({"type": {"const": "text"}, "text": {"type": "string"}}, ["type", "text"])
    content = {
        "description": 'a text, or an array of {"type": "text", "text": ...}',
        "anyOf": [{"type": "string"}, {"type": "array", "items": part}],
        "examples": ["What is a pipeline?"],
    }
    fields = {
        "role": {"enum": ["system", "developer", "user", "assistant"], "examples": ["user"]},
        "content": content,
        "name": {"type": ["string", "null"]},
    }
    example = [{"role": "user", "content": "What is a pipeline?"}]
    message = _object(fields, ["role", "content"]) | {"examples": example}
    messages = {
        "type": "array",
        "minItems": 1,
        "items": message,
        "description": "the conversation",
        "examples": [example],
    }
    own = {"messages": messages, "max_completion_tokens": _max_tokens(max_tokens)}
    return _schema(model, max_tokens, own, _OF_CHAT)


def _schema(model: str, max_tokens: int, own: dict[str, Any], neutral: dict[str, Any]) -> dict[str, Any]:
    needed = ["model", next(iter(own))]
    shared = {
        "max_tokens": _max_tokens(max_tokens),
        "temperature": _number(0, 2, "divides the scores, by default 1; 0 takes the likeliest token"),
        "top_p": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "maximum": 1,
            "description": "draw from the fewest likeliest tokens whose probabilities add up to this",
            "examples": [0.9],
        },
        "n": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": MAX_ROWS,
            "description": "answers",
            "examples": [1],
        },
        "seed": {
            "type": ["integer", "null"],
            "minimum": 0,
            "maximum": 2**32 - 1,
            "description": "the same seed draws the same tokens",
            "examples": [0],
        },
        "stop": {
            "description": f"a text before which the answer ends, or up to {MAX_STOPS} of them",
            "anyOf": [{"type": "null"}, TEXT, {"type": "array", "maxItems": MAX_STOPS, "items": TEXT}],
            "examples": ["\n"],
        },
        "stream": {"type": ["boolean", "null"], "description": "send events as tokens are drawn", "examples": [True]},
        "stream_options": _object({"include_usage": {"type": "boolean", "examples": [True]}}, [])
        | {"type": ["object", "null"], "examples": [{"include_usage": True}]},
    }
    known = {"model": {"type": "string", "description": "the model's name", "examples": [model]}}
    example = (
        {"model": model} | {name: own[name]["examples"][0] for name in needed[1:]} | {"max_tokens": min(16, max_tokens)}
    )
    return _object(known | own | shared | _NEUTRAL | neutral, needed) | {"examples": [example]}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _number(least: float, most: float, description: str) -> dict[str, Any]:
    bounds = {"minimum": least, "maximum": most}
    return {"type": ["number", "null"], **bounds, "description": description, "examples": [1]}


def _max_tokens(most: int) -> dict[str, Any]:
    bounds = {"minimum": 1, "maximum": most}
    return {"type": ["integer", "null"], **bounds, "description": "the most tokens to add", "examples": [min(16, most)]}
