"""What would help a plan most: changes of one setting, of the batch or of the machines, with what each gives and costs.

The gains are quick estimates, without a schedule: of seconds for the same number of tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxpar.inspect.text import bytes_text
from jaxpar.mesh import DATA, TENSOR
from jaxpar.planner.candidate_queue import quick_seconds
from jaxpar.planner.choice import SCHEDULES, Choice
from jaxpar.planner.links import Links

if TYPE_CHECKING:
    from jaxpar.planner.search import Search

COUNT, LEAST = 3, 0.005  # gains to report, and the smallest


@dataclass(frozen=True)
class Gain:
    """What one change gives.

    Attributes:
        change: The change.
        faster: The share of the time by which the same number of tokens takes less.
        more_bytes: The bytes of memory that a device needs more; fewer if negative.
        missing_bytes: The bytes of memory that a device has too little for it, 0 if it fits.
    """

    change: str
    faster: float
    more_bytes: int
    missing_bytes: int = 0

    def __str__(self) -> str:
        more = (
            f"{bytes_text(abs(self.more_bytes))} {'more' if self.more_bytes > 0 else 'less'}" if self.more_bytes else ""
        )
        missing = f"{bytes_text(self.missing_bytes)} too much" if self.missing_bytes else ""
        return ", ".join(filter(None, [f"{self.change}: {self.faster:.0%} faster", more, missing]))

    def as_json(self) -> dict[str, Any]:
        """Returns the gain as plain values."""
        return dict(vars(self))


def gains_of(search: "Search", choice: Choice) -> tuple[Gain, ...]:
    """Returns the changes that would help a choice most, the best first; those that do not fit the memory too."""
    seconds, memory = quick_seconds(search, choice), sum(search.memory(choice, quick=True).values())
    found = []
    for change, other, changed in _changes(search, choice):
        if other.analysis(changed) is None:
            continue
        share = other.batch_size / search.batch_size
        needed = sum(other.memory(changed, quick=True).values())
        missing = max(0, round(needed - search.memory_limit))
        found.append(Gain(change, 1 - quick_seconds(other, changed) / share / seconds, needed - memory, missing))
    # What fits comes first.
    found.sort(key=lambda gain: (gain.missing_bytes > 0, -gain.faster))
    return tuple([gain for gain in found if gain.faster >= LEAST][:COUNT])


def _changes(search: "Search", choice: Choice) -> Iterator[tuple[str, "Search", Choice]]:
    """Yields changes by name, each with the search in which the changed choice is priced."""
    for remat, name in ((False, "no recomputation"), ("dots", "recomputing attention scores alone")):
        if remat != choice.remat and choice.remat is not False:
            yield name, search, replace(choice, remat=remat)
    rows = search.batch_size // choice.data
    for factor in (2, 0.5):
        count = int(choice.num_microbatches * factor)
        if count and rows % count == 0:
            yield f"microbatches of {rows // count} rows", search, replace(choice, num_microbatches=count)
    if choice.stage > 1:
        for name, chunks in (*SCHEDULES, ("interleaved", 4)):
            if name != "gpipe" and chunks * choice.stage <= search.shape.num_layers:
                changed = replace(choice, schedule=name, num_chunks=chunks, layers_per_virtual_stage=None)
                told = f"{name} with {chunks} chunks" if chunks > 1 else name
                yield told, search, search.balanced(changed)
    if choice.zero == 3:
        yield "ZeRO 1", search, replace(choice, zero=1)
    larger = replace(search, batch_size=2 * search.batch_size, _analyses={}, _states=search._states)
    larger._analyses.update(search._analyses)
    yield "twice the batch", larger, replace(choice, num_microbatches=2 * choice.num_microbatches)
    links = Links(search.cluster, choice.mesh.shape, search.assumed.network)
    crossing = {links.crosses(axis) for axis in (TENSOR, DATA) if choice.mesh.shape[axis] > 1}
    for crosses in sorted(crossing):
        field = "network_bandwidth" if crosses else "node_bandwidth"
        faster = replace(search.cluster, **{field: 2 * getattr(search.cluster, field)})
        machines = replace(search, cluster=faster, _analyses=search._analyses, _states=search._states)
        yield f"twice the bandwidth {'between' if crosses else 'inside'} nodes", machines, choice
