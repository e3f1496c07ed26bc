"""Pictures that need no model: a mesh on its nodes, cut weights, memory by stage, losses of runs.

As text always, and as files by matplotlib, which is imported when one is drawn.

The timeline of a schedule is drawn where schedules are: `jaxpar.schedule.plot_timeline`.
"""

from jaxpar.plot.curves import plot_curves, render_curves
from jaxpar.plot.memory import plot_memory
from jaxpar.plot.placement import plot_placement
from jaxpar.plot.topology import Topology, render_placement
from jaxpar.plot.weights import plot_weight_cuts

__all__ = [
    "Topology",
    "plot_curves",
    "plot_memory",
    "plot_placement",
    "plot_weight_cuts",
    "render_curves",
    "render_placement",
]
