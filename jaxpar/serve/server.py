"""The process of a server: it listens, answers, and on SIGTERM finishes the accepted requests before it ends.

SIGTERM --> new requests get 503, /readyz too; those waiting and running are answered --> exit code 0
a second signal ends the process at once
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxpar.fields import check_from
from jaxpar.runtime.connections import ACCEPTED_AT_ONCE, BACKLOG, Connections
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import printable_lines, tell
from jaxpar.serve.app import App
from jaxpar.serve.requests import Served, Settings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVE_SECONDS = 5  # for connections to close, once all requests are answered
POLL_SECONDS = 0.05


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens; raises OSError or ValueError if it cannot.

    Args:
        address: The address of this machine to listen on.
        port: The port; 0: any that is free.
    """
    check_from(0, 65535, "Choose such as 8000; 0 takes one that is free.", port=port)
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(
            f"--address and --port must be free to listen on; got {address} port {port}: {error.strerror}. Choose "
            "an address of this machine, or another port; 0 takes one that is free."
        ) from error


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Lets SIGTERM and Ctrl-C end the process with 0 inside, where no request has been taken yet."""

    def end(number: int, frame: object) -> None:
        tell(f"{signal.Signals(number).name}: stopping before the model is loaded")
        raise SystemExit(ExitCode.DONE)

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(served: Served, settings: Settings, listening: socket.socket) -> int:
    """Serves until a signal; returns the exit code."""
    code, is_busy = asyncio.run(_run(served, settings, listening))
    if is_busy:  # Python would wait for the thread's current result
        sys.stdout.flush()
        os._exit(code)
    return code


async def _run(served: Served, settings: Settings, listening: socket.socket) -> tuple[int, bool]:
    app = App(served, settings, listening.getsockname()[0])
    code = await Server(app).serve(listening, SIGNALS)
    app.worker.close()
    return code, app.worker.stuck_seconds() > 0


class Server:
    """uvicorn, which closes at once when told to stop; this one answers first.

    Args:
        app: The application.
    """

    def __init__(self, app: App) -> None:
        self._app, self._exit_code = app, ExitCode.DONE
        self._tasks = set[asyncio.Task[None]]()  # a task that nothing holds may be collected
        protocol = partial(_Protocol, app.connections)
        of_protocols: dict[str, Any] = {
            "loop": "asyncio",
            "http": protocol,
            "ws": "none",
            "lifespan": "off",
        }
        of_protocols["backlog"] = ACCEPTED_AT_ONCE
        says_nothing: dict[str, Any] = {
            "log_config": None,
            "access_log": False,
            "server_header": False,
        }
        config = uvicorn.Config(
            app, **of_protocols, **says_nothing, timeout_graceful_shutdown=LEAVE_SECONDS
        )
        self._uvicorn = uvicorn.Server(config)

    async def serve(self, listening: socket.socket, signals: Sequence[signal.Signals] = ()) -> int:
        """Answers, a first request of its own before all others, until ``begin_to_stop``; returns the exit code of the process.

        Args:
            listening: The socket.
            signals: On the first of these it begins to stop; the next one has its default action.
        """
        asyncio.get_running_loop().set_exception_handler(self._app.connections.handle)
        serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[listening]))
        while not (self._uvicorn.started or serving.done()):
            await asyncio.sleep(POLL_SECONDS)
        if not serving.done():
            listening.listen(BACKLOG)  # uvicorn's would be the number that is accepted at once
        for number in signals:  # in place of uvicorn's own handlers, which it sets before it starts
            asyncio.get_running_loop().add_signal_handler(number, self._stop_on, number, signals)
        self._tasks.add(asyncio.ensure_future(self._warm_up()))
        await serving
        return int(self._exit_code)

    async def _warm_up(self) -> None:
        try:
            await self._app.warm_up()
        except Exception as error:  # bad weights
            tell(f"error: {printable_lines(str(error))}")
            self._exit_code, self._uvicorn.should_exit = ExitCode.BAD_DATA, True
        else:
            tell("ready")

    def _stop_on(self, number: signal.Signals, signals: Sequence[signal.Signals]) -> None:
        for each in signals:
            asyncio.get_running_loop().remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        tell(
            f"{number.name}: answering {self._app.num_open} requests, then stopping; a second signal ends it at once"
        )
        self.begin_to_stop()

    def begin_to_stop(self) -> None:
        """Refuses new requests, and stops when the others are answered."""
        self._app.is_draining = True
        self._tasks.add(asyncio.ensure_future(self._stop_when_answered()))

    async def _stop_when_answered(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._app.settings.timeout_seconds):
                while self._app.num_open:
                    await asyncio.sleep(POLL_SECONDS)
        self._uvicorn.should_exit = True


class _Protocol(H11Protocol):
    """uvicorn's connection, limited as ``Connections`` says; uvicorn itself lets one wait for its first request for ever."""

    def __init__(self, connections: Connections, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._all = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._all.waits(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.is_lost(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy():
            self._all.is_busy(self.transport)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._is_busy() or self.transport.is_closing()):
            self._all.waits(self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._all.cannot_write(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._all.is_busy(self.transport)

    def _is_busy(self) -> bool:
        """Returns whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete
