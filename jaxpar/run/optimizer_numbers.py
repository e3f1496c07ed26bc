"""The numbers in the init and update of an optimizer, by which a run that resumes compares it with the saved one.

saved    optax.adam(1e-3)    0.9, 0.999, 1e-08, -0.001
now      optax.adam(1e-2)    0.9, 0.999, 1e-08, -0.01
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar._compat import constants, digests_of_outputs, literals
from jaxpar.checkpoint.state import as_numbers
from jaxpar.data.checksums import checksum
from jaxpar.fields import brief
from jaxpar.runtime.output import printable
from jaxpar.step.optimizer_state import first_update

MOST = 200  # numbers that are kept, each once; a checksum is of all
SHOWN = 4


def numbers_of(optimizer: Any, params: PyTree) -> dict[str, Any] | None:
    """Returns the numbers in an optimizer's init and update for these params; None where it cannot be traced alone.

    Args:
        optimizer: An optax optimizer.
        params: Arrays or ShapeDtypeStructs.
    """

    def update(params: PyTree, grads: PyTree) -> PyTree:
        return first_update(optimizer, params, grads)

    try:
        traced, made = jax.make_jaxpr(update, return_shape=True)(params, params)
    except Exception:  # of any kind: an optimizer is a function of the user
        return None
    num_updates = len(jax.tree.leaves(made[0]))
    updates = digests_of_outputs(traced, has_values=True)[:num_updates]
    structure = digests_of_outputs(traced, has_values=False)[:num_updates]

    values = as_numbers([*literals(traced), *constants(traced)])
    found = [_text(np.asarray(value)) for value in values]
    counts = Counter(found)
    return {
        "checksum": _checksum_of(found),
        "updates": _checksum_of(updates),
        "structure": _checksum_of(structure),
        "numbers": [*counts][:MOST],
        "counts": [*counts.values()][:MOST],
    }


def is_told(
    saved: Mapping[str, Any], now: Mapping[str, Any], kept: Mapping[str, tuple[Any, Any]]
) -> bool:
    """Returns whether two optimizers have other numbers only where the state keeps the saved ones.

    Args:
        saved: The numbers of the saved optimizer, as ``numbers_of`` returns them.
        now: Those of the optimizer of this run.
        kept: Pairs of numbers that the state keeps, as ``kept_numbers`` returns them.
    """
    if saved.get("structure", now["structure"]) != now["structure"]:
        return False
    new, old = numbers_apart(saved, now)
    told = {_text(number) for pair in kept.values() for number in pair}
    apart = {*new, *old}
    return bool(apart) and apart <= told


def _checksum_of(texts: Iterable[str]) -> str:
    return checksum([np.frombuffer(" ".join(texts).encode(), np.uint8)])


def _text(value: np.ndarray) -> str:
    return str(value[()]) if value.ndim == 0 else checksum([value])


def other_numbers(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns how the numbers of two optimizers differ, as text.

    Args:
        saved: The numbers of the saved optimizer, as ``numbers_of`` returns them.
        now: Those of the optimizer of this run.
    """
    new, old = numbers_apart(saved, now)
    is_new = bool(new) and not old
    if not (new and old):
        new, old = _more_often(now, saved), _more_often(saved, now)
    if not new and not old:
        return "its update has the same numbers in other places, or other operations"

    def listed(numbers: list[str]) -> str:
        more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
        return printable(brief(", ".join(numbers[:SHOWN]))) + more

    if new and old:
        return (
            f"its update computes with {listed(new)} where that of the saved one has {listed(old)}"
        )
    if is_new:
        return f"its update computes with {listed(new)}, which that of the saved run does not have"
    how = f"{listed(new)} more" if new else f"{listed(old)} less"
    return f"its update computes with {how} often than that of the saved run"


def numbers_apart(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the numbers that only the optimizer of now has, and those that only the saved one has."""
    kept = then.get("numbers")
    old = list(map(str, kept)) if isinstance(kept, list) else []
    new = now["numbers"]
    only_new = [each for each in new if each not in old]
    only_old = [each for each in old if each not in new]
    return only_new, only_old


def _more_often(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the numbers that one optimizer has more often than another."""
    more = _counted(one) - _counted(other)
    return [*more]


def _counted(optimizer: Mapping[str, Any]) -> Counter[str]:
    numbers, counts = (optimizer.get(name) for name in ("numbers", "counts"))
    if not isinstance(numbers, list):
        return Counter()
    counts = counts if isinstance(counts, list) else [1] * len(numbers)
    return Counter(dict(zip(map(str, numbers), counts, strict=False)))


def follow_steps(new: list[str], old: list[str], saved_steps: int, steps: int) -> bool:
    """Returns whether numbers differ as the numbers of steps do: by as much, or by the same factor.

    Args:
        new: The numbers that only the optimizer of this run has.
        old: Those that only the saved one has.
        saved_steps: The steps of the saved run.
        steps: Those of this run.
    """
    if steps == saved_steps:
        return False
    pairs = ((a, b) for a in map(_number, new) for b in map(_number, old) if b)
    return any(a - b == steps - saved_steps or a * saved_steps == b * steps for a, b in pairs)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # the checksum of an array
        return math.nan
