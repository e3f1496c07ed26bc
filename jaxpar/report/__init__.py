"""A run or a list of plans as one HTML page that needs no network: loss, timeline, shards, memory, traffic, configuration.

Data flows one way. A dict of JSON values is made by ``run.py`` from the folder of a run, by ``plans.py`` from plans, or by
``gradient_reductions.py`` from the rows of recipes/all_reduce.py, with ``metrics.py``, ``timeline.py``, ``shards.py`` and
``costs.py`` for their parts. ``page.py`` renders the dict, with ``tables.py`` and the charts of ``metric_charts.py``,
``device_charts.py`` and ``bar_charts.py``: inline SVG in the frame of ``frame.py``, with the lines of ``curves.py``.
``writer.py`` writes the page when a run ends, ``server.py`` serves it while the run trains.
"""

from jaxpar.report.gradient_reductions import ways_data
from jaxpar.report.page import render_page, write_page
from jaxpar.report.plans import plan_data
from jaxpar.report.run import read_run, step_data
from jaxpar.report.writer import ReportWriter

__all__ = ["ReportWriter", "plan_data", "read_run", "render_page", "step_data", "ways_data", "write_page"]
