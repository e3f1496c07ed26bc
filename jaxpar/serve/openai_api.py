"""/v1/completions and /v1/chat/completions: from a body to a GenerationRequest, and from the text to the response.

A field of OpenAI's API without effect here is accepted only with a value that changes nothing.
"""

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from jaxpar.huggingface.tokenizer import FolderTokenizer
from jaxpar.serve.language_model import GenerationRequest, LanguageModel, TextDelta
from jaxpar.serve.requests import Body, Endpoint, Reply, RequestError, Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's API has it
LEAST_TEMPERATURE = 0.01  # scores over less overflow; below it the likeliest token is taken
MAX_ROWS = 8  # prompts times n
MAX_STOPS = 4

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
    max_tokens: int | None = Field(None, ge=1, description="the most tokens to add", examples=[16])
    temperature: float | None = Field(
        None, ge=0, le=2, description="divides the scores, by default 1; 0 takes the likeliest token", examples=[1]
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="draw from the fewest tokens that are together as likely as this", examples=[0.9]
    )
    n: int | None = Field(None, ge=1, le=MAX_ROWS, description="answers", examples=[1])
    seed: int | None = Field(None, ge=0, lt=2**32, description="the same seed draws the same tokens", examples=[0])
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = Field(
        None, description=f"a text before which the answer ends, or up to {MAX_STOPS} of them", examples=["\n"]
    )
    stream: bool | None = Field(None, description="send events as tokens are drawn", examples=[True])
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
    echo: Any = _only(False)
    logprobs: Any = _only()
    suffix: Any = _only("")

    _describes_prompt = field_validator("prompt", mode="wrap")(_as_described)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Fields):
    """A message of a conversation; those of an earlier answer may have all fields that a client gives them."""

    role: Literal["system", "developer", "user", "assistant"] = Field(examples=["user"])
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = Field(
        description='a text, or an array of {"type": "text", "text": ...}', examples=["What is a pipeline?"]
    )
    name: str | None = None
    refusal: Any = _only()
    annotations: Any = _only([])
    audio: Any = _only()
    function_call: Any = _only()
    tool_calls: Any = _only([])

    _describes_content = field_validator("content", mode="wrap")(_as_described)


