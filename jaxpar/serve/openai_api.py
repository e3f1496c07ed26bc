"""/v1/completions and /v1/chat/completions: from a body to a GenerationRequest, and from the text to the response."""

import itertools
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jaxpar.data.left_out import roles_left_out
from jaxpar.data.tool_arguments import takes_objects, with_arguments_read
from jaxpar.huggingface.tokenizer import FolderTokenizer
from jaxpar.runtime.output import tell
from jaxpar.serve.bodies import MAX_ROWS, ChatBody, ChatMessage, CompletionBody, Generation
from jaxpar.serve.language_model import GenerationRequest, LanguageModel, TextDelta
from jaxpar.serve.logprobs import Echo, echo_of, logprobs
from jaxpar.serve.requests import Endpoint, Reply, RequestError, Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_UNWRITTEN_NAME = (
    "the name of a message needs a chat template that writes names; got {!r}. Leave it out."
)
QUESTION = {"role": "user", "content": "What is a pipeline?"}
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's API has it
LEAST_TEMPERATURE = 0.01  # scores over less overflow; below it the likeliest token is taken


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
        echoes: Each prompt, where the answer begins with it.
        num_top: The likeliest tokens to tell of each token; None: nothing is told.
    """

    api: "Api"
    request: GenerationRequest
    num_prompts: int
    is_chat: bool
    is_stream: bool
    include_usage: bool
    echoes: Sequence[Echo] | None = None
    num_top: int | None = None
    new_tokens: int = 0
    is_begun: bool = False
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        kind, short = (
            ("chat.completion", "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        )
        kind += ".chunk" if self.is_chat and self.is_stream else ""
        name = f"{short}-{secrets.token_hex(12)}"
        self.about = {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": self.api.name,
        }

    def work(self) -> Iterator[list[TextDelta]]:
        """Computes the answers, and counts their tokens."""
        self.api.usage["prompt_tokens"] += self.prompt_tokens
        rows = [prompt.tolist() for prompt in self.request.prompts]
        for deltas in self.api.model.answer(self.request) if self.request.max_tokens else ():
            count = sum(delta.num_tokens for delta in deltas)
            self.new_tokens += count
            self.api.usage["completion_tokens"] += count
            for delta in deltas:
                rows[delta.row] += [] if delta.token is None else [delta.token]
            yield deltas
        if self.num_top is not None:
            self.logprobs = self._logprobs(rows, self.num_top)

    def _logprobs(self, rows: Sequence[list[int]], num_top: int) -> list[dict[str, Any]]:
        model, prompts = self.api.model, self.request.prompts
        scores = model.score([np.array(row, np.int32) for row in rows], max(num_top, 1))
        told = zip(rows, scores, map(len, prompts), self.echoes or [None] * len(rows), strict=True)
        return [
            logprobs(
                model.tokenizer, row, of_row, num_prompt=num_prompt, num_top=num_top, echo=echo
            )
            for row, of_row, num_prompt, echo in told
        ]

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
        for row, text, _, finish, _ in result:
            if text or finish:
                told = (
                    {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
                )
                choices.append(_choice(row, told, finish))
        usage = {"usage": None} if self.include_usage else {}
        return [self.about | {"choices": [choice]} | usage for choice in choices]

    def last_events(self) -> list[dict[str, Any]]:
        """Returns an event with the usage, if it was asked for."""
        return [self.about | {"choices": [], "usage": self._usage()}] if self.include_usage else []

    def whole(self, results: Sequence[Sequence[TextDelta]]) -> dict[str, Any]:
        """Returns the answers and the usage."""
        count = len(self.request.prompts)
        texts = [echo.text for echo in self.echoes] if self.echoes else [""] * count
        finish = ["length"] * count
        for delta in itertools.chain(*results):
            texts[delta.row] += delta.text
            finish[delta.row] = delta.finish or ""
        told = lambda text: (
            {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        )
        choices = [
            _choice(row, told(text), finish[row], self.logprobs) for row, text in enumerate(texts)
        ]
        return self.about | {"choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens}
        return counts | {"total_tokens": sum(counts.values())}


def _choice(
    row: int, told: dict[str, Any], finish: str | None, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {
        "index": row,
        **told,
        "logprobs": logprobs[row] if logprobs else None,
        "finish_reason": finish,
    }


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
    usage: dict[str, int] = field(
        default_factory=lambda: {"prompt_tokens": 0, "completion_tokens": 0}
    )

    def example(self, *, is_chat: bool) -> dict[str, Any]:
        """Returns an example of a response."""
        request = GenerationRequest(prompts=[np.zeros(4, np.int32)], max_tokens=16)
        found = Completion(
            self, request, 1, is_chat, is_stream=False, include_usage=True, new_tokens=16
        )
        return found.whole([[TextDelta(0, "...", 16, "length")]])

    def reply(self, body: CompletionBody | ChatBody) -> Reply:
        """Returns the reply to a body; raises RequestError for one that cannot be answered."""
        check_name(body.model, self.name)
        count, is_chat = body.n or 1, isinstance(body, ChatBody)
        try:
            prompts = _prompts(self.model, body)
        except ValueError as error:  # also one of the tokenizer or the template
            raise RequestError(
                400, str(error), param="messages" if is_chat else "prompt"
            ) from error
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
        echoes, num_top = _of_prompts(self.model, body, prompts)
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
        echoes = echoes and [echo for echo in echoes for _ in range(count)]
        found = Completion(
            self, request, len(prompts), is_chat, bool(body.stream), usage, echoes, num_top
        )
        return Reply(
            found.work, found.whole, found.events if body.stream else None, found.last_events
        )

    def _num_tokens(self, body: Generation, longest: int) -> int:
        """Returns the tokens to add to each prompt; raises RequestError where the longest one leaves no room for them."""
        is_chat = isinstance(body, ChatBody)
        name = "max_completion_tokens" if is_chat and body.max_completion_tokens else "max_tokens"
        if name != "max_tokens" and body.max_tokens not in (None, getattr(body, name)):
            raise RequestError(
                400,
                f"max_tokens and {name} are two names of one number; got {body.max_tokens} and {getattr(body, name)}. Give one "
                "of them.",
                param=name,
            )
        room = self.model.max_context - longest
        default = max(min(room, self.max_tokens, self.max_tokens if is_chat else DEFAULT_TOKENS), 1)
        asked = getattr(body, name)
        tokens = default if asked is None else asked
        if tokens == 0 and not getattr(body, "echo", None):
            raise RequestError(
                400,
                f"{name} must be at least 1 without echo; got 0. Give such as 16, or echo=true.",
                param=name,
            )
        if tokens > self.max_tokens:
            raise RequestError(
                400,
                f"{name} must be at most {self.max_tokens}; got {tokens}. Give such as {min(16, self.max_tokens)}.",
                param=name,
            )
        if tokens > room:
            remedy = f"Give {name}={room} or less, or cut" if room > 0 else "Cut"
            got = f"a prompt of {longest}" + ("" if asked is None else f" and {name}={tokens}")
            raise RequestError(
                400,
                f"a prompt and its completion must have at most {self.model.max_context} tokens together; got {got}. {remedy} "
                "the prompt.",
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
    if (size := model.tokenizer.vocab_size) > model.config.vocab_size:
        tell(
            f"the tokenizer has {size:,} tokens and the model {model.config.vocab_size:,}: texts with one of the others are "
            "refused. Enlarge the embedding of the model, by model.resize_token_embeddings(...) of transformers."
        )
    refusal = _refusal_of_question(model)
    if refusal and model.has_chat_template:
        tell(f"{CHAT} refuses a message of the user: {refusal}")
    about_chat = f"Refuses: {refusal}" if refusal else "Answers in a conversation."
    asked = {"model": name, "max_tokens": min(16, max_tokens)}
    text = asked | {"prompt": "def "}
    chat = asked | {"messages": [QUESTION]}
    about_text, of_text, of_chat = (
        "Continues a text.",
        api.example(is_chat=False),
        api.example(is_chat=True),
    )
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
        found = [
            _text(model, each) if isinstance(each, str) else np.array(each, np.int64)
            for each in many
        ]
    for tokens in found:
        if not len(tokens):
            raise ValueError('a prompt must have a token; got "". Give a text.')
        if tokens.max() >= model.config.vocab_size:
            rule = f"tokens must be from 0 to {model.config.vocab_size - 1}; got {tokens.max()}"
            remedy = "Give those of the model's tokenizer."
            if tokens.max() < model.tokenizer.vocab_size:
                remedy = "The model has no embedding of this token of its tokenizer: give a text without it."
            raise ValueError(f"{rule}. {remedy}")
    return [tokens.astype(np.int32) for tokens in found]


def _of_prompts(
    model: LanguageModel, body: CompletionBody | ChatBody, prompts: Sequence[np.ndarray]
) -> tuple[list[Echo] | None, int | None]:
    """Returns the prompts, where the answer begins with them, and how many likeliest tokens are told."""
    if isinstance(body, ChatBody) or not (body.echo or body.logprobs is not None):
        return None, None
    if body.stream:
        raise RequestError(
            400,
            "echo and logprobs are of a whole answer; got one of them with stream=true. Leave stream out.",
            param="stream",
        )
    asked = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    given: list[Any] = list(asked) if isinstance(asked[0], str) else [None] * len(prompts)
    echoes = (
        [echo_of(model.tokenizer, *both) for both in zip(given, prompts, strict=True)]
        if body.echo
        else None
    )
    return echoes, body.logprobs


def _text(model: LanguageModel, text: str, *, begins: bool = True) -> np.ndarray:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "text must be Unicode; got half of a surrogate pair, \\ud800 to \\udfff. Send both halves, or UTF-8."
        ) from error
    return model.encode(text, begins=begins)


def _refusal_of_question(model: LanguageModel) -> str:
    """Returns why a conversation of one question is refused, as by a template that asks for the day; "" if it is not."""
    if not model.has_chat_template:
        return "the model has no chat template."
    try:
        _prompts(model, ChatBody.model_validate({"model": "", "messages": [QUESTION]}))
    except (ValueError, RequestError) as error:
        return str(error)
    return ""


def _conversation(model: LanguageModel, messages: list[ChatMessage]) -> str:
    """Returns a conversation as text, up to where the assistant's answer begins."""
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, FolderTokenizer) or not tokenizer.has_chat_template:
        raise ValueError(
            f"messages need a chat template, and the model has none; got {len(messages)} messages. Ask {COMPLETIONS}."
        )
    text_of = lambda content: (
        content if isinstance(content, str) else "".join(part.text for part in content)
    )
    told = [{"role": each.role, "content": text_of(each.content)} for each in messages]
    for message, given in zip(told, messages, strict=True):
        message |= _name(tokenizer, given.name) | _of_tools(tokenizer, given)
    if any("tool_calls" in each for each in told) and takes_objects(
        partial(tokenizer.render, ask=True)
    ):
        told = [*map(with_arguments_read, told)]
    text = tokenizer.render(told, ask=True)[0]
    _check_names(tokenizer, told, text)
    if text:  # else the prompt has no token, which is refused
        _check_told(told, text)
    return text


