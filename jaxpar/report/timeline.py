"""Data of a pipeline's timeline: when each stage runs which op."""

from typing import Any

from jaxpar.schedule import Schedule, simulate
from jaxpar.schedule.render import describe, kind_meanings

MAX_OPS = 4000  # bars that a browser draws without delay


def timeline(
    schedule: Schedule | None, *, timing: str = "lockstep", of_microbatches: int | None = None
) -> dict[str, Any] | None:
    """Returns the ops of a schedule in time as plain values, with F = R = B = W = 1; None if there is no pipeline.

    Args:
        schedule: The schedule; None for a step without one.
        timing: ``"lockstep"`` or ``"free"``, as in ``simulate``.
        of_microbatches: The microbatches of a step, if the schedule has fewer because its steady state repeats.

    Returns:
        "title" and "name" as text; "num_stages", "num_microbatches", "num_chunks" and "splits_backward" of the schedule;
        "of_microbatches" of the step; "meanings": a word for each kind of op. "ops": [stage, kind, microbatch, chunk, start,
        end] of the first ``MAX_OPS`` ops by their start; "num_ops": how many there are; "tick_ends": the ends of the ticks of
        these ops, none if ``timing`` is ``"free"``. "makespan", "bubble_fraction" and "peak_live" of the whole schedule.
    """
    if schedule is None or schedule.num_stages == 1:
        return None
    found = simulate(schedule, timing=timing)
    ops: list[list[Any]] = sorted(
        ([stage, *span.op, span.start, span.end] for stage, order in enumerate(found.spans) for span in order),
        key=lambda op: (op[-2], op[0]),
    )
    shown = ops[:MAX_OPS]
    until = max(end for *_, end in shown)
    return {
        "title": describe(found),
        "name": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "of_microbatches": of_microbatches or schedule.num_microbatches,
        "num_chunks": schedule.num_chunks,
        "splits_backward": schedule.splits_backward,
        "meanings": kind_meanings(schedule),
        "makespan": found.makespan,
        "bubble_fraction": found.bubble_fraction,
        "peak_live": list(found.peak_live),
        "tick_ends": [end for end in found.tick_ends if end <= until],
        "ops": shown,
        "num_ops": len(ops),
    }
