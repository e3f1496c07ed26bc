"""The search over meshes and settings, which returns the best plan of each mesh.

Candidates are visited in the order of a quick estimate, until the estimates are far from the plans found. For each mesh the
most promising settings are priced, and the best meshes are priced again in full. gpipe is left out unless it is fixed: 1f1b
takes as long and needs less memory.
"""

from collections import Counter
from typing import Any

from jaxpar.planner.candidate_queue import likely_choices
from jaxpar.planner.choice import Choice
from jaxpar.planner.estimator import Estimator
from jaxpar.planner.plans import Plan

SLACK, TRIES = 1.1, 2  # trust in the quick estimate; how many settings of a mesh are priced


def best_plans(estimator: Estimator, fixed: dict[str, Any], top: int) -> list[Plan]:
    """Returns the plans of the fastest meshes, at most ``top``, the fastest first."""
    found: dict[tuple, Plan] = {}
    tried: Counter[tuple] = Counter()
    mesh_of = lambda choice: tuple(choice.mesh.shape.values())

    def is_done(seconds: int | float, choice: Choice) -> bool:
        times = sorted(each.step_seconds for each in found.values())
        return tried[mesh_of(choice)] >= TRIES or (len(times) >= top and seconds > SLACK * times[top - 1])

    for likely, choice in likely_choices(estimator, fixed, is_done):
        if is_done(likely, choice):
            continue
        priced, mesh = estimator.price(choice, quick=True), mesh_of(choice)
        tried[mesh] += priced is not None
        if priced and (mesh not in found or _rank(priced) < _rank(found[mesh])):
            found[mesh] = priced
    quick = sorted(found.values(), key=_rank)[: top + 2]
    return sorted(filter(None, (estimator.price(each.choice) for each in quick)), key=_rank)[:top]


def _rank(plan: Plan) -> tuple:
    """Returns a plan's sort key: its step time to three digits, then its memory."""
    return float(f"{plan.step_seconds:.3g}"), plan.memory_bytes
