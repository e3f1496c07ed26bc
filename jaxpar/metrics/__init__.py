"""The metrics of a run: lines in metrics.jsonl, and exporters to Prometheus, TensorBoard and a trace.

`log.py` writes the lines, checks the names of metrics, reports losses that jump (`jumps.py`) and calls
the `exporters.py`. `status.py` prints lines about the run where there is no terminal, as text or JSON.
"""

from jaxpar.metrics.log import MetricsLog, read_metrics

__all__ = ["MetricsLog", "read_metrics"]
