"""Parameters of a test: every combination, of which a few run each time and the others in the slow run."""

import itertools
from collections.abc import Iterable

import pytest


def covering(chosen: Iterable[tuple], *values: Iterable) -> list:
    """Returns every combination of the values as a parameter; those that are not ``chosen`` are marked slow.

    Args:
        chosen: Combinations that have each value at least once.
        values: What each argument may be.
    """
    every, chosen = list(itertools.product(*values)), list(chosen)
    assert all(each in every for each in chosen), f"{chosen} must be of {every}"
    return [pytest.param(*each, marks=() if each in chosen else pytest.mark.slow) for each in every]
