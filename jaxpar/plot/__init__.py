"""Pictures that need no model: the mesh on its nodes. As text always; as files with matplotlib, imported where one is drawn.

The timeline of a schedule is drawn where schedules are: `jaxpar.schedule.plot_timeline`.
"""

from jaxpar.plot.placement import plot_placement
from jaxpar.plot.places import Places, render_placement

__all__ = ["Places", "plot_placement", "render_placement"]
