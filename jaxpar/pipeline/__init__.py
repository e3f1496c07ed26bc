"""Pipeline parallelism.

From a Schedule to the loops that run it: `layout.py` assigns layers to stages and chunks. `program.py` compiles the Schedule to
tables of integers, from the time of each op (`timetable.py`) and the lives of values in buffers (`slots.py`). `executor.py`
runs the tables in loops over ticks: `build_stage.py` prepares a stage, `stage.py` runs its ops, skips them (`control_flow.py`)
or masks them (`masks.py`), `layer_loop.py` runs them over layers, `merged_tick.py` runs F and B in one such loop,
`layer_grads.py` adds and reduces their gradients, `buffers.py` stores values between ops, `messages.py` sends them between
stages.
`jaxpar/backward/split.py` splits a layer into the functions of these ops, `embed_and_head.py` embedding and head.

`outer.py` shards the params of embedding and head, `memory.py` estimates bytes before compilation, `deadlock.py` finds a step
that would never end. `mpmd/` is the other executor of a Schedule.
"""

from jaxpar.pipeline.deadlock import check_permutes
from jaxpar.pipeline.executor import accumulate_pipelined, masks_idle_ops
from jaxpar.pipeline.layout import LayerLayout, check_layout, on_packed, open_params
from jaxpar.pipeline.memory import buffer_bytes
from jaxpar.pipeline.mpmd import MpmdExecutor
from jaxpar.pipeline.outer import stage_specs, sum_over_stages
from jaxpar.pipeline.program import Program, compile_schedule, join_backward, spmd_program

__all__ = [
    "LayerLayout",
    "MpmdExecutor",
    "Program",
    "accumulate_pipelined",
    "buffer_bytes",
    "check_layout",
    "check_permutes",
    "compile_schedule",
    "join_backward",
    "masks_idle_ops",
    "on_packed",
    "open_params",
    "spmd_program",
    "stage_specs",
    "sum_over_stages",
]
