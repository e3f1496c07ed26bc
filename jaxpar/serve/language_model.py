"""A language model that generates the rows of one request together, token by token (`transformer.stream`).

The text of a row while it grows (``TextStream``) has complete characters only, and nothing of a stop string.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxpar.data.text import Tokenizer
from jaxpar.models.transformer import TokenScores, TransformerConfig, score_tokens, stream
from jaxpar.models.transformer.generate import next_power_of_two, round_up

MAX_SHAPES = 64  # shapes of requests whose programs are kept
# Tokens of the prompt that are decoded with the first new ones, since a tokenizer may put spaces between tokens.
CONTEXT = 6
INCOMPLETE = "\ufffd"  # what a tokenizer makes of part of a character
Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The prompts of one request, and how to continue them.

    Attributes:
        prompts: int32 [length], the tokens of each row.
        max_tokens: The most tokens to add to a row.
        temperature: Divides the scores; 0 takes the likeliest token.
        top_p: Draw from the fewest likeliest tokens whose probabilities add up to this.
        seed: Determines what is drawn.
        stop: Texts before which a row ends.
    """

    prompts: Sequence[np.ndarray]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()


class TextDelta(NamedTuple):
    """What a step adds to a row: text, the number of tokens, why the row has ended, if it has, and the token."""

    row: int
    text: str
    num_tokens: int
    finish: Finish | None
    token: int | None = None


class LanguageModel:
    """A model with its tokenizer; its methods but ``answer`` may be called in any thread.

    Args:
        config: The model.
        params: Its params.
        tokenizer: Its tokenizer.
        eos: The tokens that end a text. Those that the model's vocabulary lacks, which it cannot write, are left out.
        max_context: The tokens of a prompt and its completion together.
    """

    def __init__(
        self,
        config: TransformerConfig,
        params: Any,
        tokenizer: Tokenizer,
        eos: Sequence[int],
        max_context: int,
    ) -> None:
        self.config, self.tokenizer, self.max_context = (
            config,
            tokenizer,
            min(max_context, config.max_positions),
        )
        self._params, self._eos = params, tuple(token for token in eos if token < config.vocab_size)
        self._shapes: set[tuple[Any, ...]] = set()

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return getattr(self.tokenizer, "has_chat_template", False)

    def encode(self, text: str, *, begins: bool = True) -> np.ndarray:
        """Returns a text as int32 tokens [length]; ``begins``: with those that the tokenizer puts at the beginning of one."""
        tokens, _ = self.tokenizer.encode_prompt(text, begins=begins)
        return np.asarray(tokens, np.int32)

    def answer(self, request: GenerationRequest) -> Iterator[list[TextDelta]]:
        """Yields what each step adds to the rows, until all have ended.

        Raises:
            FloatingPointError: The model's scores are not finite.
        """
        self._bound_programs(request)
        rows = {
            i: TextStream(self.tokenizer, prompt, request.stop)
            for i, prompt in enumerate(request.prompts)
        }
        prompts = _padded(request.prompts)
        drawn: dict[str, Any] = {"temperature": request.temperature, "top_p": request.top_p}
        key = jax.random.key(request.seed)
        steps = stream(
            self.config, self._params, prompts, request.max_tokens, key=key, eos=self._eos, **drawn
        )
        for count, tokens in enumerate(steps, 1):
            is_last = count == request.max_tokens
            deltas = [self._delta(i, row, tokens[i], is_last=is_last) for i, row in rows.items()]
            yield deltas
            rows = {delta.row: rows[delta.row] for delta in deltas if delta.finish is None}
            if not rows:
                return

    def _delta(self, i: int, row: "TextStream", token: int | None, *, is_last: bool) -> TextDelta:
        is_end = token is None or token in self._eos
        text = "" if token is None or is_end else row.add(token)
        if is_end or is_last:
            text += row.end()
        finish: Finish | None = (
            "stop" if is_end or row.is_stopped else "length" if is_last else None
        )
        return TextDelta(i, text, int(token is not None), finish, token)

    def score(self, rows: Sequence[np.ndarray], num_top: int) -> list[TokenScores]:
        """Returns how likely the tokens of each row are after those before them, and the likeliest in each place.

        Raises:
            FloatingPointError: The model's scores are not finite.
        """
        self._bound("scores", len(_padded(rows)), round_up(max(map(len, rows)), None))
        return score_tokens(self.config, self._params, _padded(rows), num_top=num_top)[: len(rows)]

    def _bound_programs(self, request: GenerationRequest) -> None:
        rows, longest = len(_padded(request.prompts)), max(map(len, request.prompts))
        lengths = (
            round_up(each, None)
            for each in (longest, longest + request.max_tokens, request.max_tokens)
        )
        self._bound(rows, *lengths, request.temperature == 0, request.top_p == 1)

    def _bound(self, *shape: Any) -> None:
        """Drops all compiled programs once requests have had many shapes: programs are kept in memory."""
        if len(self._shapes) >= MAX_SHAPES and shape not in self._shapes:
            jax.clear_caches()
            self._shapes.clear()
        self._shapes.add(shape)


def _padded(prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns prompts with the first repeated up to a power of two, so that all numbers of rows share a few programs."""
    count = next_power_of_two(len(prompts))
    return [*prompts, *[prompts[0]] * (count - len(prompts))]


class TextStream:
    """The text that new tokens add to a prompt, in pieces.

    Args:
        tokenizer: Turns tokens into text.
        prompt: The tokens of the prompt.
        stop: Texts before which the row ends.
        special: Whether special tokens have a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] | np.ndarray,
        stop: Sequence[str] = (),
        *,
        special: bool = False,
    ) -> None:
        self._tokenizer, self._stop, self._special = tokenizer, tuple(stop), special
        self._tokens = [int(token) for token in prompt[-CONTEXT:]]
        self._num_read = len(
            self._tokens
        )  # the tokens whose text was returned; they are kept to decode the next ones
        self._held = ""  # text that may be the beginning of a stop string
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Returns the text that is complete with one more token; "" if there is none."""
        self._tokens.append(token)
        return self._until_stop(self._decode(at_end=False))

    def end(self) -> str:
        """Returns the rest of the text, once the row has ended."""
        text = self._until_stop(self._decode(at_end=True))
        rest, self._held = self._held, ""
        return text if self.is_stopped else text + rest

    def _decode(self, *, at_end: bool) -> str:
        """Returns the text that was not returned yet; "" if it ends within a character of several bytes."""
        before, text = (self._text(self._tokens[:end]) for end in (self._num_read, None))
        old = _shared(before, text)  # not all of before, if the prompt ends within a character
        if len(text) == old or (text.endswith(INCOMPLETE) and not at_end):
            return ""
        self._tokens = self._tokens[self._num_read :]
        self._num_read = len(self._tokens)
        return text[old:]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(np.array(tokens, np.int64), special=self._special)

    def _until_stop(self, text: str) -> str:
        """Returns text up to the first stop string, and holds back what may be the beginning of one."""
        if self.is_stopped:
            return ""
        text = self._held + text
        if found := [at for at in map(text.find, self._stop) if at >= 0]:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _shared(one: str, other: str) -> int:
    """Returns the number of characters with which both texts begin."""
    both = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of a text that is a beginning of a stop string, not all of it."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
