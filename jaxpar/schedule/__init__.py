"""Pipeline schedules as plain data, without JAX.

`table.py` defines a schedule and its rules, and which stage holds which virtual stage; `orders.py` the named schedules.
`simulate.py` computes their times and memory. `render.py` (text), `plot.py` (pictures) and `trace.py` (Perfetto)
show their timelines.
"""

from jaxpar.schedule.orders import FORMS, SCHEDULES, check_schedule_name, lockstep_form, make_schedule
from jaxpar.schedule.plot import plot_timeline
from jaxpar.schedule.render import render
from jaxpar.schedule.simulate import TIMINGS, Costs, Span, Timeline, simulate
from jaxpar.schedule.table import KINDS, PLACEMENTS, Op, Schedule, check_placement, check_sizes, stage_and_chunk
from jaxpar.schedule.trace import write_trace

__all__ = [
    "FORMS",
    "KINDS",
    "PLACEMENTS",
    "SCHEDULES",
    "TIMINGS",
    "Costs",
    "Op",
    "Schedule",
    "Span",
    "Timeline",
    "check_placement",
    "check_schedule_name",
    "check_sizes",
    "lockstep_form",
    "make_schedule",
    "plot_timeline",
    "render",
    "simulate",
    "stage_and_chunk",
    "write_trace",
]
