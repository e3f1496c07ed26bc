"""One request at a time: the others wait in order, up to a limit, and what they compute runs in one thread of its own.

    request --ask--> waiting, at most max_waiting --its turn--> next(work) in the thread, a result at a time --> its client

A client that is slow to read delays no one: its results wait in memory. One that goes away, or runs out of time, ends its work
after the current result.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxpar.serve.errors import RequestError

Work = Callable[[], Iterator[Any]]
END = object()
NUM_TIMED = 16  # requests whose times tell when to ask again
MOST_RETRY_SECONDS = 60


class Answer(AsyncIterator[Any]):
    """The results of a request, which waits for its turn from the start. Close it, so that its work ends."""

    def __init__(self, produce: Callable[[asyncio.Queue[Any]], Any]) -> None:
        self._results: asyncio.Queue[Any] = asyncio.Queue()
        self.producer: asyncio.Task[None] = asyncio.ensure_future(produce(self._results))

    async def __anext__(self) -> Any:
        result = await self._results.get()
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
        self._waiting: set[asyncio.Task[None]] = set()
        self.is_running = False

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return len(self._waiting)

    def ask(self, work: Work) -> Answer:
        """Returns the results of a request.

        Args:
            work: Called at the request's turn; the iterator that it returns runs in the thread.

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
        answer = Answer(lambda results: self._produce(work, results))
        self._waiting.add(answer.producer)
        answer.producer.add_done_callback(self._waiting.discard)  # also of one that is cancelled before it begins
        return answer

    def retry_seconds(self) -> int:
        """Returns the estimated seconds until all present requests are answered; by then a new one is accepted."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return int(min(max(mean * (self.num_waiting + 1), 1), MOST_RETRY_SECONDS))

    def stuck_seconds(self) -> float:
        """Returns for how long the thread has been at one result; 0 if it is idle."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    async def _produce(self, work: Work, results: asyncio.Queue[Any]) -> None:
        """Puts the results into a queue, then END or the error."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._in_turn(work, results)
            results.put_nowait(END)
        except TimeoutError:
            results.put_nowait(self._too_late())
        except Exception as error:  # of the work: who reads the results raises it
            results.put_nowait(error)

    async def _in_turn(self, work: Work, results: asyncio.Queue[Any]) -> None:
        async with self._turn:
            self._waiting.remove(_this_task())
            self.is_running, began = True, time.monotonic()
            try:
                await self._compute(work, results)
                self._seconds.append(time.monotonic() - began)
            finally:
                self.is_running = False

    async def _compute(self, work: Work, results: asyncio.Queue[Any]) -> None:
        loop, iterator = asyncio.get_running_loop(), work()
        while (result := await loop.run_in_executor(self._thread, self._next, iterator)) is not END:
            results.put_nowait(result)

    def _next(self, iterator: Iterator[Any]) -> Any:
        self._step_began = time.monotonic()
        try:
            return next(iterator, END)
        finally:
            self._step_began = None

    def _too_late(self) -> RequestError:
        return RequestError(
            503,
            f"a request must be answered within {self._timeout:g} s, with the time that it waits; got one that was not. Ask "
            "for less, or ask again after the seconds in Retry-After.",
            code="timeout",
            retry_after=self.retry_seconds(),
        )

    def close(self) -> None:
        """Lets the thread end; a result that it is at is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
