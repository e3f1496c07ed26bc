"""The candidates of a search, the fastest first by a quick estimate, held against the memory only when their turn comes.

An estimate of the computation needs no state and no slots. What memory a choice needs, the ZeRO level and the recomputation
with which it fits, and its collectives over ``data`` are computed when no other candidate has a lower estimate, so for few.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from jaxpar.planner.choice import Choice, held_or
from jaxpar.planner.memory import step_memory
from jaxpar.planner.step_time import Prices
from jaxpar.planner.traffic import step_traffic

if TYPE_CHECKING:
    from jaxpar.planner.search import Search

SURPLUS = 1.02  # a quick memory estimate up to this factor above the limit may still fit


def likely_choices(
    search: "Search", fixed: dict[str, Any], is_done: Callable[[int | float, Choice], bool]
) -> Iterator[tuple[int | float, Choice]]:
    """Yields the choices that seem to fit, each with a quick estimate of its seconds, in ascending order.

    Recomputation is tried only if the choice does not fit without it, and of complete layers only if that of attention
    scores is not enough.

    Args:
        search: The search.
        fixed: Fixed settings, by name.
        is_done: Whether the search has no use for a choice that takes at least so many seconds.
    """
    numbers, heap = count(), []

    def push(seconds: int | float, choice: Choice, others: list[Choice], is_known: bool) -> None:
        heapq.heappush(heap, (seconds, next(numbers), choice, others, is_known))

    def push_first(recomputing: list[Choice]) -> None:
        if recomputing and search.analysis(recomputing[0]) is not None:
            choice = search.balanced(recomputing[0])
            push(_seconds_alone(search, choice), choice, recomputing[1:], False)

    by_rest: dict[Choice, list[Choice]] = {}
    for choice in search.divided(fixed):
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
            fits = next((each for each in tried if _seems_to_fit(search, each, SURPLUS)), None)
            if fits:
                push(seconds + _seconds_of_data(search, fits), fits, [], True)
            if fits is None or fits != tried[0] or not _seems_to_fit(search, fits, 1 / SURPLUS):
                push_first(others)


def quick_seconds(search: "Search", choice: Choice) -> int | float:
    """Returns an estimate of the seconds of a step, without a schedule."""
    return _seconds_alone(search, choice) + _seconds_of_data(search, choice)


def _seconds_alone(search: "Search", choice: Choice) -> int | float:
    """The part of the estimate that needs no state: without collectives over ``data``."""
    return _prices(search, choice).likely(ideal=search.executor == "mpmd")


def _seconds_of_data(search: "Search", choice: Choice) -> int | float:
    analysis = search.analysis(choice)
    assert analysis is not None
    sent = step_traffic(choice, analysis, search.at_rest(choice), messages=False)
    return _prices(search, choice).exposed_data(sent)


def _prices(search: "Search", choice: Choice) -> Prices:
    analysis = search.analysis(choice)
    assert analysis is not None
    return Prices(choice, analysis, search.cluster, search.assumed, search.software)


def _seems_to_fit(search: "Search", choice: Choice, share: float) -> bool:
    """Returns whether a choice seems to need no more than a share of the memory."""
    analysis, at_rest = search.analysis(choice), search.at_rest(choice)
    assert analysis is not None
    if sum(at_rest.bytes.values()) > search.memory_limit:
        return False
    return sum(step_memory(choice, analysis, at_rest, quick=True).values()) <= share * search.memory_limit
