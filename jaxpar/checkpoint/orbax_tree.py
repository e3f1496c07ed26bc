"""A tree of arrays on disk. Orbax writes and reads it; no other module knows Orbax."""

import logging
from collections.abc import Callable
from pathlib import Path

from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp


def save_async(folder: Path, tree: PyTree) -> Callable[[], None]:
    """Begins to write a tree to a new folder, and returns once the arrays are copied, so that they may be donated.

    Returns a function that waits until all is written, and raises what went wrong.

    Every process must call it, and writes what its devices hold. The folder appears when all is written.
    """
    logging.getLogger("absl").addFilter(_is_news)
    return ocp.save_async(str(folder), tree).result


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the log says what the caller does not hear: each thread of a failed save logs the one error anew."""
    return not ("orbax" in record.pathname and "_SignalingThread.run() raised an exception" in str(record.msg))


def load(folder: Path, abstract: PyTree) -> PyTree:
    """Returns a saved tree with the structure, shapes, dtypes and shardings of ``abstract``; every process must call it.

    Its shapes and dtypes must be the saved ones: Orbax casts in silence.
    """
    return ocp.load(str(folder), abstract)
