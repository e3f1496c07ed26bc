"""Pipeline schedules as plain data, without JAX.

`table.py` defines a schedule and its rules, and which stage holds which virtual stage; `orders.py` the named schedules.
`simulate.py` computes their times and memory, and `draw.py` draws their timelines: as text, as a picture, for Perfetto, and as
plain values for a report.
"""

from jaxpar.schedule.draw import plot_timeline, render, timeline_data, write_trace
from jaxpar.schedule.orders import (
    FORMS,
    NAMED,
    NUM_CHUNKS,
    PLACEMENT,
    SCHEDULES,
    check_schedule_name,
    lockstep_form,
    make_schedule,
)
from jaxpar.schedule.simulate import TIMINGS, Costs, Span, Timeline, simulate
from jaxpar.schedule.table import KINDS, PLACEMENTS, Op, Schedule, check_sizes, stage_and_chunk

__all__ = [
    "FORMS",
    "KINDS",
    "NAMED",
    "NUM_CHUNKS",
    "PLACEMENT",
    "PLACEMENTS",
    "SCHEDULES",
    "TIMINGS",
    "Costs",
    "Op",
    "Schedule",
    "Span",
    "Timeline",
    "check_schedule_name",
    "check_sizes",
    "lockstep_form",
    "make_schedule",
    "plot_timeline",
    "render",
    "simulate",
    "stage_and_chunk",
    "timeline_data",
    "write_trace",
]
