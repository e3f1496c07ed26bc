"""Pipeline parallelism.

From a Schedule to the loop that runs it: `layout.py` assigns layers to stages and chunks; `program.py` compiles the Schedule to
tables of integers; `buffers.py` stores values between the ops of a stage; `messages.py` sends them between stages;
`executor.py` runs the tables in one loop over ticks, in which `stage.py` runs the ops of a stage. `jaxpar/backward/split.py`
splits a layer into the functions of these ops, and `ends.py` does the same for embedding and head.

`outer.py` shards the params of embedding and head, `memory.py` estimates bytes before compilation, `deadlock.py` finds a step
that would never end. `mpmd/` is the other executor of a Schedule.
"""

from jaxpar.pipeline.deadlock import check_permutes
from jaxpar.pipeline.executor import accumulate_pipelined, masks_idle_ops
from jaxpar.pipeline.layout import LayerLayout, check_layout, on_packed, open_params
from jaxpar.pipeline.memory import buffer_bytes
from jaxpar.pipeline.mpmd import MpmdExecutor
from jaxpar.pipeline.outer import stage_specs, sum_over_stages
from jaxpar.pipeline.program import Program, compile_schedule

__all__ = [
    "LayerLayout",
    "MpmdExecutor",
    "Program",
    "accumulate_pipelined",
    "buffer_bytes",
    "check_layout",
    "check_permutes",
    "compile_schedule",
    "masks_idle_ops",
    "on_packed",
    "open_params",
    "stage_specs",
    "sum_over_stages",
]
