"""The names of mesh axes that collectives may name."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

from jax._src.core import extend_axis_env_nd


def axes_named(sizes: Mapping[str, int]) -> AbstractContextManager:
    """Returns the context in which a function may be traced that sends over axes of these sizes, as in ``jax.shard_map``."""
    return extend_axis_env_nd([*sizes.items()])
