"""Which cases of a test are of `make test`, which of `make test-all` alone (`full`), which of `make check-slow` (`slow`)."""

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
    cases = list(cases)
    places = _places_of(kept, cases)
    slow = [case for case in map(cases.__getitem__, places) if _is_slow(case)]
    assert not slow, f"a case of `make test` must not be slow; got {slow}"
    return [case if place in places else full(case) for place, case in enumerate(cases)]


def without(cases: Iterable[Any], *costly: Any) -> list[Any]:
    """Returns the cases likewise, the costly ones marked ``full``."""
    cases = list(cases)
    places = _places_of(costly, cases)
    return [full(case) if place in places else case for place, case in enumerate(cases)]


def full(case: Any) -> Any:
    """Returns a case marked ``full``."""
    if isinstance(case, PARAM):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.full], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)


def cases_of_make_test(test: Any) -> list[tuple[Any, ...]]:
    """Returns the values of the cases of a parametrized test that are of `make test`."""
    found: list[tuple[Any, ...]] = []
    for mark in test.pytestmark:
        for case in mark.args[1] if mark.name == "parametrize" else ():
            case = case if isinstance(case, PARAM) else pytest.param(*case)
            if {each.name for each in case.marks}.isdisjoint(("full", "slow")):
                found.append(tuple(case.values))
    return found


def leave_to_slow(items: Iterable[pytest.Item]) -> None:
    """Marks ``slow`` what a test has of ``full`` cases beyond the first so many, where it is marked ``few(so_many)``."""
    left: dict[str, int] = {}
    for item in items:
        few, marks = item.get_closest_marker("few"), {mark.name for mark in item.iter_markers()}
        if few is None or "slow" in marks or "full" not in marks:
            continue
        test = item.nodeid.partition("[")[0]
        left[test] = left.get(test, few.args[0]) - 1
        if left[test] < 0:
            item.add_marker("slow")


def _places_of(some: Collection[Any], cases: list[Any]) -> set[int]:
    """Returns the places of some cases, each of which must be there once: else a test would leave a tier unnoticed."""
    names = [_name_of(place, case) for place, case in enumerate(cases)]
    wrong = [each for each in some if names.count(each) != 1]
    assert not wrong, f"each must be one of {names}; got {wrong}"
    return {names.index(each) for each in some}


def _name_of(place: int, case: Any) -> Any:
    values = (
        case.values if isinstance(case, PARAM) else case if isinstance(case, tuple) else (case,)
    )
    return place if len(values) > 1 else values[0]


def _is_slow(case: Any) -> bool:
    return isinstance(case, PARAM) and "slow" in {mark.name for mark in case.marks}
