"""The MPMD executor: one process dispatches the ops of a Schedule from Python to the devices of each stage.

`executor.py` iterates over the schedule and calls the jitted functions of `programs.py`. These run the ops of
`virtual_stages.py`, which run layers (`layers.py`) and the ends of the model. `at_rest.py` moves params to their stages and
gradients back, with the functions of `submeshes.py`.
"""

from jaxpar.pipeline.mpmd.executor import MpmdExecutor

__all__ = ["MpmdExecutor"]
