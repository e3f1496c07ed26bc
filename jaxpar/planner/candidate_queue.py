"""The candidates of a search, the fastest first by a quick estimate; their memory is estimated only when their turn comes.

An estimate of the computation needs no state and no slots. The memory that a choice needs, the ZeRO level and the
recomputation with which it fits, and its collectives over ``data`` are computed only for the few choices whose estimate becomes
the lowest.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from jaxpar.planner.choice import Choice, held_or
from jaxpar.planner.estimator import Estimator

SURPLUS = 1.02  # a quick memory estimate up to this factor above the limit may still fit


def likely_choices(
    estimator: Estimator, fixed: dict[str, Any], is_done: Callable[[int | float, Choice], bool]
) -> Iterator[tuple[int | float, Choice]]:
    """Yields the choices that seem to fit, each with a quick estimate of its seconds, in ascending order.

    Recomputation is tried only if the choice does not fit without it, and of complete layers only if that of attention
    scores is not enough.

    Args:
        estimator: Estimates memory and time.
        fixed: Fixed settings, by name.
        is_done: Whether the search has no use for a choice that takes at least so many seconds.
    """
    numbers, heap = count(), []

    def push(seconds: int | float, choice: Choice, others: list[Choice], is_known: bool) -> None:
        heapq.heappush(heap, (seconds, next(numbers), choice, others, is_known))

    def push_first(recomputing: list[Choice]) -> None:
        if recomputing and estimator.analysis(recomputing[0]) is not None:
            choice = estimator.balanced(recomputing[0])
            push(_seconds_alone(estimator, choice), choice, recomputing[1:], False)

    by_rest: dict[Choice, list[Choice]] = {}
    for choice in estimator.divided(fixed):
        by_rest.setdefault(replace(choice, remat=False), []).append(choice)
    for recomputing in by_rest.values():
        push_first(recomputing)
    while heap:
        seconds, _, choice, others, is_known = heapq.heappop(heap)
        if is_known:
            yield seconds, choice
        elif not is_done(seconds, choice):
            levels = (1, 2, 3) if choice.data > 1 else (0,)  # level 0 sends as much as level 1 and needs more memory
            tried = [replace(choice, zero=zero) for zero in held_or(fixed, "zero", levels)]
            fits = next((each for each in tried if _seems_to_fit(estimator, each, SURPLUS)), None)
            if fits:
                push(seconds + _seconds_of_data(estimator, fits), fits, [], True)
            if fits is None or fits != tried[0] or not _seems_to_fit(estimator, fits, 1 / SURPLUS):
                push_first(others)


def quick_seconds(estimator: Estimator, choice: Choice) -> int | float:
    """Returns an estimate of the seconds of a step, without a schedule."""
    return _seconds_alone(estimator, choice) + _seconds_of_data(estimator, choice)


def _seconds_alone(estimator: Estimator, choice: Choice) -> int | float:
    """The part of the estimate that needs no state: without collectives over ``data``."""
    return estimator.prices(choice).likely(ideal=estimator.executor == "mpmd")


def _seconds_of_data(estimator: Estimator, choice: Choice) -> int | float:
    return estimator.prices(choice).exposed_data(estimator.traffic(choice, messages=False))


def _seems_to_fit(estimator: Estimator, choice: Choice, share: float) -> bool:
    """Returns whether a choice seems to need no more than a share of the memory."""
    if sum(estimator.at_rest(choice).bytes.values()) > estimator.memory_limit:
        return False
    return sum(estimator.memory(choice, quick=True).values()) <= share * estimator.memory_limit
