"""Memory and step time of a training job, estimated before compiling it or renting GPUs, and tested against the compiler.

    plans = jaxpar.plan("bloom-176b", jaxpar.planner.cluster("a100-80gb", num_nodes=48), batch_size=2048)
    print(jaxpar.planner.render(plans))

The package is not called `plan`, so that `jaxpar.plan` names only the function. Read the files in this order: `cluster.py` (the
machines, and the seconds of collectives on them), `model_shape.py` (the model, as shapes and as graphs) with `shape_checks.py`
(whether they fit one another), `job.py` (a choice of settings, and what other training software does differently), `fused.py`,
`kernels.py` and `kernel_seconds.py` (the kernels of an op and their seconds), `op_traffic.py` (what an op sends), `ops.py` (the
work of the ops of a layer, sharded by `jaxpar/backward/partition.py`), `guesses.py` (of what it is not known how XLA shards
it), `state.py` (the state between steps), `memory.py` (bytes on a device), `traffic.py` (bytes sent), `step_time.py` (the
seconds of a step), `plans.py` (the result, as text), `candidates.py` (meshes and settings to try), `search.py` (the best plan
of each mesh), `fixed.py` (settings that a caller fixes), `ranking.py` (the public functions, and what would help a plan),
`no_plan.py` (why none fits). `compiled.py` compiles a choice, and bounds the time of a step that was compiled for GPUs.
"""

from jaxpar.planner.cluster import GPUS, Cluster, cluster
from jaxpar.planner.compiled import Roofline, roofline
from jaxpar.planner.job import Assumptions, Choice, Software
from jaxpar.planner.model_shape import ModelShape, transformer_shape
from jaxpar.planner.plans import Plan, render
from jaxpar.planner.ranking import plan, price
from jaxpar.planner.step_time import StepTime

__all__ = [
    "GPUS",
    "Assumptions",
    "Choice",
    "Cluster",
    "ModelShape",
    "Plan",
    "Roofline",
    "Software",
    "StepTime",
    "cluster",
    "plan",
    "price",
    "render",
    "roofline",
    "transformer_shape",
]
