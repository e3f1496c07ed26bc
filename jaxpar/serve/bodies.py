"""The bodies of requests in the form of OpenAI's API: their fields, and what each may be.

A field of OpenAI's API without effect here is accepted only with a value that changes nothing.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from jaxpar.serve.logprobs import MOST_TOP
from jaxpar.serve.requests import Body

MAX_ROWS = 8  # prompts times n
MAX_STOPS = 4
MAX_CALLS = 128  # of tools, in a message

# fail_fast: a wrong list of many items is one error, not many.
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_ROWS)]
RowsOfTokens = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_ROWS)]
Stop = Annotated[str, Field(min_length=1)]


def _only(*values: Any) -> Any:
    """Returns a field without effect: a client may send it with one of these values, or null."""
    return Field(None, json_schema_extra={"enum": [*values, None]})


def _as_described(cls: type[Body], value: Any, check: Callable[[Any], Any], info: Any) -> Any:
    """Says what a value of several types must be by the field's description, not type by type."""
    try:
        return check(value)
    except ValidationError as error:
        rule = cls.model_fields[info.field_name].description
        raise PydanticCustomError("described", "must be {rule}", {"rule": rule}) from error


class Fields(Body):
    """Fields of OpenAI's API. One without effect here is taken with a value that changes nothing."""

    @field_validator("*")
    @classmethod
    def _changes_nothing(cls, value: Any, info: Any) -> Any:
        more = cls.model_fields[info.field_name].json_schema_extra
        allowed = more.get("enum") if isinstance(more, dict) else None
        if isinstance(allowed, list) and value not in allowed:
            values = " or ".join(map(json.dumps, allowed))
            raise PydanticCustomError("without_effect", "must be {values}", {"values": values})
        return value


class Generation(Fields):
    """What both kinds of requests have."""

    model: str = Field(description="the model's name")
    max_tokens: int | None = Field(
        None, ge=0, description="the most tokens to add; 0: none, which needs echo", examples=[16]
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description="divides the scores, by default 1; 0 takes the likeliest token",
        examples=[1],
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="draw from the fewest tokens that are together as likely as this",
        examples=[0.9],
    )
    n: int | None = Field(None, ge=1, le=MAX_ROWS, description="answers", examples=[1])
    seed: int | None = Field(
        None, ge=0, lt=2**32, description="the same seed draws the same tokens", examples=[0]
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = Field(
        None,
        description=f"a text before which the answer ends, or up to {MAX_STOPS} of them",
        examples=["\n"],
    )
    stream: bool | None = Field(
        None, description="send events as tokens are drawn", examples=[True]
    )
    stream_options: "StreamOptions | None" = Field(None, examples=[{"include_usage": True}])
    user: str | None = None
    frequency_penalty: Any = _only(0)
    presence_penalty: Any = _only(0)
    logit_bias: Any = _only({})
    service_tier: Any = _only("auto", "default")

    _describes_stop = field_validator("stop", mode="wrap")(_as_described)


class StreamOptions(Fields):
    """How a stream ends."""

    include_usage: bool = Field(False, examples=[True])
    include_obfuscation: Any = _only(False)


class CompletionBody(Generation):
    """A body of /v1/completions."""

    prompt: str | Tokens | Texts | RowsOfTokens = Field(
        description=f"a text, tokens, or an array of up to {MAX_ROWS} of either", examples=["def "]
    )
    best_of: Any = _only(1)
    echo: bool | None = Field(None, description="begin the answer with the prompt", examples=[True])
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MOST_TOP,
        description="tell how likely each token is, and so many that are likeliest",
        examples=[1],
    )
    suffix: Any = _only("")

    _describes_prompt = field_validator("prompt", mode="wrap")(_as_described)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Fields):
    """A function that an earlier answer calls."""

    name: str = Field(examples=["weather"])
    arguments: str = Field(description="JSON as text", examples=['{"city": "Paris"}'])


class ToolCall(Fields):
    """A call of a tool in an earlier answer."""

    id: str = Field(examples=["call_1"])
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    """A message of a conversation; those of an earlier answer may have all fields that a client gives them."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(examples=["user"])
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = Field(
        description='a text, or an array of {"type": "text", "text": ...}',
        examples=["What is a pipeline?"],
    )
    name: str | None = None
    refusal: Any = _only()
    annotations: Any = _only([])
    audio: Any = _only()
    function_call: Any = _only()
    tool_calls: list[ToolCall] | None = Field(
        None, max_length=MAX_CALLS, description="the calls of tools in an earlier answer"
    )
    tool_call_id: str | None = Field(None, description="of a tool: the call that it answers")

    @model_validator(mode="before")
    @classmethod
    def _may_call_alone(cls, given: Any) -> Any:
        """Takes calls of tools without a content for those with an empty one, as OpenAI's API does."""
        if isinstance(given, dict) and given.get("tool_calls") and given.get("content") is None:
            return {**given, "content": ""}
        return given

    _describes_content = field_validator("content", mode="wrap")(_as_described)


class ChatBody(Generation):
    """A body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(
        min_length=1,
        fail_fast=True,
        description="the conversation",
        examples=[[{"role": "user", "content": "What is a pipeline?"}]],
    )
    max_tokens: int | None = Field(None, ge=1, description="the most tokens to add", examples=[16])
    max_completion_tokens: int | None = Field(
        None, ge=1, description="the most tokens to add", examples=[16]
    )
    logprobs: Any = _only(False)
    top_logprobs: Any = _only(0)
    tools: Any = _only([])
    tool_choice: Any = _only("none")
    parallel_tool_calls: Any = _only(True, False)
    response_format: Any = _only({"type": "text"})
    modalities: Any = _only(["text"])
    store: Any = _only(False)
    metadata: dict[str, Any] | None = None
