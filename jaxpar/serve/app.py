"""The paths of a server, as an ASGI application: FastAPI checks bodies and describes the interface, /openapi.json and /docs.

A refused request gets 4xx, or 503 with Retry-After; a failure of the server gets 500. /healthz and /readyz answer 200 or 503.
"""

import asyncio
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any, TypeVar

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.types import Message, Receive, Scope, Send

import jaxpar
from jaxpar import fields
from jaxpar.runtime.host_names import allowed_hosts, is_allowed
from jaxpar.serve.pages import ServerMetrics, docs_page
from jaxpar.serve.requests import (
    Answer,
    Endpoint,
    Reply,
    RequestError,
    Served,
    Settings,
    Worker,
    parse,
    read_body,
    unknown_model,
)

Result = TypeVar("Result")
MAX_OPEN = 256  # requests at a time, those whose bodies are being read among them
STUCK_SECONDS = 600.0  # for one token or prediction, with the time to compile
RETRY_ELSEWHERE = 2  # seconds; another pod may answer
CLIENT_GONE = 499  # the status in the metrics; nobody receives it
INTERNAL = "a request must not fail; got an error in the server, which its log shows. Tell who runs it."
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
REMEDIES = {"extra_forbidden": "Leave it out, or correct its name.", "without_effect": "Leave it out."}
ERRORS = {
    400: "The body is wrong.",
    404: "There is no such path or model.",
    405: "The path does not take this method: Allow names those that it takes.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    421: "The Host is not a name of this server.",
    500: "The server failed, or the model's scores are not finite.",
    503: "Too many requests wait, time ran out, or the server is about to stop: Retry-After says when to ask again.",
}


