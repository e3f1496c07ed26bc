"""/v1/completions and /v1/chat/completions: from a body to a GenerationRequest, and from the text to the response."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.huggingface.tokenizer import FolderTokenizer
from jaxpar.serve import openai_schemas
from jaxpar.serve.endpoint import Endpoint, Served
from jaxpar.serve.errors import RequestError
from jaxpar.serve.language_model import GenerationRequest, LanguageModel, TextDelta
from jaxpar.serve.openai_schemas import MAX_ROWS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's API has it
LEAST_TEMPERATURE = 0.01  # scores over less overflow; below it the likeliest token is taken


@dataclass
class Completion:
    """The reply to a request; an ``endpoint.Reply``.

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
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = "chat.completion" if self.is_chat else "text_completion"
        kind += ".chunk" if self.is_chat and self.is_stream else ""
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.about = {"id": name, "object": kind, "created": int(time.time()), "model": self.api.name}
        self._is_begun = False

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
        found = []
        if self.is_chat and not self._is_begun:
            begin = {"role": "assistant", "content": ""}
            found = [self._event(row, {"delta": begin}, None) for row in range(len(self.request.prompts))]
        self._is_begun = True
        for row, text, _, finish in result:
            if text or finish:
                told = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
                found.append(self._event(row, told, finish))
        return found

    def _event(self, row: int, told: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": row, **told, "logprobs": None, "finish_reason": finish}
        return self.about | {"choices": [choice]} | ({"usage": None} if self.include_usage else {})

    def last_events(self) -> list[dict[str, Any]]:
        """Returns an event with the usage, if it was asked for."""
        return [self.about | {"choices": [], "usage": self._usage()}] if self.include_usage else []

    def whole(self, results: Sequence[Sequence[TextDelta]]) -> dict[str, Any]:
        """Returns the answers and the usage."""
        texts, finish = [""] * len(self.request.prompts), [""] * len(self.request.prompts)
        for delta in (delta for deltas in results for delta in deltas):
            texts[delta.row] += delta.text
            finish[delta.row] = delta.finish or ""
        choices = [
            {
                "index": row,
                **({"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}),
                "logprobs": None,
                "finish_reason": finish[row],
            }
            for row, text in enumerate(texts)
        ]
        return self.about | {"choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens}
        return counts | {"total_tokens": sum(counts.values())}


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

    def complete(self, body: dict[str, Any]) -> Completion:
        """Returns the reply to a body of /v1/completions."""
        self._check_name(body)
        return self._reply(body, _prompts(self.model, body["prompt"]), is_chat=False)

    def chat(self, body: dict[str, Any]) -> Completion:
        """Returns the reply to a body of /v1/chat/completions."""
        self._check_name(body)
        return self._reply(body, [_conversation(self.model, body)], is_chat=True)

    def _check_name(self, body: dict[str, Any]) -> None:
        if body["model"] != self.name:
            raise RequestError(
                404,
                f"model must be the one that is served; got {ascii(body['model'])[:80]}. Give {self.name!r}.",
                param="model",
                code="model_not_found",
            )

    def _reply(self, body: dict[str, Any], prompts: list[np.ndarray], *, is_chat: bool) -> Completion:
        count = int(body.get("n") or 1)
        if len(prompts) * count > MAX_ROWS:
            raise RequestError(
                400,
                f"the prompts times n must be at most {MAX_ROWS}; got {len(prompts)} prompts, n={count}. Send several "
                "requests.",
                param="n",
            )
        stop, seed, temperature = body.get("stop") or [], body.get("seed"), body.get("temperature")
        request = GenerationRequest(
            prompts=[prompt for prompt in prompts for _ in range(count)],
            max_tokens=self._num_tokens(body, max(map(len, prompts)), is_chat=is_chat),
            temperature=1.0 if temperature is None else float(temperature) if temperature >= LEAST_TEMPERATURE else 0.0,
            top_p=1.0 if body.get("top_p") is None else float(body["top_p"]),
            seed=secrets.randbits(32) if seed is None else int(seed),
            stop=[stop] if isinstance(stop, str) else stop,
        )
        return Completion(self, request, len(prompts), is_chat, bool(body.get("stream")), _includes_usage(body))

    def _num_tokens(self, body: dict[str, Any], longest: int, *, is_chat: bool) -> int:
        """Returns the tokens to add to each prompt; raises RequestError where the longest one leaves no room for them."""
        room = self.model.max_context - longest
        given = body.get("max_completion_tokens") or body.get("max_tokens")
        tokens = int(given or max(min(room, self.max_tokens if is_chat else DEFAULT_TOKENS), 1))
        if tokens > room:
            remedy = f"max_tokens={room} or less, or cut" if room > 0 else "fewer tokens: cut"
            raise RequestError(
                400,
                f"a prompt and its completion must have at most {self.model.max_context} tokens together; got a prompt of "
                f"{longest} and max_tokens={tokens}. Give {remedy} the prompt.",
                param="messages" if is_chat else "prompt",
                code="context_length_exceeded",
            )
        return tokens


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
    about_chat = "Answers in a conversation." if model.has_chat_template else "Refuses: the model has no chat template."
    text, chat = openai_schemas.completions(name, max_tokens, model.max_context), openai_schemas.chat(name, max_tokens)
    endpoints = (
        Endpoint(COMPLETIONS, "Continues a text.", text, _example(name, is_chat=False), api.complete),
        Endpoint(CHAT, about_chat, chat, _example(name, is_chat=True), api.chat),
    )
    first = {"model": name, "prompt": [0], "max_tokens": 1}
    return Served(name, about, endpoints, first, is_language_model=True, usage=api.usage)


def _includes_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    if options and not body.get("stream"):
        raise RequestError(
            400,
            "stream_options are of a stream; got them without one. Leave them out, or give stream=true.",
            param="stream_options",
        )
    return bool((options or {}).get("include_usage"))


def _prompts(model: LanguageModel, prompt: Any) -> list[np.ndarray]:
    """Returns the tokens of each prompt."""
    many = prompt if isinstance(prompt, list) and not _is_token(prompt[0]) else [prompt]
    found = [_text(model, each) if isinstance(each, str) else np.array(each, np.int64) for each in many]
    for tokens in found:
        if not len(tokens):
            raise RequestError(400, 'a prompt must have a token; got "". Give a text.', param="prompt")
        if tokens.max() >= model.config.vocab_size:
            raise RequestError(
                400,
                f"tokens must be from 0 to {model.config.vocab_size - 1}; got {tokens.max()}. Give those of the model's "
                "tokenizer.",
                param="prompt",
            )
    return [tokens.astype(np.int32) for tokens in found]


def _is_token(value: Any) -> bool:
    return isinstance(value, (int, float))


def _text(model: LanguageModel, text: str, *, begins: bool = True) -> np.ndarray:
    return _refusing(lambda: model.encode(_whole_characters(text), begins=begins), "prompt")


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "text must be Unicode; got half of a surrogate pair, \\ud800 to \\udfff. Send both halves, or UTF-8."
        ) from error
    return text


def _conversation(model: LanguageModel, body: dict[str, Any]) -> np.ndarray:
    """Returns the tokens of a conversation, up to where the assistant's answer begins."""
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, FolderTokenizer) or not tokenizer.has_chat_template:
        raise RequestError(
            400,
            f"messages need a chat template, and the model has none; got {len(body['messages'])} messages. Ask {COMPLETIONS}.",
            param="messages",
        )
    messages = [{"role": each["role"], "content": _content(each["content"])} for each in body["messages"]]
    text, _ = _refusing(lambda: tokenizer.render(messages, ask=True), "messages")
    return _prompts(model, [int(token) for token in _text(model, text, begins=False)])[0]


def _content(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _refusing(make: Callable[[], Any], param: str) -> Any:
    """Returns the result of a tokenizer or template; its errors become errors of the request."""
    try:
        return make()
    except ValueError as error:
        raise RequestError(400, str(error), param=param) from error


def _example(name: str, *, is_chat: bool) -> dict[str, Any]:
    told = {"message": {"role": "assistant", "content": "..."}} if is_chat else {"text": "..."}
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-0123456789abcdef01234567",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1767225600,
        "model": name,
        "choices": [{"index": 0, **told, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20},
    }
