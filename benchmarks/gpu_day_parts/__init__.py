"""The parts of gpu_day.py: one module for each question that it asks a GPU, which yields tables as they grow."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any


def _measure(module: str) -> Callable[[], Callable[[Any], Iterator[Any]]]:
    """Returns what imports a part when it runs, so that one that cannot be imported fails alone."""
    return lambda: import_module(f"gpu_day_parts.{module}").measure


PARTS = {
    name: _measure(name) for name in ("training", "gradients", "pipelines", "attention", "host_waits", "checkpoints")
}
