"""Pipeline parallelism.

From a Schedule to the loops that run it: `layout.py` assigns layers to stages and chunks. `program.py` compiles the Schedule to
tables of integers, from the time of each op and the lives of values in buffers (`timetable.py`), with its ticks in runs of the
same ops (`segments.py`). `executor.py` prepares a stage
and runs the tables in loops over ticks: `stage.py` runs its ops, which are skipped or masked where it is idle
(`control_flow.py`), `layer_ops.py` runs them on layers, of which `layer.py` has the functions, in the loops of `layer_loop.py`,
which add the gradients. `buffers.py` stores values between ops and sends them between stages. `one_stage.py` runs F and B of
each microbatch in turn where there is one stage, without tables.
`jaxpar/backward/split.py` splits a layer into the functions of these ops, `embed_and_head.py` embedding and head, of which
`head_parts.py` proves that the stages may share it.

`mpmd.py` is the other executor of a Schedule: it calls the ops of `mpmd_stages.py`, which `mpmd_programs.py` jits, and
`mpmd_params.py` moves params to the stages and gradients back.
"""

from jaxpar.pipeline.control_flow import check_permutes
from jaxpar.pipeline.embed_and_head import stage_specs, sum_over_stages
from jaxpar.pipeline.executor import accumulate_pipelined, build_stage, masks_idle_ops
from jaxpar.pipeline.layout import LayerLayout, close_params, fitting_layout, open_params
from jaxpar.pipeline.mpmd import MpmdExecutor
from jaxpar.pipeline.program import Program, compile_schedule, join_backward, spmd_program

__all__ = [
    "LayerLayout",
    "MpmdExecutor",
    "Program",
    "accumulate_pipelined",
    "build_stage",
    "check_permutes",
    "close_params",
    "compile_schedule",
    "fitting_layout",
    "join_backward",
    "masks_idle_ops",
    "open_params",
    "spmd_program",
    "stage_specs",
    "sum_over_stages",
]
