"""Pictures that need no model: a mesh on its nodes, memory by stage, losses of runs.

`topology.py` computes which device holds which part, `gpu_positions.py` where each GPU is drawn, and `gpu_drawing.py` draws
them for `placement.py` and `overview.py`. `memory.py` and `step_time.py` draw bars, `curves.py` losses. `figure.py` writes
the files.

``plot_`` functions write files with matplotlib, imported when they are called; ``render_`` functions return text.

For the timeline of a schedule see `jaxpar.schedule.plot_timeline`.
"""

from jaxpar.plot.curves import plot_curves, render_curves
from jaxpar.plot.memory import plot_memory
from jaxpar.plot.placement import plot_placement
from jaxpar.plot.step_time import plot_step_time
from jaxpar.plot.topology import Topology, render_placement

__all__ = [
    "Topology",
    "plot_curves",
    "plot_memory",
    "plot_placement",
    "plot_step_time",
    "render_curves",
    "render_placement",
]
