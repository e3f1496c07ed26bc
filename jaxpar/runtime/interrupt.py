"""Ctrl-C in a command that has nothing to save."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # the exit code of Ctrl-C, as in shells
SECONDS_TO_END = 2.0  # from Ctrl-C


@contextmanager
def ended_by_interrupt(end: Callable[[int], None] = os._exit) -> Iterator[None]:
    """Ends the process with 130 soon after Ctrl-C in the ``with`` block, also where something has swallowed it.

    What Python calls by itself, such as JAX's callback of the garbage collector, prints a KeyboardInterrupt and goes on.

    Args:
        end: Ends the process; replaces ``os._exit`` in tests.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    last = threading.Timer(SECONDS_TO_END, lambda: end(INTERRUPTED))
    last.daemon = True

    def interrupt(number: int, frame: object) -> None:
        if last.ident is None:
            last.start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        last.cancel()
        signal.signal(signal.SIGINT, before)
