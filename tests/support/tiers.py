"""Which cases of a test are of `make test`, and which of `make test-all` alone (the mark `full`)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

PARAM = type(pytest.param())


def quick(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns the cases for ``pytest.mark.parametrize``, all but the kept ones marked ``full``.

    Args:
        cases: Values, tuples of values, or what ``pytest.param`` makes of them.
        kept: Which are of `make test`, by value; by place where cases have several values.
    """
    return [case if _is_one_of(kept, place, case) else full(case) for place, case in enumerate(cases)]


def without(cases: Iterable[Any], *costly: Any) -> list[Any]:
    """Returns the cases likewise, the costly ones marked ``full``."""
    return [full(case) if _is_one_of(costly, place, case) else case for place, case in enumerate(cases)]


def full(case: Any) -> Any:
    """Returns a case marked ``full``."""
    if isinstance(case, PARAM):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.full], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)


def _is_one_of(some: Collection[Any], place: int, case: Any) -> bool:
    values = case.values if isinstance(case, PARAM) else case if isinstance(case, tuple) else (case,)
    return (place if len(values) > 1 else values[0]) in some
