"""All of pipeline parallelism.

Read in this order: `layout.py` says where each layer lives, `outer.py` where the embedding and the head do; `split.py` cuts
a layer's backward pass in two, by the minimum cut of `cut.py`; `ends.py` does the like for embedding and head; `program.py`
compiles a Schedule to tables of integers; `buffers.py` holds what waits on a stage, `messages.py` sends it on; `executor.py`
runs the tables in one scan over ticks; `memory.py` tells beforehand what that takes.

The other executor walks the Schedule itself: `free.py`, which calls the jitted ops of `parts.py`, made of `loops.py` (the
layers of a part). `at_rest.py` brings params to their stages and gradients back, by means of `submeshes.py`.
"""

from jaxpar.pipeline.executor import accumulate_pipelined
from jaxpar.pipeline.free import FreeExecutor
from jaxpar.pipeline.layout import LayerLayout, check_layout
from jaxpar.pipeline.memory import buffer_bytes
from jaxpar.pipeline.outer import stage_specs, sum_over_stages
from jaxpar.pipeline.program import Program, compile_schedule

__all__ = [
    "FreeExecutor",
    "LayerLayout",
    "Program",
    "accumulate_pipelined",
    "buffer_bytes",
    "check_layout",
    "compile_schedule",
    "stage_specs",
    "sum_over_stages",
]
