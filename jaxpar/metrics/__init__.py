"""The metrics of a run: lines in metrics.jsonl, and exporters to Prometheus, TensorBoard and a trace.

`log.py` writes the lines, and calls the `exporters.py`. `status.py` prints lines about the run where there is no terminal,
`json_stream.py` as JSON. `names.py` checks the names of metrics.
"""

from jaxpar.metrics.log import MetricsLog, read_metrics

__all__ = ["MetricsLog", "read_metrics"]
