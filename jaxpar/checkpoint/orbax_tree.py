"""Writes a tree of arrays with Orbax, by its public functions; only this module uses Orbax. `array_file.py` reads them.

Orbax's part of one process waits for those of the others at barriers, and for minutes if one of them has failed. Nothing here
waits for Orbax that long: a process that fails says so over the coordination service, and the others then leave Orbax's threads
to themselves. If they do not end before the program, ``jaxpar.runtime.distributed.leave`` ends it without them.
"""

import contextlib
import functools
import itertools
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar.runtime import coordination
from jaxpar.runtime.output import logging_kept

with logging_kept():
    from orbax.checkpoint import v1 as ocp

SECONDS = 1800.0
LEAST_PART_BYTES = 1 << 20
SLICE_SECONDS = 1.0
SECONDS_TO_END = 5.0  # for this process's part of a save that another process has given up
_numbers = itertools.count()  # of the saves, which all processes do in the same order


class GivenUpError(RuntimeError):
    """Another process failed in a save."""


class Operation(contextlib.AbstractContextManager["Operation"]):
    """A save by all processes. A process that fails in the ``with`` block gives it up for all.

    Args:
        seconds: The time that it may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._key = f"jaxpar/arrays/{next(_numbers)}/given up"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        service = coordination.client()
        if kind is not None and service is not None:
            with contextlib.suppress(Exception):
                service.key_value_set(self._key, "yes", allow_overwrite=True)

    def result(self, response: Any) -> Any:
        """Returns the result of this process's part, a Future or an AsyncResponse, or raises its error.

        Raises:
            GivenUpError: Another process gave the operation up, and this part did not end soon after.
            TimeoutError: It took too long.
        """
        until = float("inf")
        while True:
            began = time.monotonic()
            left = max(min(SLICE_SECONDS, until - began), 0.0)
            try:
                return response.result(timeout=left)
            except TimeoutError:
                now = time.monotonic()
                if now < min(began + left / 2, self._deadline):  # the part's own error
                    raise
            if now >= until:
                raise GivenUpError("another process failed")
            if now >= self._deadline:
                raise TimeoutError(f"it took longer than {self._seconds:g} s")
            if coordination.try_get(self._key) is not None:
                until = min(until, began + SECONDS_TO_END)


def save_async(folder: Path, tree: PyTree, seconds: float = SECONDS) -> Callable[[], None]:
    """Starts writing a tree to a new folder, and returns once the arrays are copied, so that they may be donated.

    Returns a function that waits until everything is written, and raises the error of a failed write: OSError, ValueError (of
    TensorStore, if the disk is full), TimeoutError after ``seconds``, GivenUpError if another process failed.

    Every process must call it, and writes the shards of its devices. The folder appears when everything is written.
    """
    # Each of Orbax's threads logs the error of a failed save, which Orbax also raises.
    logging.getLogger("absl").addFilter(_is_news)
    _accept_closed_loops()
    context = ocp.Context()
    context.asynchronous.timeout_secs = max(round(seconds), 1)
    # A replica writes its own part of an array only if that is large: to cut it compiles a program for each device.
    context.array.saving.min_slice_bytes_for_replica_parallel = LEAST_PART_BYTES
    # Orbax's threads would wait for minutes for a folder that cannot be made in the background. With several processes the main
    # threads of the others would wait for one that cannot be made at once.
    context.asynchronous.create_directories_asynchronously = jax.process_count() > 1
    operation = Operation(seconds)
    response: Any = Future()
    try:
        with operation, context:
            response = ocp.save_async(str(folder), tree)
    except Exception as error:  # raised by ``wait``, since the other processes have started writing
        response.set_exception(error)

    def wait() -> None:
        with operation:
            operation.result(response)

    return wait


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


@functools.cache
def _accept_closed_loops() -> None:
    """Hides the tracebacks of TensorStore's threads: a failed save closes Orbax's event loop while they still write."""
    show = sys.unraisablehook

    def hook(raised: Any) -> None:
        if not (
            isinstance(raised.exc_value, RuntimeError)
            and str(raised.exc_value) == "Event loop is closed"
        ):
            show(raised)

    sys.unraisablehook = hook
