"""Writes and reads a tree of arrays with Orbax; only this module, `orbax_signals.py` and `orbax_loop.py` use Orbax."""

import functools
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint.orbax_signals import SLICE_SECONDS, GivenUpError, Operation, client

SECONDS = 1800.0
SECONDS_TO_END = 5.0  # for this process's part of a save that another process has given up
# Orbax leaves coroutines of a failed save that never ran, and Python would warn about each.
NEVER_RAN = r"coroutine '(cancellable|_?(async_)?serialize_|BasePyTreeCheckpointHandler\.|OrbaxLayout\.)"


def save_async(folder: Path, tree: PyTree, seconds: float = SECONDS) -> Callable[[], None]:
    """Starts writing a tree to a new folder, and returns once the arrays are copied, so that they may be donated.

    Returns a function that waits until everything is written, and raises the error of a failed write: OSError, ValueError (of
    TensorStore, if the disk is full), TimeoutError after ``seconds``, GivenUpError if another process failed.

    Every process must call it, and writes the shards of its devices. The folder appears when everything is written.
    """
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_is_news)
    warnings.filterwarnings("ignore", NEVER_RAN, RuntimeWarning)
    operation = client().begin(seconds)
    context = ocp.Context()
    context.asynchronous.timeout_secs = max(round(seconds), 1)
    try:
        with context:
            response = ocp.save_async(str(folder), tree)
    except BaseException:
        operation.give_up()
        raise
    return functools.partial(_wait, response, operation)


def _wait(response: Any, operation: Operation) -> None:
    try:
        _wait_in_slices(response, operation)
    except BaseException as error:
        operation.give_up()
        if isinstance(error, TimeoutError):  # Orbax's own has no message
            operation.check_time()
        raise
    operation.end()


def _wait_in_slices(response: Any, operation: Operation) -> None:
    """Waits for a save, but not for writes of TensorStore that never end after another process has given it up."""
    deadline = float("inf")
    while True:
        began = time.monotonic()
        left = min(SLICE_SECONDS, deadline - began)
        try:
            return response.result(timeout=max(left, 0))
        except TimeoutError:
            if time.monotonic() - began < left / 2:  # the save's own error
                raise
        try:
            operation.check()
        except GivenUpError:
            deadline = min(deadline, began + SECONDS_TO_END)
            if time.monotonic() >= deadline:
                raise


def _is_news(record: logging.LogRecord) -> bool:
    """Returns whether a log record is news to the caller: each thread or task of a failed save logs the same error again."""
    if record.exc_info and isinstance(record.exc_info[1], GivenUpError):
        return False
    return not ("orbax" in record.pathname and "_SignalingThread.run() raised an exception" in str(record.msg))


def load(folder: Path, abstract: PyTree, seconds: float = SECONDS) -> PyTree:
    """Returns a saved tree with the structure, shapes, dtypes and shardings of ``abstract``; every process must call it.

    Its shapes and dtypes must be the saved ones: Orbax casts silently.
    """
    operation = client().begin(seconds)
    try:
        tree = ocp.load(str(folder), abstract)
    except BaseException:
        operation.give_up()
        raise
    operation.end()
    return tree


def open_array(folder: Path, path: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Returns one array of a saved tree as a TensorStore, which reads what is indexed.

    Args:
        folder: The folder of the tree.
        path: The path of the array in the tree, with slashes.
        shape: The shape that it must have.
        dtype: Its dtype.

    Raises:
        ValueError: There is no such array, or it has another shape or dtype.
    """
    where = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/state/", "path": path.replace("/", ".") + "/"}
    store = tensorstore.open({"driver": "zarr3", "kvstore": where}, open=True, read=True).result()
    if tuple(store.shape) != shape or store.dtype.numpy_dtype != dtype:
        raise ValueError(
            f"a checkpoint's array must be that of its manifest; got {store.dtype.numpy_dtype}{list(store.shape)} for {path} "
            f"in {folder}, where the manifest has {dtype}{list(shape)}. It is damaged: restore a backup."
        )
    return store
