"""One HTTP request: its body, read within limits, and its response, cancelled when the client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxpar.serve.endpoint import Reply
from jaxpar.serve.errors import RequestError
from jaxpar.serve.worker import Answer

Result = TypeVar("Result")
READ_SECONDS = 20.0
MOST_DISCARDED_BYTES = 16 * 2**20  # of a body that is too large, so that its sender reads the error
CLIENT_GONE = 499  # the status in the metrics; nobody receives it


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body of a request; raises RequestError if it is not JSON, too large or too slow."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            415,
            f"a body must be sent as application/json; got {ascii(kind)[:60]}. Add the header Content-Type: application/json.",
        )
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise RequestError(
            408, f"a body must arrive within {READ_SECONDS:g} s; got one that did not. Send it again."
        ) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    told = int(length) if length.isdecimal() else 0
    body, count = bytearray(), 0
    if told <= MOST_DISCARDED_BYTES:
        async for chunk in request.stream():
            count += len(chunk)
            if count > MOST_DISCARDED_BYTES:
                break
            body.extend(chunk if count <= max_bytes else b"")
    if max(count, told) > max_bytes:
        raise RequestError(
            413, f"a body must have at most {max_bytes} bytes; got {max(count, told)}. Send less, or several requests."
        )
    return bytes(body)


async def whole(request: Request, reply: Reply, answer: Answer) -> Response:
    """Returns the response to a request once it is computed."""
    try:
        return JSONResponse(reply.whole(await _unless_gone(request, answer.all())))
    finally:
        answer.close()


async def streamed(request: Request, reply: Reply, answer: Answer) -> Response:
    """Returns a response of server-sent events; an error before the first one is an error of the request."""
    try:
        first = await _unless_gone(request, anext(answer))
    except BaseException:
        answer.close()
        raise
    return _Stream(reply, first, answer)


class _Stream(StreamingResponse):
    """A response of server-sent events, which ends the work when its client goes away."""

    def __init__(self, reply: Reply, first: Any, answer: Answer) -> None:
        headers = {
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }  # the latter for nginx, which would hold events back
        super().__init__(_events(reply, first, answer), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _events(reply: Reply, first: Any, answer: Answer) -> AsyncIterator[str]:
    for event in reply.events(first):
        yield _event(event)
    try:
        async for result in answer:
            for event in reply.events(result):
                yield _event(event)
        for event in reply.last_events():
            yield _event(event)
    except RequestError as error:  # the status has been sent
        yield _event(error.body())
    except Exception:
        yield _event(RequestError(500, INTERNAL).body())
        raise
    yield "data: [DONE]\n\n"


INTERNAL = "a request must not fail; got an error in the server, which its log shows. Tell who runs it."


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _unless_gone(request: Request, result: Coroutine[Any, Any, Result]) -> Result:
    """Returns a result; raises ClientGoneError if the client goes away before."""
    tasks = asyncio.ensure_future(result), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGoneError
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
