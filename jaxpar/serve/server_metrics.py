"""The metrics of a server at /metrics, in the format of Prometheus; needs prometheus_client."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.serve.errors import missing_extra

BUCKETS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 20, 60, 120)  # seconds


class ServerMetrics:
    """The metrics of a server.

    Args:
        usage: Counts of what was computed, by kind, which the model keeps.
        num_waiting: Returns the number of requests that wait.
        num_running: Returns the number of requests that are computed: 0 or 1.

    Raises:
        ImportError: prometheus_client is not installed.
    """

    def __init__(
        self, usage: Mapping[str, int], num_waiting: Callable[[], int], num_running: Callable[[], int]
    ) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise missing_extra("prometheus-client") from error
        self._prometheus, self._registry = prometheus, prometheus.CollectorRegistry()
        where: dict[str, Any] = {"registry": self._registry}
        self._requests = prometheus.Counter(
            "jaxpar_serve_requests", "Requests answered, by path and status.", ("path", "code"), **where
        )
        self._seconds = prometheus.Histogram(
            "jaxpar_serve_request_seconds",
            "Seconds until the end of the response.",
            ("path",),
            buckets=BUCKETS,
            **where,
        )
        gauge = lambda name, about: prometheus.Gauge(f"jaxpar_serve_{name}", about, **where)
        gauge("waiting_requests", "Requests that wait for their turn.").set_function(num_waiting)
        gauge("running_requests", "Requests that are computed, 0 or 1.").set_function(num_running)
        for kind in usage:
            total = gauge(f"{kind}_total", f"The {kind.replace('_', ' ')} so far.")
            total.set_function(lambda kind=kind: usage[kind])
        prometheus.ProcessCollector(**where)

    def answered(self, path: str, code: int, seconds: float) -> None:
        """Counts a response."""
        self._requests.labels(path, str(code)).inc()
        self._seconds.labels(path).observe(seconds)

    def page(self) -> tuple[bytes, str]:
        """Returns the metrics and their content type."""
        return self._prometheus.generate_latest(self._registry), self._prometheus.CONTENT_TYPE_LATEST
