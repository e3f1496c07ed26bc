"""Writes the timeline of a schedule as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from jaxpar.schedule.render import headline, kind_meanings, op_label
from jaxpar.schedule.simulate import UNIT_COSTS, Costs, Timeline, simulate
from jaxpar.schedule.table import Schedule


def write_trace(
    schedule: Schedule,
    path: str | PathLike[str],
    *,
    costs: Costs = UNIT_COSTS,
    timing: str = "free",
    seconds_per_unit: int | float = 1e-3,
) -> None:
    """Writes the timeline as JSON in the Trace Event Format: a thread per stage, a slice per op, a counter of activations.

    Args:
        schedule: The schedule, which is checked first.
        path: The file, which is overwritten if it exists.
        costs: The times of ops and of messages between stages.
        timing: ``"free"`` or ``"lockstep"``, as in ``simulate``.
        seconds_per_unit: The seconds in the trace of a cost of 1.
    """
    timeline = simulate(schedule, costs, timing=timing)
    microseconds = 1e6 * seconds_per_unit
    events = [*_names(timeline), *_slices(timeline, microseconds), *_counters(timeline, microseconds)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(timeline: Timeline) -> Iterator[dict]:
    """Yields the events that name the rows in the viewer."""
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": headline(timeline)}}
    for stage in range(timeline.schedule.num_stages):
        yield {"ph": "M", "pid": 0, "tid": stage, "name": "thread_name", "args": {"name": f"stage {stage}"}}
        yield {"ph": "M", "pid": 0, "tid": stage, "name": "thread_sort_index", "args": {"sort_index": stage}}


def _slices(timeline: Timeline, microseconds: float) -> Iterator[dict]:
    """Yields one complete event per op."""
    meanings = kind_meanings(timeline.schedule)
    for stage, order in enumerate(timeline.spans):
        for span in order:
            yield {
                "ph": "X",
                "pid": 0,
                "tid": stage,
                "name": op_label(timeline.schedule, span.op),
                "cat": meanings[span.op.kind],
                "ts": span.start * microseconds,
                "dur": (span.end - span.start) * microseconds,
                "args": {
                    "microbatch": span.op.microbatch,
                    "chunk": span.op.chunk,
                    "virtual_stage": timeline.schedule.virtual_stage(stage, span.op.chunk),
                },
            }


def _counters(timeline: Timeline, microseconds: float) -> Iterator[dict]:
    """Yields the number of activations on each stage whenever it changes."""
    last = "W" if timeline.schedule.splits_backward else "B"
    for stage, order in enumerate(timeline.spans):
        live = 0
        for span in order:
            if span.op.kind not in ("F", last):
                continue
            live += 1 if span.op.kind == "F" else -1
            time = span.start if span.op.kind == "F" else span.end
            yield {
                "ph": "C",
                "pid": 0,
                "name": f"live activations, stage {stage}",
                "ts": time * microseconds,
                "args": {"live": live},
            }
