"""Serves a few pages over HTTP from this process, read-only: for a browser or Prometheus, not for load.

One thread reads all requests, so that connections which send nothing cost no thread; a few others compute the pages. Each
connection gets one answer. There is no path but those given, and no method but GET.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import Any

from jaxpar.runtime.connections import ACCEPTED_AT_ONCE, BACKLOG, Connections
from jaxpar.runtime.host_names import allowed_hosts, is_allowed

NUM_THREADS = 4
MOST_HEAD_BYTES = 2**16
TURNS = 8  # of the event loop, in which a connection that it has accepted becomes known, or one that is closed is gone
END_OF_HEAD = b"\r\n\r\n"
Page = tuple[str, Callable[[], str | bytes]]  # its media type, and what returns it


class PageServer:
    """A server of pages, which listens from its construction on.

    Args:
        pages: Each page by its path. One that raises ValueError or OSError is answered with 503 and the message.
        address: The address of this machine to listen on.
        port: The port; 0: any that is free, which ``server_port`` holds.
        hosts: Names that a request's Host may have, as ``allowed_hosts`` takes them.

    Raises:
        OSError: The address and port are not free.
        ValueError: A name is none.
    """

    def __init__(
        self, pages: Mapping[str, Page], address: str, port: int, hosts: Sequence[str] = ()
    ) -> None:
        self.pages, self.hosts = pages, allowed_hosts(address, hosts)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, port), family=family, backlog=BACKLOG)
        self.server_address = self._socket.getsockname()
        self.server_port: int = self.server_address[1]
        self._has_begun, self._has_ended = threading.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> "PageServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.server_close()

    def serve_forever(self) -> None:
        """Answers until ``shutdown``, or an interrupt."""
        try:
            asyncio.run(self._serve())
        finally:
            self._has_begun.set()
            self._has_ended.set()

    def shutdown(self) -> None:
        """Ends ``serve_forever``, which another thread has called, and waits until it has ended."""
        self._has_begun.wait()
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._has_ended.wait()

    def server_close(self) -> None:
        """Stops listening."""
        self._socket.close()

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._stop, self.connections = asyncio.Event(), Connections()
        loop.set_exception_handler(self.connections.handle)
        with (
            contextlib.closing(
                self._socket.dup()
            ) as listening,  # asyncio closes the one that it is given
            ThreadPoolExecutor(NUM_THREADS, "jaxpar-pages") as self.threads,
        ):
            server = await loop.create_server(
                partial(_Protocol, self), sock=listening, backlog=ACCEPTED_AT_ONCE
            )
            listening.listen(BACKLOG)
            self._has_begun.set()
            await self._stop.wait()
            loop.remove_reader(
                listening
            )  # first, since asyncio loses what it has accepted for a server that is closed
            await _turns()
            server.close()
            self.connections.close_all()
            await _turns()


async def _turns() -> None:
    """Lets the event loop do what it has begun."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class _Protocol(asyncio.Protocol):
    """A connection: it gets one answer.

    Args:
        server: The server.
    """

    def __init__(self, server: PageServer) -> None:
        self._server, self._head, self._is_answered = server, b"", False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._transport = transport
        self._server.connections.waits(transport)

    def data_received(self, data: bytes) -> None:
        self._head += b"" if self._is_answered else data
        if len(self._head) > MOST_HEAD_BYTES:
            self._transport.abort()
        elif END_OF_HEAD in self._head:
            self._is_answered = True
            self._server.connections.is_busy(self._transport)
            loop, head = asyncio.get_running_loop(), self._head
            self._head = b""
            loop.run_in_executor(
                self._server.threads, _answer_to, head, self._server
            ).add_done_callback(self._send)

    def _send(self, answer: asyncio.Future[bytes]) -> None:
        if answer.cancelled() or answer.exception() is not None:  # a bug, which the loop prints
            self._transport.abort()
        if not self._transport.is_closing():
            self._server.connections.cannot_write(self._transport)
            self._transport.write(answer.result())
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.is_lost(self._transport)


def _answer_to(head: bytes, server: PageServer) -> bytes:
    return _Handler(head, server).answer.getvalue()


class _Handler(BaseHTTPRequestHandler):
    """The standard library's reader of requests, of one that is in memory."""

    def __init__(self, head: bytes, server: PageServer) -> None:
        self.rfile, self.wfile = BytesIO(head), BytesIO()
        self.answer = self.wfile
        self._pages, self._hosts = server.pages, server.hosts
        self.handle_one_request()

    def do_GET(self) -> None:
        """Answers a request."""
        path = self.path.partition("?")[0]
        if not is_allowed(self.headers.get("Host", ""), self._hosts):  # DNS rebinding
            told = "the Host must be a name of this server, such as localhost; got another"
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", told)
        if path not in self._pages:
            return self._send(
                HTTPStatus.NOT_FOUND, "text/plain", f"there are {' and '.join(self._pages)} only"
            )
        kind, page = self._pages[path]
        try:
            content = page()
        except (ValueError, OSError) as error:
            return self._send(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "application/json",
                json.dumps({"error": str(error)}),
            )
        self._send(HTTPStatus.OK, kind, content)

    def _send(self, status: HTTPStatus, kind: str, text: str | bytes) -> None:
        content = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Type", kind if "charset" in kind else f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing for a request."""