class Problem(BaseModel):
    """What is wrong with a request, as OpenAI's API has it."""

    message: str = Field(description="the rule, the value and the remedy")
    type: str
    param: str | None = Field(description="the field that is wrong")
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error."""

    error: Problem


class ClientGoneError(Exception):
    """The client has closed its connection."""


class App:
    """An ASGI application around one model. Make it inside a running event loop.

    Args:
        served: The model.
        settings: Its limits.
        address: The address that the server listens on.

    Attributes:
        num_open: The requests that are not answered yet.
        is_draining: Whether new requests are refused, since the server is about to stop.
        is_ready: Whether the first request has been computed.
    """

    def __init__(self, served: Served, settings: Settings, address: str = "127.0.0.1") -> None:
        self.served, self.settings = served, settings
        self.worker = Worker(settings.max_waiting, settings.timeout_seconds)
        self._metrics = ServerMetrics(
            served.usage, lambda: self.worker.num_waiting, lambda: int(self.worker.is_running)
        )
        self.num_open, self.is_draining, self.is_ready = 0, False, False
        self._began, self._hosts = int(time.time()), allowed_hosts(address, settings.allowed_hosts)
        self._api = self._make_api()
        self._paths = frozenset(getattr(route, "path", "") for route in self._api.routes)

    async def warm_up(self) -> None:
        """Computes a first request, which compiles its program; raises what it raises."""
        endpoint = self.served.endpoints[0]
        await self.worker.ask(endpoint.make_reply(endpoint.body.model_validate(self.served.first)).work).all()
        self.is_ready = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, and counts it."""
        path = scope["path"] if scope["path"] in self._paths else "other"
        began, codes = time.monotonic(), [CLIENT_GONE]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                codes[0] = message["status"]
            await send(message)

        self.num_open += 1
        try:
            host = Request(scope).headers.get("host", "")
            # A Host that is no name of this server: DNS rebinding.
            answer = self._api if is_allowed(host, self._hosts) else _misdirected(host)
            await answer(scope, receive, counted)
        finally:
            self.num_open -= 1
            self._metrics.answered(path, codes[0], time.monotonic() - began)

    def _make_api(self) -> fastapi.FastAPI:
        handlers: dict[Any, Any] = {
            RequestError: lambda request, error: _refused(error),
            RequestValidationError: self._wrong_body,
            HTTPException: self._no_route,
            ClientGoneError: lambda request, error: Response(status_code=CLIENT_GONE),
            FloatingPointError: lambda request, error: _failed(error),
            Exception: lambda request, error: _refused(RequestError(500, INTERNAL)),
        }
        about: dict[str, Any] = {
            "title": self.served.name,
            "description": self.served.about,
            "version": jaxpar.__version__,
        }
        api = fastapi.FastAPI(**about, docs_url=None, redoc_url=None, exception_handlers=handlers)
        api.router.route_class = _reading_route(self._check_takes_requests, self.settings.max_body_bytes)
        for endpoint in self.served.endpoints:
            self._add(api, endpoint)
        ready = "Whether requests are taken: 503 before the model is loaded, and once the server is told to stop."
        pages: list[tuple[str, str, Any, Any]] = [
            ("/docs", "This interface as a page.", HTMLResponse, self._docs),
            ("/healthz", "Whether the process works.", PlainTextResponse, self._health),
            ("/readyz", ready, PlainTextResponse, self._readiness),
            ("/metrics", "Metrics for Prometheus.", PlainTextResponse, self._page_of_metrics),
        ]
        if self.served.is_language_model:
            pages.append(("/v1/models", "The model that is served.", JSONResponse, self._models))
        for path, summary, kind, respond in pages:
            api.get(path, summary=summary, response_class=kind)(respond)
            api.head(path, include_in_schema=False)(respond)
        if self.served.is_language_model:
            api.get("/v1/models/{name:path}", include_in_schema=False)(self._model)
        api.get("/", include_in_schema=False)(lambda: RedirectResponse("/docs"))
        return api

    def _add(self, api: fastapi.FastAPI, endpoint: Endpoint) -> None:
        async def post(request: Request, body: Any) -> Response:
            reply = await run_in_threadpool(endpoint.make_reply, body)
            self._check_takes_requests()
            return await (_whole if reply.events is None else _streamed)(request, reply, self.worker.ask(reply.work))

        post.__annotations__["body"] = Annotated[endpoint.body, fastapi.Body(examples=[endpoint.example])]
        answer = {"description": "The answer.", "content": {"application/json": {"example": endpoint.response}}}
        errors = {code: {"description": about, "model": ErrorBody} for code, about in ERRORS.items()}
        responses: Any = {200: answer, **errors, "default": {"description": "Any other error.", "model": ErrorBody}}
        api.post(endpoint.path, summary=endpoint.summary, response_model=None, responses=responses)(post)

    def _check_takes_requests(self) -> None:
        if self.is_draining:
            raise RequestError(
                503,
                "a server that is about to stop takes no requests; got one. Ask again: another server may answer.",
                code="draining",
                retry_after=RETRY_ELSEWHERE,
            )
        if self.num_open > MAX_OPEN:
            raise RequestError(
                503,
                f"a server may have {MAX_OPEN} requests open; got one more. Ask again after the seconds in Retry-After.",
                code="overloaded",
                retry_after=self.worker.retry_seconds(),
            )

    async def _health(self) -> Response:
        if (seconds := self.worker.stuck_seconds()) > STUCK_SECONDS:
            return PlainTextResponse(f"stuck for {seconds:.0f} s\n", 503)
        return PlainTextResponse("ok\n")

    async def _readiness(self) -> Response:
        if self.is_ready and not self.is_draining:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("draining\n" if self.is_draining else "starting\n", 503)

    async def _page_of_metrics(self) -> Response:
        content, kind = self._metrics.page()
        return Response(content, media_type=kind)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self._model(self.served.name)]}

    async def _model(self, name: str) -> dict[str, Any]:
        if name != self.served.name:
            raise unknown_model(name, self.served.name)
        return {"id": name, "object": "model", "created": self._began, "owned_by": "jaxpar"}

    async def _docs(self, request: Request) -> Response:
        page = docs_page(self._api.openapi(), str(request.base_url).rstrip("/"))
        return HTMLResponse(page, headers={"Content-Security-Policy": CONTENT_POLICY})

    def _wrong_body(self, request: Request, error: RequestValidationError) -> Response:
        (endpoint,) = (each for each in self.served.endpoints if each.path == request.scope["path"])
        first = error.errors()[0]
        first["loc"] = first["loc"][1:]  # without "body"
        message, at = fields.explain(first, "the body", endpoint.body)
        examples = getattr(fields.field_of(endpoint.body, at), "examples", None)
        remedy = (
            f"Give such as {json.dumps(examples[0], ensure_ascii=False)}."
            if examples
            else "Correct it; /docs has examples."
        )
        remedy = REMEDIES.get(first["type"], remedy)
        return _refused(RequestError(400, f"{message}. {remedy}", param=fields.path(at) or None))

    def _no_route(self, request: Request, error: HTTPException) -> Response:
        allowed = (error.headers or {}).get("Allow", "").replace("HEAD, ", "")
        if error.status_code == 405:
            message = f"the path takes {allowed}; got {request.method}. Use {allowed}."
        else:
            posts = ", ".join(endpoint.path for endpoint in self.served.endpoints)
            message = (
                f"the path must be one that is served; got {ascii(request.url.path)[:80]}. Ask {posts}, or read /docs."
            )
        response = _refused(RequestError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response


def _misdirected(host: str) -> Response:
    message = (
        f"a request must name this server in its Host; got {ascii(host)[:80]}. Ask localhost, or start it with "
        "--allowed-hosts."
    )
    return _refused(RequestError(421, message, code="misdirected"))


def _refused(error: RequestError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


def _failed(error: Exception) -> Response:
    """Returns 500 for an error whose message helps, such as scores that are not finite, and prints it."""
    traceback.print_exception(error, file=sys.stderr)
    return _refused(RequestError(500, str(error)))


# A body --------------------------------------------------------------------------------------------------------------


def _reading_route(check: Callable[[], None], max_bytes: int) -> type[APIRoute]:
    """Returns the kind of route that reads bodies within limits, where FastAPI has none."""

    class ReadingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def read(request: Request) -> Response:
                if request.method == "POST":
                    check()
                    body = await read_body(request, max_bytes)
                    request = _ReadRequest(request, body, await run_in_threadpool(parse, body))
                return await handle(request)

            return read

    return ReadingRoute


class _ReadRequest(Request):
    """A request whose body has been read and parsed."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._content, self._value = body, value

    async def body(self) -> bytes:
        return self._content

    async def json(self) -> Any:
        return self._value


# A response ----------------------------------------------------------------------------------------------------------


async def _whole(request: Request, reply: Reply, answer: Answer) -> Response:
    """Returns the response to a request once it is computed."""
    try:
        return JSONResponse(reply.whole(await _unless_gone(request, answer.all())))
    finally:
        answer.close()


async def _streamed(request: Request, reply: Reply, answer: Answer) -> Response:
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
        # X-Accel-Buffering is for nginx, which would hold events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(reply, first, answer), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _events(reply: Reply, first: Any, answer: Answer) -> AsyncIterator[str]:
    assert reply.events is not None
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
