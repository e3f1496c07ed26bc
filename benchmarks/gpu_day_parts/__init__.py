"""The parts of gpu_day.py: one module for each question that it asks a GPU, which yields tables as they grow."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any


def measure(part: str, context: Any, *args: str) -> Iterator[Any]:
    """Yields the tables of a part, which is imported when it runs, so that one that cannot be imported fails alone."""
    import jaxpar

    if part != "steps":  # of which some have flags of their own
        jaxpar.initialize()  # XLA's flags for GPUs, as in a training run
    yield from import_module(f"gpu_day_parts.{part}").measure(context, *args)
