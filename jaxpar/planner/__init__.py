"""What a job needs and how long it takes, told before anything is compiled or hired, and checked against the compiler.

    plans = jaxpar.plan("bloom-176b", jaxpar.planner.cluster("a100-80gb", num_nodes=48), batch_size=2048)
    print(jaxpar.planner.render(plans))

The folder is not called plan, so that `jaxpar.plan` is the function and nothing else. Read it in this order: `cluster.py` and
`model_shape.py` (what is given), `choice.py` (what is chosen), `analysis.py` (what an op does, by
`jaxpar/backward/partition.py`), `at_rest.py` and `memory.py` (bytes held), `traffic.py` (bytes sent), `time.py` (seconds),
`search.py`, `plans.py`.
"""

from jaxpar.planner.choice import Choice
from jaxpar.planner.cluster import GPUS, Cluster, cluster
from jaxpar.planner.model_shape import ModelShape, transformer_shape
from jaxpar.planner.plans import Plan, render
from jaxpar.planner.search import plan, price
from jaxpar.planner.time import Assumptions, StepTime

__all__ = [
    "GPUS",
    "Assumptions",
    "Choice",
    "Cluster",
    "ModelShape",
    "Plan",
    "StepTime",
    "cluster",
    "plan",
    "price",
    "render",
    "transformer_shape",
]
