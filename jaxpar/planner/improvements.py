"""The changes that would help a plan most: of one setting, of the batch or of the machines, each with its gain and cost.

The gains are quick estimates, without a schedule, of the seconds for the same number of tokens.
"""

from collections.abc import Iterator
from dataclasses import replace

from jaxpar.mesh import DATA, TENSOR
from jaxpar.planner.candidate_queue import quick_seconds
from jaxpar.planner.choice import SCHEDULES, Choice
from jaxpar.planner.estimator import Estimator
from jaxpar.planner.links import Links
from jaxpar.planner.plans import Gain

COUNT, LEAST = 3, 0.005  # gains to report, and the smallest


def gains_of(estimator: Estimator, choice: Choice) -> tuple[Gain, ...]:
    """Returns the changes that would help a choice most, the best first; changes that do not fit the memory come last."""
    seconds, memory = quick_seconds(estimator, choice), sum(estimator.memory(choice, quick=True).values())
    found = []
    for change, other, changed in _changes(estimator, choice):
        if other.analysis(changed) is None:
            continue
        share = other.batch_size / estimator.batch_size
        needed = sum(other.memory(changed, quick=True).values())
        missing = max(0, round(needed - estimator.memory_limit))
        found.append(Gain(change, 1 - quick_seconds(other, changed) / share / seconds, needed - memory, missing))
    # What fits comes first.
    found.sort(key=lambda gain: (gain.missing_bytes > 0, -gain.faster))
    return tuple([gain for gain in found if gain.faster >= LEAST][:COUNT])


def _changes(estimator: Estimator, choice: Choice) -> Iterator[tuple[str, Estimator, Choice]]:
    """Yields changes by name, each with the estimator that prices the changed choice."""
    for remat, name in ((False, "no recomputation"), ("dots", "recomputing attention scores alone")):
        if remat != choice.remat and choice.remat is not False:
            yield name, estimator, replace(choice, remat=remat)
    rows = estimator.batch_size // choice.data
    for factor in (2, 0.5):
        count = int(choice.num_microbatches * factor)
        if count and rows % count == 0:
            yield f"microbatches of {rows // count} rows", estimator, replace(choice, num_microbatches=count)
    if choice.stage > 1:
        for name, chunks in (*SCHEDULES, ("interleaved", 4)):
            if name != "gpipe" and chunks * choice.stage <= estimator.shape.num_layers:
                changed = replace(choice, schedule=name, num_chunks=chunks, layers_per_virtual_stage=None)
                told = f"{name} with {chunks} chunks" if chunks > 1 else name
                yield told, estimator, estimator.balanced(changed)
    if choice.zero == 3:
        yield "ZeRO 1", estimator, replace(choice, zero=1)
    larger = replace(estimator, batch_size=2 * estimator.batch_size, _analyses={}, _states=estimator._states)
    larger._analyses.update(estimator._analyses)
    yield "twice the batch", larger, replace(choice, num_microbatches=2 * choice.num_microbatches)
    links = Links(estimator.cluster, choice.mesh.shape, estimator.assumed.network)
    crossing = {links.crosses(axis) for axis in (TENSOR, DATA) if choice.mesh.shape[axis] > 1}
    for crosses in sorted(crossing):
        field = "network_bandwidth" if crosses else "node_bandwidth"
        faster = replace(estimator.cluster, **{field: 2 * getattr(estimator.cluster, field)})
        machines = replace(estimator, cluster=faster, _analyses=estimator._analyses, _states=estimator._states)
        yield f"twice the bandwidth {'between' if crosses else 'inside'} nodes", machines, choice
