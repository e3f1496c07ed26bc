"""A run or a list of plans as one HTML page that needs no network: loss, timeline, loads of experts, shards, memory, traffic.

Data flows one way. A dict of JSON values is made by ``data.py`` from the folder of a run or from plans, or by
``reductions.py``. ``page.py`` renders the dict, with its tables and the charts of ``charts.py``: inline SVG in the frame of
``frame.py``. ``server.py`` writes the page when a run ends, and serves it while the run trains.

Text and pictures of some runs beside their pages: ``regression.py`` (a table and its least squares), ``classification.py``
(digits read right and wrong), ``reductions.py`` (ways to reduce gradients), ``published_jobs.py`` (steps of published runs).
"""

from jaxpar.report.data import plan_data, read_run, step_data
from jaxpar.report.page import render_page, write_page
from jaxpar.report.server import ReportWriter, write_loads

__all__ = [
    "ReportWriter",
    "plan_data",
    "read_run",
    "render_page",
    "step_data",
    "write_loads",
    "write_page",
]
