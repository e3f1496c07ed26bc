r"""The connections of a server, limited in number and in the time to send a request or to read its answer.

    opened --request--> busy --answered--> waiting, if it is kept open --request--> busy ...
       \____ SECONDS_TO_ASK without a whole request: closed        SECONDS_TO_READ without reading its answer: closed

With as many open as there may be, a new one takes the place of the one that has waited longest. So connections that send
nothing keep nobody out, and a server does not run out of files, after which it could not even tell that it is well. Everything
here runs in the server's event loop.
"""

import asyncio
import contextlib
import errno
import os
import resource
import time
from typing import Any

from jaxpar.runtime.output import tell

MOST = 1024
LEAST = 16
SPARE_FILES = 256  # for what else the process opens, and for connections that are accepted before the oldest are closed
SECONDS_TO_ASK = 10.0
SECONDS_TO_READ = 60.0
ACCEPTED_AT_ONCE = 32
BACKLOG = 512  # connections that the system accepts before the server does
SECONDS_BETWEEN_LINES = 60.0
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_connections() -> int:
    """Returns how many connections a server of this process may have open, by the number of files that it may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MOST
    with contextlib.suppress(OSError):
        files -= len(os.listdir("/proc/self/fd"))
    return max(min(files - SPARE_FILES, MOST), LEAST)


class Connections:
    """The connections of one server.

    Args:
        most: How many may be open; None: by the number of files that this process may open.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most_connections() if most is None else most
        self._timers: dict[
            asyncio.BaseTransport, asyncio.TimerHandle
        ] = {}  # of those that wait, the oldest first
        self._open: set[asyncio.BaseTransport] = set()
        self._told_at = -SECONDS_BETWEEN_LINES

    def __len__(self) -> int:
        return len(self._open)

    def waits(self, connection: asyncio.WriteTransport) -> None:
        """Gives a connection, new or answered, some seconds for a request; makes room for it if it is new."""
        self.is_busy(connection)
        self._open.add(connection)
        later = asyncio.get_running_loop().call_later
        self._timers[connection] = later(SECONDS_TO_ASK, self._close, connection)
        if len(self._open) > self._most:
            self.make_room()

    def is_busy(self, connection: asyncio.BaseTransport) -> None:
        """Notes that a connection has sent a request."""
        if timer := self._timers.pop(connection, None):
            timer.cancel()

    def cannot_write(self, connection: asyncio.WriteTransport) -> None:
        """Gives a busy connection some seconds to read what was sent to it."""
        self.is_busy(connection)
        self._timers[connection] = asyncio.get_running_loop().call_later(
            SECONDS_TO_READ, self._close, connection
        )

    def is_lost(self, connection: asyncio.BaseTransport) -> None:
        """Forgets a connection that is closed."""
        self.is_busy(connection)
        self._open.discard(connection)

    def make_room(self) -> None:
        """Closes the connection that has waited longest."""
        if self._timers:
            self._close(next(iter(self._timers)))

    def close_all(self) -> None:
        """Closes all connections."""
        for connection in [*self._open]:
            self._close(connection)

    def _close(self, connection: Any) -> None:
        self.is_lost(connection)
        connection.abort()

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Is the loop's exception handler: where no file can be opened, it makes room and says so once a minute."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in NO_FILES):
            return loop.default_exception_handler(context)
        self.make_room()
        if time.monotonic() - self._told_at > SECONDS_BETWEEN_LINES:
            self._told_at = time.monotonic()
            tell(
                f"connections wait, since this process can open no more files: {error.strerror}. Raise its ulimit -n."
            )