def _name(tokenizer: FolderTokenizer, name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    if not tokenizer.uses("name"):
        raise ValueError(_UNWRITTEN_NAME.format(name[:80]))
    return {"name": name}


def _check_names(
    tokenizer: FolderTokenizer, messages: Sequence[Mapping[str, Any]], text: str
) -> None:
    """Raises ValueError if the names of messages change nothing in the text, as where a template writes those of functions."""
    names = [each["name"] for each in messages if "name" in each]
    without = [
        {field: value for field, value in each.items() if field != "name"} for each in messages
    ]
    try:
        is_written = not any(names) or tokenizer.render(without, ask=True)[0] != text
    except ValueError:  # the template needs them
        return
    if not is_written:
        raise ValueError(_UNWRITTEN_NAME.format(names[0][:80]))


def _of_tools(tokenizer: FolderTokenizer, message: ChatMessage) -> dict[str, Any]:
    """Returns the calls of tools in a message, or the call that it answers, as training gives them to the template."""
    if message.tool_calls and message.role != "assistant":
        raise ValueError(
            f"an answer of the assistant alone calls tools; got tool_calls in a message of the role {message.role!r}. Leave "
            "them out, or correct the role."
        )
    if message.tool_calls and not tokenizer.uses("tool_calls"):
        raise ValueError(
            'tool_calls need a chat template that writes them; got one without "tool_calls". Leave the calls out with what '
            "the tools returned, or give both as text."
        )
    found: dict[str, Any] = {}
    if message.tool_calls:
        found["tool_calls"] = [each.model_dump() for each in message.tool_calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _check_told(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raises ValueError where a chat template does not write a message that the model is told; those of tools as JSON, too."""
    of_others = [dict(message) for message in messages if message["role"] != "assistant"]
    for message in (each for each in of_others if each["role"] == "tool"):
        as_json = json.dumps(message["content"], ensure_ascii=False)[1:-1]
        if message["content"].strip() not in text and as_json in text:
            message["content"] = as_json
    if left_out := roles_left_out(of_others, text):
        raise ValueError(
            "the model's chat template must write what it is told; got a message of the role "
            f"{left_out[0]!r} that it leaves out or changes. Give its text in a message of the user."
        )
