"""Pictures that need no model: a mesh on its nodes, memory by stage, losses of runs.

`topology.py` computes which device holds which part and where each GPU is drawn, and `placement.py` draws them. `charts.py`
draws the losses of runs, the memory of a device and the time of a step. `figure.py` writes the files.

``plot_`` functions write files with matplotlib, imported when they are called; ``render_`` functions return text.

For the timeline of a schedule see `jaxpar.schedule.plot_timeline`.
"""

from jaxpar.plot.charts import plot_curves, plot_memory, plot_step_time, render_curves
from jaxpar.plot.placement import plot_placement
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
