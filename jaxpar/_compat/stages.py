"""Compiled functions."""

from typing import Any

import jax


class CompiledCopy(jax.stages.Compiled):
    """A compiled function that behaves as another one does; a subclass changes some of it.

    Args:
        compiled: What JAX has compiled.
    """

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        for name, value in _attributes(compiled).items():
            setattr(self, name, value)


def _attributes(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Returns all attributes; JAX keeps some in slots, and a subclass of its own has others."""
    attributes = dict(vars(compiled))
    for name in jax.stages.Compiled.__slots__:
        if hasattr(compiled, name):
            attributes[name] = getattr(compiled, name)
    return attributes
