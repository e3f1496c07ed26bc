"""The event loop in which Orbax writes. It ignores writes that end after it is closed.

If a write fails, because the disk is full, say, Orbax closes its loop while others are in progress. TensorStore's threads then
call the closed loop when these end, and print a traceback for each.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from orbax.checkpoint._src import asyncio_utils


class Loop(asyncio.SelectorEventLoop):
    """An event loop that other threads may call after it is closed, without effect."""

    def call_soon_threadsafe(self, callback: Callable, *args: Any, context: Any = None) -> Any:
        """Schedules a callback from any thread; returns None if the loop is closed."""
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return None


def run(coro: Coroutine) -> Any:
    """Returns the result of a coroutine, in a loop of its own."""
    loop = Loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coro)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def use_loop() -> None:
    """Makes Orbax write in such loops from now on."""
    asyncio_utils._run_sync_via_new_loop = run
