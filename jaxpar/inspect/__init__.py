"""The cost of a compiled step: collectives by mesh axis, bytes, memory and FLOPs, read from the program itself.

    report = inspect_step(train_step, state, batch)     # compiles, runs nothing
    print(report.render())
    assert_collectives(report, {("all-reduce", "data"): 1})

It works for any jitted function, from jaxpar or not. Read the files in this order: `step.py` (the entry point, comparisons),
`hlo.py` (the text as computations, and how often each runs), `groups.py` (devices to mesh axes), `collectives.py`, `costs.py`
(operations and bytes), `gpu.py` (copies, waits, overlap and time on GPUs), `report.py` with `text.py`.
"""

from jaxpar.inspect.collectives import Collective, line_bytes, link_bytes
from jaxpar.inspect.gpu import GpuProgram
from jaxpar.inspect.report import Memory, StepReport, WholeArray
from jaxpar.inspect.step import Comparison, assert_collectives, compare, inspect_step

__all__ = [
    "Collective",
    "Comparison",
    "GpuProgram",
    "Memory",
    "StepReport",
    "WholeArray",
    "assert_collectives",
    "compare",
    "inspect_step",
    "line_bytes",
    "link_bytes",
]
