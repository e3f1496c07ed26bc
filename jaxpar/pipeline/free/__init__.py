"""The free-running executor: a Schedule walked from Python, by one process, over the devices of each stage.

`executor.py` walks the schedule and calls the jitted ops of `parts.py`, made of `loops.py` (the layers of a part) and of the
model's ends; `at_rest.py` brings params to their stages and gradients back, by means of `submeshes.py`.
"""

from jaxpar.pipeline.free.executor import FreeExecutor

__all__ = ["FreeExecutor"]
