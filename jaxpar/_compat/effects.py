"""What an equation does beside its outputs."""

from typing import Any

_OF_REFERENCES = (
    "InternalMutableArrayEffect",
    "ReadEffect",
    "WriteEffect",
    "AccumEffect",
)
_OF_COLLECTIVES = "NamedAxisEffect"  # that it names a mesh axis


def _effects(equation: Any) -> set[str]:
    return {type(effect).__name__ for effect in equation.effects}


def has_reference_effects(equation: Any) -> bool:
    """Returns whether an equation makes, reads or writes a ``jax.new_ref``."""
    return not _effects(equation).isdisjoint(_OF_REFERENCES)


def has_side_effects(equation: Any) -> bool:
    """Returns whether an equation has side effects, such as those of ``jax.debug.print``; that it names an axis is none."""
    return bool(_effects(equation) - {_OF_COLLECTIVES})
