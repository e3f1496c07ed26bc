"""A request: how its body is read, the error that refuses it, the endpoint that it asks, and its turn to be computed.

    request --ask--> waiting, at most max_waiting --its turn--> next(work) in the thread, a result at a time --> its client

One request is computed at a time, in one thread of its own; the others wait in order, up to a limit. A client that is slow to
read delays no one: its results wait in memory. One that goes away, or runs out of time, ends its work after the current result.
"""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from jaxpar import fields

if TYPE_CHECKING:
    from starlette.requests import Request

Work = Callable[[], Iterator[Any]]
READ_SECONDS = 20.0
MOST_DISCARDED_BYTES = 16 * 2**20  # of a body that is too large, so that its sender reads the error
MAX_KEYS = 4096  # of an object
MAX_DIGITS_SHOWN = 24
END = object()
NUM_TIMED = 16  # requests whose times tell when to ask again
MOST_RETRY_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The limits of a server, for all clients together, and the names that it answers to: flags of `python -m jaxpar serve`.

    Attributes:
        max_waiting: Requests that may wait while one is computed; those beyond get 503.
        max_body_bytes: Size of a request's body.
        timeout_seconds: Seconds to answer a request, including its wait; after that it gets 503. Stopping takes at most 5 s
            longer.
        allowed_hosts: Names of this server that a request's Host may have, * for any. Without it: any, at a loopback address
            localhost, 127.0.0.1 and [::1].
    """

    max_waiting: Annotated[int, Field(ge=0, lt=2**31)] = 16
    max_body_bytes: Annotated[int, Field(ge=1, lt=2**31)] = 2**20
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fields.check(self, "Leave it out for the default.")


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: The HTTP status.
        message: The rule, the value and the remedy.
        param: The field of the body that is wrong, if it is one.
        code: A word for programs, such as ``model_not_found``.
        retry_after: Seconds after which to ask again; None: asking again does not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """Returns the body of the response, in the form of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def headers(self) -> dict[str, str]:
        """Returns the headers of the response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


async def read_body(request: "Request", max_bytes: int) -> bytes:
    """Returns the body of a request; raises RequestError if it is not JSON, too large or too slow."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            415,
            f"a body must be sent as application/json; got {ascii(kind)[:60]}. Add the header Content-Type: application/json.",
        )
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        raise RequestError(
            415,
            f"a body must be sent as it is; got Content-Encoding {ascii(coding)[:60]}. Send it uncompressed.",
        )
    length = request.headers.get("content-length", "0")
    told = int(length) if length.isdecimal() else 0
    body, count = bytearray(), 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            if told <= MOST_DISCARDED_BYTES:
                async for chunk in request.stream():
                    count += len(chunk)
                    if count > MOST_DISCARDED_BYTES:
                        break
                    body.extend(chunk if count <= max_bytes else b"")
    except TimeoutError:
        raise RequestError(
            408,
            f"a body must arrive within {READ_SECONDS:g} s; got one that did not. Send it again.",
        ) from None
    if max(count, told) > max_bytes:
        raise RequestError(
            413,
            f"a body must have at most {max_bytes} bytes; got {max(count, told)}. Send less, or several requests.",
        )
    return bytes(body)


