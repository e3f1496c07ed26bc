"""The paths of a server, as an ASGI application.

A refused request gets 4xx, or 503 with Retry-After; a failure of the server gets 500. /healthz and /readyz answer 200 or 503.
"""

import asyncio
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jaxpar import fields
from jaxpar.runtime.connections import Connections
from jaxpar.runtime.host_names import allowed_hosts, is_allowed, is_by_address
from jaxpar.serve.openai_api import check_name
from jaxpar.serve.pages import ServerMetrics, describe, docs_page
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
)

Result = TypeVar("Result")
MAX_OPEN = 256  # requests at a time, those whose bodies are being read among them
STUCK_SECONDS = 600.0  # for one token or prediction, with the time to compile
RETRY_ELSEWHERE = 2  # seconds; another pod may answer
CLIENT_GONE = 499  # the status in the metrics; nobody receives it
ANSWER = "answer"  # of a request, in its ASGI scope
INTERNAL = (
    "a request must not fail; got an error in the server, which its log shows. Tell who runs it."
)
PROBED = ("/healthz", "/readyz", "/metrics")  # what Kubernetes and Prometheus ask of a pod
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
REMEDIES = {
    "extra_forbidden": "Leave it out, or correct its name.",
    "without_effect": "Leave it out.",
}


class App:
    """An ASGI application around one model. Make it inside a running event loop.

    Args:
        served: The model.
        settings: Its limits.
        address: The address that the server listens on.

    Attributes:
        num_open: The requests that are not answered yet.
        connections: The connections of its server.
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
        self.connections = Connections()
        self._began, self._hosts = int(time.time()), allowed_hosts(address, settings.allowed_hosts)
        ready = "Whether requests are taken: 503 before the model is loaded, and once the server is told to stop."
        pages: dict[str, tuple[str, Callable[[Request], Any]]] = {
            "/docs": ("This interface as a page.", self._docs),
            "/openapi.json": (
                "This interface as OpenAPI 3.1.",
                lambda request: JSONResponse(self._description),
            ),
            "/healthz": ("Whether the process works.", self._health),
            "/readyz": (ready, self._readiness),
            "/metrics": ("Metrics for Prometheus.", self._page_of_metrics),
        }
        if served.is_language_model:
            pages["/v1/models"] = ("The model that is served.", self._models)
        self._description = describe(served, {path: about for path, (about, _) in pages.items()})
        handlers: dict[Any, Any] = {
            RequestError: lambda request, error: _refused(error),
            HTTPException: self._no_route,
            ClientDisconnect: lambda request, error: Response(status_code=CLIENT_GONE),
            FloatingPointError: lambda request, error: _failed(error),
            Exception: lambda request, error: _refused(RequestError(500, INTERNAL)),
        }
        routes = [
            *(
                Route(each.path, partial(self._post, each), methods=["POST"])
                for each in served.endpoints
            ),
            *(Route(path, respond) for path, (_, respond) in pages.items()),
            *([Route("/v1/models/{name:path}", self._model)] if served.is_language_model else []),
            Route("/", lambda request: RedirectResponse("/docs")),
        ]
        self._paths = frozenset(route.path for route in routes)
        self._api = Starlette(routes=routes, exception_handlers=handlers)

    async def warm_up(self) -> None:
        """Computes a first request, which compiles its program; raises what it raises."""
        endpoint = self.served.endpoints[0]
        first = endpoint.make_reply(endpoint.body.model_validate(self.served.first))
        # To compile may take longer than any request may.
        await self.worker.ask(first.work, is_timed=False).all()
        usage = self.served.usage
        usage.update(dict.fromkeys(usage, 0))  # which nobody asked for
        self.is_ready = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, ends its work, and counts it."""
        scope = self._without_slash(scope)
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
            is_named = is_allowed(host, self._hosts) or (path in PROBED and is_by_address(host))
            answer = self._api if is_named else self._misdirected(host)
            await answer(scope, receive, counted)
        finally:
            self.num_open -= 1
            if ANSWER in scope:  # whose client may be gone
                scope[ANSWER].close()
            self._metrics.answered(path, codes[0], time.monotonic() - began)

    def _without_slash(self, scope: Scope) -> Scope:
        """Returns a request of a path and a slash as one of the path: after a redirect many clients send no body."""
        path = scope["path"].rstrip("/")
        if path == scope["path"] or path not in self._paths:
            return scope
        return {**scope, "path": path, "raw_path": path.encode()}

    async def _post(self, endpoint: Endpoint, request: Request) -> Response:
        self._check_takes_requests()
        body = await read_body(request, self.settings.max_body_bytes)
        reply = await run_in_threadpool(_reply, endpoint, body)
        self._check_takes_requests()
        answer = request.scope[ANSWER] = self.worker.ask(reply.work)
        if reply.events is None:
            return JSONResponse(reply.whole(await _unless_gone(request, answer.all())))
        first = await _unless_gone(
            request, anext(answer)
        )  # an error before the first event is one of the request
        # X-Accel-Buffering is for nginx, which would hold events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _events(reply, first, answer), media_type="text/event-stream", headers=headers
        )

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

    async def _health(self, request: Request) -> Response:
        if (seconds := self.worker.stuck_seconds()) > STUCK_SECONDS:
            return PlainTextResponse(f"stuck for {seconds:.0f} s\n", 503)
        return PlainTextResponse("ok\n")

    async def _readiness(self, request: Request) -> Response:
        if self.is_ready and not self.is_draining:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("draining\n" if self.is_draining else "starting\n", 503)

    async def _page_of_metrics(self, request: Request) -> Response:
        content, kind = self._metrics.page()
        return Response(content, media_type=kind)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about_model()]})

    async def _model(self, request: Request) -> Response:
        check_name(request.path_params["name"], self.served.name)
        return JSONResponse(self._about_model())

    def _about_model(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._began,
            "owned_by": "jaxpar",
            "description": self.served.about,
        }

    async def _docs(self, request: Request) -> Response:
        page = docs_page(self._description, str(request.base_url).rstrip("/"))
        return Response(
            page, headers={"Content-Security-Policy": CONTENT_POLICY}, media_type="text/html"
        )

    def _misdirected(self, host: str) -> Response:
        names = "a name of --allowed-hosts" if self.settings.allowed_hosts else "localhost"
        message = (
            f"a request must name this server in its Host; got {ascii(host)[:80]}. Ask it by {names}, or start it with this "
            "name in --allowed-hosts."
        )
        return _refused(RequestError(421, message, code="misdirected"))

    def _no_route(self, request: Request, error: HTTPException) -> Response:
        posts = [endpoint.path for endpoint in self.served.endpoints]
        if error.status_code == 405:
            allowed = "POST" if request.url.path in posts else "GET"
            message = f"the path takes {allowed}; got {request.method}. Use {allowed}."
        else:
            asked = ascii(request.url.path)[:80]
            message = f"the path must be one that is served; got {asked}. Ask {', '.join(posts)}, or read /docs."
        response = _refused(RequestError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response


def _refused(error: RequestError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


def _failed(error: Exception) -> Response:
    """Returns 500 for an error whose message helps, such as scores that are not finite, and prints it."""
    traceback.print_exception(error, file=sys.stderr)
    return _refused(RequestError(500, str(error)))


def _reply(endpoint: Endpoint, body: bytes) -> Reply:
    """Returns the reply to a body; raises RequestError for one that is wrong."""
    try:
        asked = endpoint.body.model_validate(parse(body))
    except ValidationError as error:
        first = error.errors()[0]
        message, at = fields.explain(first, "the body", endpoint.body)
        if examples := getattr(fields.field_of(endpoint.body, at), "examples", None):
            remedy = f"Give such as {json.dumps(examples[0], ensure_ascii=False)}."
        else:
            remedy = "Correct it; /docs has examples."
        remedy = REMEDIES.get(first["type"], remedy)
        raise RequestError(400, f"{message}. {remedy}", param=fields.path(at) or None) from error
    return endpoint.make_reply(asked)


async def _events(reply: Reply, first: Any, answer: Answer) -> AsyncIterator[str]:
    """Yields the server-sent events of a reply."""
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
    """Returns a result; raises ClientDisconnect if the client goes away before."""
    tasks = asyncio.ensure_future(result), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
