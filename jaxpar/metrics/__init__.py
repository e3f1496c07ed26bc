"""The metrics of a run: lines in metrics.jsonl, and exporters to Prometheus, TensorBoard and a trace."""

from jaxpar.metrics.log import MetricsLog, read_metrics

__all__ = ["MetricsLog", "read_metrics"]
