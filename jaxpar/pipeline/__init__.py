"""All of pipeline parallelism.

Five files lead from a Schedule to the scan that runs it: `layout.py` says where each layer lives; `program.py` compiles the
Schedule to tables of integers; `buffers.py` holds what waits on a stage, `messages.py` sends it on; `executor.py` runs the
tables in one scan over ticks. What a stage runs of a layer comes from `jaxpar/backward/split.py`.

Beside them: `ends.py` does for embedding and head what `split.py` does for layers, `outer.py` says where their params lie,
`memory.py` tells bytes beforehand, `permutes.py` finds a step that would wait for ever. `free/` is the other executor of the
same tables.
"""

from jaxpar.pipeline.executor import accumulate_pipelined
from jaxpar.pipeline.layout import LayerLayout, check_layout, on_packed, open_params
from jaxpar.pipeline.memory import buffer_bytes
from jaxpar.pipeline.mpmd import MpmdExecutor
from jaxpar.pipeline.outer import stage_specs, sum_over_stages
from jaxpar.pipeline.permutes import check_permutes
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
    "on_packed",
    "open_params",
    "stage_specs",
    "sum_over_stages",
]