def parse(body: bytes) -> Any:
    """Returns the value in a body; raises RequestError unless it is JSON of finite numbers, each key once."""
    try:
        return json.loads(
            body.decode(),
            parse_constant=_no_number,
            parse_float=_number,
            parse_int=_number,
            object_pairs_hook=_once,
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(
            400,
            f"a body must be JSON in UTF-8, with finite numbers and each key once; got {len(body)} bytes that are not: "
            f"{fields.brief(str(error) or 'too deep')}. Correct it; /docs has examples.",
        ) from error


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _number(text: str) -> float:
    """Returns a number; an int if it is a whole one, since JSON has one kind of numbers."""
    value = float(text)
    if not math.isfinite(value):
        shown = text if len(text) <= MAX_DIGITS_SHOWN else f"{text[:MAX_DIGITS_SHOWN]}..."
        raise ValueError(f"{shown} is out of range, beyond 1.8e308")
    if text.removeprefix("-").isdecimal():
        return int(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    if len(found) > MAX_KEYS:  # each unknown one would be an error of its own
        raise ValueError(f"an object has more than {MAX_KEYS} keys")
    return found


class Body(BaseModel):
    """The JSON body of a request: no value is converted, and no unknown field is taken."""

    model_config = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Reply:
    """The reply to one request whose body is right.

    Attributes:
        work: Returns an iterator over the results, which computes them: it runs in the worker's thread.
        whole: Returns the body of a response that is no stream.
        events: Returns the events that a result adds to a stream; None: the reply is no stream.
        last_events: Returns the events at the end of a stream.
    """

    work: Work
    whole: Callable[[Sequence[Any]], dict[str, Any]]
    events: Callable[[Any], Sequence[dict[str, Any]]] | None = None
    last_events: Callable[[], Sequence[dict[str, Any]]] = tuple


@dataclass(frozen=True)
class Endpoint:
    """A path that takes POST.

    Attributes:
        path: The path.
        summary: A sentence about it.
        body: What is asked.
        example: A body, to be shown.
        response: Its response.
        make_reply: Returns the reply to a body; raises RequestError for one that cannot be answered.
    """

    path: str
    summary: str
    body: type[Body]
    example: dict[str, Any]
    response: dict[str, Any]
    make_reply: Callable[[Any], Reply]


@dataclass(frozen=True)
class Served:
    """A model as it is served.

    Attributes:
        name: Its name.
        about: What it is.
        endpoints: What it offers.
        first: A body for the first endpoint, computed before the model is ready, so that its program is compiled.
        is_language_model: Whether it is listed under /v1/models.
        usage: Counts of what was computed so far, by kind, for the metrics.
    """

    name: str
    about: str
    endpoints: tuple[Endpoint, ...]
    first: dict[str, Any]
    is_language_model: bool = False
    usage: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer(AsyncIterator[Any]):
    """The results of a request, which waits for its turn from the start. Close it, so that its work ends.

    Attributes:
        results: Where its results are put, then END or an error.
        producer: What puts them there.
    """

    results: asyncio.Queue[Any]
    producer: asyncio.Task[None]

    async def __anext__(self) -> Any:
        result = await self.results.get()
        if result is END:
            raise StopAsyncIteration
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Ends the work after its current result."""
        self.producer.cancel()

    async def all(self) -> list[Any]:
        """Returns all results."""
        return [result async for result in self]


class Worker:
    """Computes one request at a time; all but the work itself runs in the event loop.

    Args:
        max_waiting: The requests that may wait.
        timeout_seconds: The most seconds that a request may wait and be computed, together.
    """

    def __init__(self, max_waiting: int, timeout_seconds: float) -> None:
        self._max_waiting, self._timeout = max_waiting, timeout_seconds
        self._turn = asyncio.Lock()  # first come, first served
        self._thread = ThreadPoolExecutor(1, "jaxpar-serve")
        self._seconds: deque[float] = deque(maxlen=NUM_TIMED)
        self._step_began: float | None = None
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self.is_running = False

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return len(self._waiting)

    def ask(self, work: Work, *, is_timed: bool = True) -> Answer:
        """Returns the results of a request.

        Args:
            work: Called at the request's turn; the iterator that it returns runs in the thread.
            is_timed: Whether it may take ``timeout_seconds`` at most. The first one, which compiles, may take longer.

        Raises:
            RequestError: 503, too many wait; also from the iterator, after ``timeout_seconds``.
        """
        if self.num_waiting + self.is_running > self._max_waiting:
            raise RequestError(
                503,
                f"at most {self._max_waiting} requests may wait, since one is computed at a time; got one more. Ask again "
                "after the seconds in Retry-After.",
                code="overloaded",
                retry_after=self.retry_seconds(),
            )
        results: asyncio.Queue[Any] = asyncio.Queue()
        answer = Answer(results, asyncio.ensure_future(self._produce(work, results, is_timed)))
        self._waiting.add(answer.producer)
        answer.producer.add_done_callback(
            self._waiting.discard
        )  # also of one that is cancelled before it begins
        return answer

    def retry_seconds(self) -> int:
        """Returns the estimated seconds until all present requests are answered; by then a new one is accepted."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return int(min(max(mean * (self.num_waiting + 1), 1), MOST_RETRY_SECONDS))

    def stuck_seconds(self) -> float:
        """Returns for how long the thread has been at one result; 0 if it is idle."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    async def _produce(self, work: Work, results: asyncio.Queue[Any], is_timed: bool) -> None:
        """Puts the results into a queue, then END or the error."""
        try:
            async with asyncio.timeout(self._timeout if is_timed else None), self._turn:
                self._waiting.discard(asyncio.current_task())
                await self._compute(work, results)
            results.put_nowait(END)
        except TimeoutError:
            message = (
                f"a request must be answered within {self._timeout:g} s, with the time that it waits; got one that was not. "
                "Ask for less, or ask again after the seconds in Retry-After."
            )
            results.put_nowait(
                RequestError(503, message, code="timeout", retry_after=self.retry_seconds())
            )
        except Exception as error:  # of the work: who reads the results raises it
            results.put_nowait(error)

    async def _compute(self, work: Work, results: asyncio.Queue[Any]) -> None:
        self.is_running, began = True, time.monotonic()
        try:
            loop, iterator = asyncio.get_running_loop(), work()
            while (
                result := await loop.run_in_executor(self._thread, self._next, iterator)
            ) is not END:
                results.put_nowait(result)
            self._seconds.append(time.monotonic() - began)
        finally:
            self.is_running = False

    def _next(self, iterator: Iterator[Any]) -> Any:
        self._step_began = time.monotonic()
        try:
            return next(iterator, END)
        finally:
            self._step_began = None

    def close(self) -> None:
        """Lets the thread end; a result that it is at is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
