"""The MPMD executor: a Schedule walked from Python, by one process, over the devices of each stage.

`executor.py` walks the schedule and calls the jitted ops of `virtual_stages.py`, which run layers (`loops.py`) and the ends of
the model. `at_rest.py` moves params to their stages and gradients back, with the arrays of `submeshes.py`.
"""

from jaxpar.pipeline.mpmd.executor import MpmdExecutor

__all__ = ["MpmdExecutor"]
