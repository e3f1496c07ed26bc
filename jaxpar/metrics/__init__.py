"""What a run says while it trains: lines in metrics.jsonl, and what else takes them: Prometheus, TensorBoard, a trace."""

from jaxpar.metrics.log import MetricsLog, read_metrics

__all__ = ["MetricsLog", "read_metrics"]