class ChatBody(Generation):
    """A body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(
        min_length=1,
        fail_fast=True,
        description="the conversation",
        examples=[[{"role": "user", "content": "What is a pipeline?"}]],
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="the most tokens to add", examples=[16])
    logprobs: Any = _only(False)
    top_logprobs: Any = _only(0)
    tools: Any = _only([])
    tool_choice: Any = _only("none")
    parallel_tool_calls: Any = _only(True, False)
    response_format: Any = _only({"type": "text"})
    modalities: Any = _only(["text"])
    store: Any = _only(False)
    metadata: dict[str, Any] | None = None


@dataclass
class Completion:
    """The answers to a request, as they are drawn.

    Attributes:
        api: What it is part of.
        request: What the model generates.
        num_prompts: The number of prompts; n answers to each.
        is_chat: Whether the answers are messages.
        is_stream: Whether they are sent in events.
        include_usage: Whether the last event has the numbers of tokens.
    """

    api: "Api"
    request: GenerationRequest
    num_prompts: int
    is_chat: bool
    is_stream: bool
    include_usage: bool
    new_tokens: int = 0
    is_begun: bool = False
    about: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        kind, short = ("chat.completion", "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        kind += ".chunk" if self.is_chat and self.is_stream else ""
        name = f"{short}-{secrets.token_hex(12)}"
        self.about = {"id": name, "object": kind, "created": int(time.time()), "model": self.api.name}

    def work(self) -> Iterator[list[TextDelta]]:
        """Computes the answers, and counts their tokens."""
        self.api.usage["prompt_tokens"] += self.prompt_tokens
        for deltas in self.api.model.answer(self.request):
            count = sum(delta.num_tokens for delta in deltas)
            self.new_tokens += count
            self.api.usage["completion_tokens"] += count
            yield deltas

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompts, each counted once."""
        answers = len(self.request.prompts) // self.num_prompts
        return sum(len(prompt) for prompt in self.request.prompts[::answers])

    def events(self, result: Sequence[TextDelta]) -> list[dict[str, Any]]:
        """Returns an event for each row that has new text or has ended; before the first of a chat, one with the role."""
        choices = []
        if self.is_chat and not self.is_begun:
            begin = {"delta": {"role": "assistant", "content": ""}}
            choices = [_choice(row, begin, None) for row in range(len(self.request.prompts))]
        self.is_begun = True
        for row, text, _, finish in result:
            if text or finish:
                told = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
                choices.append(_choice(row, told, finish))
        usage = {"usage": None} if self.include_usage else {}
        return [self.about | {"choices": [choice]} | usage for choice in choices]

    def last_events(self) -> list[dict[str, Any]]:
        """Returns an event with the usage, if it was asked for."""
        return [self.about | {"choices": [], "usage": self._usage()}] if self.include_usage else []

    def whole(self, results: Sequence[Sequence[TextDelta]]) -> dict[str, Any]:
        """Returns the answers and the usage."""
        texts, finish = [""] * len(self.request.prompts), [""] * len(self.request.prompts)
        for delta in itertools.chain(*results):
            texts[delta.row] += delta.text
            finish[delta.row] = delta.finish or ""
        told = lambda text: {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choices = [_choice(row, told(text), finish[row]) for row, text in enumerate(texts)]
        return self.about | {"choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens}
        return counts | {"total_tokens": sum(counts.values())}


def _choice(row: int, told: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": row, **told, "logprobs": None, "finish_reason": finish}


@dataclass(frozen=True)
class Api:
    """Turns bodies into replies.

    Attributes:
        model: The model.
        name: Its name.
        max_tokens: The most tokens that a request may ask for.
        usage: The tokens so far.
    """

    model: LanguageModel
    name: str
    max_tokens: int
    usage: dict[str, int] = field(default_factory=lambda: {"prompt_tokens": 0, "completion_tokens": 0})

    def example(self, *, is_chat: bool) -> dict[str, Any]:
        """Returns an example of a response."""
        request = GenerationRequest(prompts=[np.zeros(4, np.int32)], max_tokens=16)
        found = Completion(self, request, 1, is_chat, is_stream=False, include_usage=True, new_tokens=16)
        return found.whole([[TextDelta(0, "...", 16, "length")]])

    def reply(self, body: CompletionBody | ChatBody) -> Reply:
        """Returns the reply to a body; raises RequestError for one that cannot be answered."""
        check_name(body.model, self.name)
        count, is_chat = body.n or 1, isinstance(body, ChatBody)
        try:
            prompts = _prompts(self.model, body)
        except ValueError as error:  # also one of the tokenizer or the template
            raise RequestError(400, str(error), param="messages" if is_chat else "prompt") from error
        if len(prompts) * count > MAX_ROWS:
            raise RequestError(
                400,
                f"the prompts times n must be at most {MAX_ROWS}; got {len(prompts)} prompts, n={count}. Send several "
                "requests.",
                param="n",
            )
        if body.stream_options and not body.stream:
            raise RequestError(
                400,
                "stream_options are of a stream; got them without one. Leave them out, or give stream=true.",
                param="stream_options",
            )
        temperature = 1.0 if body.temperature is None else body.temperature
        request = GenerationRequest(
            prompts=[prompt for prompt in prompts for _ in range(count)],
            max_tokens=self._num_tokens(body, max(map(len, prompts))),
            temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=secrets.randbits(32) if body.seed is None else body.seed,
            stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        )
        usage = body.stream_options is not None and body.stream_options.include_usage
        found = Completion(self, request, len(prompts), is_chat, bool(body.stream), usage)
        return Reply(found.work, found.whole, found.events if body.stream else None, found.last_events)

    def _num_tokens(self, body: Generation, longest: int) -> int:
        """Returns the tokens to add to each prompt; raises RequestError where the longest one leaves no room for them."""
        is_chat = isinstance(body, ChatBody)
        name = "max_completion_tokens" if is_chat and body.max_completion_tokens else "max_tokens"
        room = self.model.max_context - longest
        default = max(min(room, self.max_tokens, self.max_tokens if is_chat else DEFAULT_TOKENS), 1)
        tokens = getattr(body, name) or default
        if tokens > self.max_tokens:
            raise RequestError(
                400,
                f"{name} must be at most {self.max_tokens}; got {tokens}. Give such as {min(16, self.max_tokens)}.",
                param=name,
            )
        if tokens > room:
            remedy = f"{name}={room} or less, or cut" if room > 0 else "fewer tokens: cut"
            raise RequestError(
                400,
                f"a prompt and its completion must have at most {self.model.max_context} tokens together; got a prompt of "
                f"{longest} and {name}={tokens}. Give {remedy} the prompt.",
                param="messages" if is_chat else "prompt",
                code="context_length_exceeded",
            )
        return tokens


def check_name(name: str, served: str) -> None:
    """Raises RequestError for a request that names a model other than the one that is served."""
    if name != served:
        message = f"model must be the one that is served; got {ascii(name)[:80]}. Give {served!r}."
        raise RequestError(404, message, param="model", code="model_not_found")


def language_model(model: LanguageModel, name: str, about: str, max_tokens: int) -> Served:
    """Returns the endpoints of a language model.

    Args:
        model: The model.
        name: The name that requests give.
        about: What it is.
        max_tokens: The most tokens that a request may ask for.
    """
    max_tokens = min(max_tokens, model.max_context)
    api = Api(model, name, max_tokens)
    limits = f"At most {max_tokens} tokens are added, to {model.max_context} with the prompt."
    about_chat = "Answers in a conversation." if model.has_chat_template else "Refuses: the model has no chat template."
    asked = {"model": name, "max_tokens": min(16, max_tokens)}
    text = asked | {"prompt": "def "}
    chat = asked | {"messages": [{"role": "user", "content": "What is a pipeline?"}]}
    about_text, of_text, of_chat = "Continues a text.", api.example(is_chat=False), api.example(is_chat=True)
    endpoints = (
        Endpoint(COMPLETIONS, f"{about_text} {limits}", CompletionBody, text, of_text, api.reply),
        Endpoint(CHAT, f"{about_chat} {limits}", ChatBody, chat, of_chat, api.reply),
    )
    first = {"model": name, "prompt": [0], "max_tokens": 1}
    return Served(name, about, endpoints, first, is_language_model=True, usage=api.usage)


def _prompts(model: LanguageModel, body: CompletionBody | ChatBody) -> list[np.ndarray]:
    """Returns the tokens of each prompt of a body; raises ValueError for one that the model cannot continue."""
    if isinstance(body, ChatBody):
        found = [_text(model, _conversation(model, body.messages), begins=False)]
    else:
        is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        many: list[Any] = [body.prompt] if is_one else list(body.prompt)
        found = [_text(model, each) if isinstance(each, str) else np.array(each, np.int64) for each in many]
    for tokens in found:
        if not len(tokens):
            raise ValueError('a prompt must have a token; got "". Give a text.')
        if tokens.max() >= model.config.vocab_size:
            raise ValueError(
                f"tokens must be from 0 to {model.config.vocab_size - 1}; got {tokens.max()}. Give those of the model's "
                "tokenizer."
            )
    return [tokens.astype(np.int32) for tokens in found]


def _text(model: LanguageModel, text: str, *, begins: bool = True) -> np.ndarray:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "text must be Unicode; got half of a surrogate pair, \\ud800 to \\udfff. Send both halves, or UTF-8."
        ) from error
    return model.encode(text, begins=begins)


def _conversation(model: LanguageModel, messages: list[ChatMessage]) -> str:
    """Returns a conversation as text, up to where the assistant's answer begins."""
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, FolderTokenizer) or not tokenizer.has_chat_template:
        raise ValueError(
            f"messages need a chat template, and the model has none; got {len(messages)} messages. Ask {COMPLETIONS}."
        )
    text_of = lambda content: content if isinstance(content, str) else "".join(part.text for part in content)
    told = [{"role": each.role, "content": text_of(each.content)} for each in messages]
    return tokenizer.render(told, ask=True)[0]
