"""Pictures that need no model: the mesh on its nodes, losses. As text always, and as files by matplotlib, imported late.

The timeline of a schedule is drawn where schedules are: `jaxpar.schedule.plot_timeline`.
"""

from jaxpar.plot.curves import plot_curves, render_curves
from jaxpar.plot.placement import plot_placement
from jaxpar.plot.places import Places, render_placement

__all__ = ["Places", "plot_curves", "plot_placement", "render_curves", "render_placement"]
