"""The paths of a server, as an ASGI application.

A refused request gets 4xx, or 503 with Retry-After; a failure of the server gets 500. /healthz and /readyz answer 200 or 503.
"""

import sys
import time
import traceback
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jaxpar.runtime.host_names import allowed_hosts, is_allowed
from jaxpar.serve import docs_page, openapi
from jaxpar.serve.endpoint import Endpoint, Served
from jaxpar.serve.errors import RequestError
from jaxpar.serve.json_body import parse
from jaxpar.serve.requests import CLIENT_GONE, INTERNAL, ClientGoneError, read_body, streamed, whole
from jaxpar.serve.server_metrics import ServerMetrics
from jaxpar.serve.settings import Settings
from jaxpar.serve.worker import Worker

MAX_OPEN = 256  # requests at a time, those whose bodies are being read among them
STUCK_SECONDS = 600.0  # for one token or prediction, with the time to compile
RETRY_ELSEWHERE = 2  # seconds; another pod may answer


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
        self.served, self._settings = served, settings
        self.worker = Worker(settings.max_waiting, settings.timeout_seconds)
        self._metrics = ServerMetrics(
            served.usage, lambda: self.worker.num_waiting, lambda: int(self.worker.is_running)
        )
        self.num_open, self.is_draining, self.is_ready = 0, False, False
        self._description, self._began = openapi.describe(served), int(time.time())
        self._hosts = allowed_hosts(address, settings.allowed_hosts)
        self._routes = _Routes(self).starlette()
        self._paths = frozenset(self._description["paths"])

    async def warm_up(self) -> None:
        """Computes a first request, which compiles its program; raises what it raises."""
        endpoint = self.served.endpoints[0]
        await self.worker.ask(endpoint.make_reply(self.served.first).work).all()
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
            await (self._routes if self._names_it(scope) else _misdirected)(scope, receive, counted)
        finally:
            self.num_open -= 1
            self._metrics.answered(path, codes[0], time.monotonic() - began)

    def _names_it(self, scope: Scope) -> bool:
        """Returns whether the Host of a request is a name of this server, which prevents DNS rebinding."""
        return is_allowed(
            next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), ""), self._hosts
        )

    async def post(self, endpoint: Endpoint, request: Request) -> Response:
        """Returns the response to a request for a model."""
        self._check_takes_requests()
        body = await read_body(request, self._settings.max_body_bytes)
        reply = await run_in_threadpool(lambda: endpoint.make_reply(endpoint.validator.check(parse(body))))
        self._check_takes_requests()
        return await (streamed if reply.is_stream else whole)(request, reply, self.worker.ask(reply.work))

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

    def health(self) -> Response:
        """Returns 200 unless the worker has been at one result for too long."""
        if (seconds := self.worker.stuck_seconds()) > STUCK_SECONDS:
            return PlainTextResponse(f"stuck for {seconds:.0f} s\n", 503)
        return PlainTextResponse("ok\n")

    def readiness(self) -> Response:
        """Returns 200 if requests are taken."""
        if self.is_ready and not self.is_draining:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("draining\n" if self.is_draining else "starting\n", 503)

    def metrics(self) -> Response:
        """Returns the metrics."""
        content, kind = self._metrics.page()
        return Response(content, media_type=kind)

    def models(self) -> Response:
        """Returns the list of models, which has one."""
        model = {"id": self.served.name, "object": "model", "created": self._began, "owned_by": "jaxpar"}
        return JSONResponse({"object": "list", "data": [model]})

    def docs(self, url: str) -> Response:
        """Returns the page about the interface."""
        return HTMLResponse(
            docs_page.render(self._description, url), headers={"Content-Security-Policy": CONTENT_POLICY}
        )

    def openapi(self) -> Response:
        """Returns the description of the interface."""
        return JSONResponse(self._description)


CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class _Routes:
    """Starlette's routes for the methods of an ``App``, and what its errors become."""

    def __init__(self, app: App) -> None:
        self._app = app

    def starlette(self) -> Starlette:
        app = self._app
        get = {
            "/healthz": lambda request: app.health(),
            "/readyz": lambda request: app.readiness(),
            "/metrics": lambda request: app.metrics(),
            "/openapi.json": lambda request: app.openapi(),
            "/docs": lambda request: app.docs(str(request.base_url).rstrip("/")),
            "/": lambda request: Response(status_code=307, headers={"Location": "/docs"}),
        }
        if app.served.is_language_model:
            get["/v1/models"] = lambda request: app.models()
        routes = [Route(path, partial(_answer, respond), methods=["GET"]) for path, respond in get.items()]
        for endpoint in app.served.endpoints:
            routes.append(Route(endpoint.path, partial(app.post, endpoint), methods=["POST"]))
        handlers: dict[Any, Any] = {
            RequestError: lambda request, error: _refused(error),
            HTTPException: self._no_route,
            ClientGoneError: lambda request, error: Response(status_code=CLIENT_GONE),
            FloatingPointError: lambda request, error: _failed(error),
            Exception: lambda request, error: _refused(RequestError(500, INTERNAL)),
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    def _no_route(self, request: Request, error: HTTPException) -> Response:
        allowed = (error.headers or {}).get("Allow", "").replace("HEAD, ", "")
        if error.status_code == 405:
            message = f"the path takes {allowed}; got {request.method}. Use {allowed}."
        else:
            posts = ", ".join(endpoint.path for endpoint in self._app.served.endpoints)
            message = (
                f"the path must be one that is served; got {ascii(request.url.path)[:80]}. Ask {posts}, or read /docs."
            )
        response = _refused(RequestError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response


async def _misdirected(scope: Scope, receive: Receive, send: Send) -> None:
    host = ascii(Request(scope).headers.get("host", ""))[:80]
    message = (
        f"a request must name this server in its Host; got {host}. Ask localhost, or start it with --allowed-hosts."
    )
    await _refused(RequestError(421, message, code="misdirected"))(scope, receive, send)


async def _answer(respond: Any, request: Request) -> Response:
    return respond(request)


def _refused(error: RequestError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


def _failed(error: Exception) -> Response:
    """Returns 500 for an error whose message helps, such as scores that are not finite, and prints it."""
    traceback.print_exception(error, file=sys.stderr)
    return _refused(RequestError(500, str(error)))
