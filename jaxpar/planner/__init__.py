"""Memory and step time of a training job, estimated before compiling it or renting GPUs, and tested against the compiler.

    plans = jaxpar.plan("bloom-176b", jaxpar.planner.cluster("a100-80gb", num_nodes=48), batch_size=2048)
    print(jaxpar.planner.render(plans))

The package is not called `plan`, so that `jaxpar.plan` names only the function. Read the files in this order: `cluster.py` and
`model_shape.py` with `fused_attention.py` (the inputs), `choice.py` (the settings), `op_costs.py` (the work of an op, by
`jaxpar/backward/partition.py`), `at_rest.py` and `memory.py` (bytes stored), `traffic.py` (bytes sent), `kernels.py`,
`kernel_time.py` and `op_times.py` (seconds of an op), `links.py` and `network.py` (of a collective), `makespan.py` (of a
schedule), `step_time.py` (of a step), `software.py` (where other training software differs), `plans.py` and `render.py` (the
result, as text), `estimator.py` (all estimates of a choice), `candidates.py`, `candidate_queue.py` (in the order of quick
estimates), `search.py` (the best plan of each mesh), `improvements.py`, `no_plan.py` (why none fits), `ranking.py` (the public
functions). `compiled.py` compiles a choice, and `roofline.py` bounds the time of a step that was compiled for GPUs.
"""

from jaxpar.planner.choice import Choice
from jaxpar.planner.cluster import GPUS, Cluster, cluster
from jaxpar.planner.model_shape import ModelShape, transformer_shape
from jaxpar.planner.op_times import Assumptions
from jaxpar.planner.plans import Plan
from jaxpar.planner.ranking import plan, price
from jaxpar.planner.render import render
from jaxpar.planner.roofline import Roofline, roofline
from jaxpar.planner.software import Software
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
