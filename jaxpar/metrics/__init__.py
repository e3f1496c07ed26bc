"""The metrics of a run: lines in metrics.jsonl, and exporters to Prometheus, TensorBoard and a trace.

`log.py` writes the lines (`lines.py`), checks the names of metrics, reports losses that jump (`jumps.py`) and calls the
`exporters.py`.
`follow.py` reads the lines as they come, in another process. `status.py` prints lines about the run where there is no terminal,
as text or JSON.
"""

from jaxpar.metrics.follow import follow
from jaxpar.metrics.log import MetricsLog, read_metrics

__all__ = ["MetricsLog", "follow", "read_metrics"]
