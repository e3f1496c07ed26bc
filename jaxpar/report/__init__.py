"""A run or a list of plans as one HTML page that needs no network: loss, timeline, loads of experts, shards, memory, traffic.

Data flows one way. A dict of JSON values is made by ``data.py`` from the folder of a run or from plans, or by a
recipe. ``page.py`` renders the dict, with its tables and the charts of ``charts.py``: inline SVG in the frame of
``frame.py``. ``server.py`` writes the page when a run ends, and serves it while the run trains.

What only one recipe draws or says of its run is beside it: ``recipes/house_prices_report.py``, ``digits_report.py`` and others.
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
