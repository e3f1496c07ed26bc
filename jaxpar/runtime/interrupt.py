"""Ctrl-C in a command, or in a process of a run outside its training loop, where there is nothing to save.

Python handles a signal once its main thread runs Python code. A process that waits in a collective for another one does not,
so a thread hears the signal too, over the pipe to which Python writes its number, and ends a process that does not handle it.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxpar.runtime.output import tell

INTERRUPTED = 130  # the exit code of Ctrl-C, as in shells
SECONDS_TO_END = 2.0  # from Ctrl-C

SECONDS_TO_HANDLE = 10.0  # from Ctrl-C, in which the main thread must have run Python code


@contextmanager
def ended_by_interrupt(end: Callable[[int], None] = os._exit) -> Iterator[None]:
    """Ends the process with 130 soon after Ctrl-C in the ``with`` block, also where something has swallowed it.

    What Python calls by itself, such as JAX's callback of the garbage collector, prints a KeyboardInterrupt and goes on.

    Args:
        end: Ends the process; replaces ``os._exit`` in tests.
    """
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is not signal.default_int_handler
    ):
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


def end_if_unhandled(end: Callable[[int], None] = os._exit) -> None:
    """Ends the process with 130 after a Ctrl-C that its main thread does not handle, from now on; it says where that thread is.

    A script that catches KeyboardInterrupt goes on. Handlers of its own, and those of a training loop, take the place of this.

    Args:
        end: Ends the process; replaces ``os._exit`` in tests.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    handled = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        handled.set()
        raise KeyboardInterrupt

    def listen(reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) is not interrupt:
                continue
            if not handled.wait(SECONDS_TO_HANDLE):
                tell(_unhandled())
                end(INTERRUPTED)
            handled.clear()

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=listen, args=[reader], name="jaxpar-interrupt", daemon=True).start()


def _unhandled() -> str:
    stack = sys._current_frames()[threading.main_thread().ident or 0]
    where = "".join(traceback.format_stack(stack))
    return (
        f"SIGINT: this process did not handle it within {SECONDS_TO_HANDLE:g} s, as one that waits for another in a "
        f"collective, so it ends. Its Python stack, the innermost call last:\n{where}"
    )
