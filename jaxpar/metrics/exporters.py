"""Exports a run's metrics in addition to metrics.jsonl: to Prometheus, to TensorBoard, and as a trace. First process only.

Each is a Watcher, which ``MetricsLog`` calls:

    with MetricsLog(out_dir, num_steps, items_per_step=rows, watchers=[PrometheusExporter(9090)]) as log:

Each imports its package when it is constructed: ``prometheus_client`` is in ``jaxpar[metrics]``, ``tensorboardX`` in
``jaxpar[tb]``.
"""

import contextlib
import math
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpar.fields import arg
from jaxpar.gpus import GPUS, gpu_of
from jaxpar.metrics.lines import Number
from jaxpar.runtime.host_names import with_port
from jaxpar.runtime.output import needing_extra, tell
from jaxpar.runtime.page_server import PageServer

SECONDS_TO_FLUSH = 60.0  # after which TensorBoard sees new values
# Other forms of these GPUs that their datasheet gives the same peak. An H100 or H200 for PCIe has a smaller one.
SAME_PEAK = {"NVIDIA A100-PCIE-40GB": "a100-40gb", "NVIDIA A100 80GB PCIe": "a100-80gb"}
COUNTED = {"skipped": "Steps that changed nothing, since their loss or gradients were not finite."}


class Watcher:
    """Observes a run; subclasses override the methods that they need."""

    def open(self, first_step: int) -> None:
        """Called once, before the first step."""

    def dispatched(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Called when ``step`` has been dispatched to the devices; its metrics may not be computed yet."""

    def written(self, line: Mapping[str, Number]) -> None:
        """Called with each line of metrics.jsonl."""

    def close(self) -> None:
        """Called once, after the last step or when the run is interrupted."""


@dataclass(frozen=True, eq=False)
class Totals:
    """Counters for Prometheus that others count: ``read`` returns the value of each by its name and what it is."""

    read: Callable[[], Mapping[tuple[str, str], float]]

    def collect(self) -> list[Any]:
        """Returns the counters as they are now."""
        from prometheus_client.core import CounterMetricFamily

        return [CounterMetricFamily(*about, value=value) for about, value in self.read().items()]


class PrometheusExporter(Watcher):
    """Serves a run's metrics at ``http://address:port/metrics``, in the format of Prometheus.

    Every column of metrics.jsonl is a gauge ``jaxpar_<column>``, with "_" for a character that Prometheus does not allow in a
    name, and at the end of a name that another metric has. In addition there are ``jaxpar_steps_total``,
    ``jaxpar_skipped_steps_total``, ``jaxpar_saves_total``, ``jaxpar_goodput`` and, if the FLOPs are known, ``jaxpar_mfu``.

    Args:
        port: The port to listen on; 0: any free one, which the attribute ``port`` holds.
        address: The address to listen on; the default accepts connections from this machine only, and of these requests that
            name it (``localhost``, ``127.0.0.1``). There is no authentication.
        num_saves: Returns how many checkpoints this process has saved.
        flops_per_step: The useful FLOPs per step of all devices together, for the MFU.
        peak_flops: The peak FLOPs per second of all devices together; by default from the kind of device, if it is one of
            ``gpus.toml``.
        began: When the run began, in ``time.monotonic()``, for the goodput; by default now.

    Raises:
        ImportError: prometheus_client is not installed.
        OSError: Another program listens on the port, or the address is not one of this machine.
    """

    def __init__(
        self,
        port: int,
        *,
        address: str = "127.0.0.1",
        num_saves: Callable[[], int] | None = None,
        flops_per_step: Number | None = None,
        peak_flops: float | None = None,
        began: float | None = None,
    ) -> None:
        with needing_extra(f"{arg('metrics_port')} needs the package prometheus-client", "metrics"):
            import prometheus_client as prometheus
        self._prometheus, self._registry = prometheus, prometheus.CollectorRegistry()
        self._gauges: dict[tuple[str, str], Any] = {}
        self._flops, self._peak = flops_per_step, peak_flops or _peak_flops()
        self._began, self._seconds = time.monotonic() if began is None else began, []
        self._steps = prometheus.Counter(
            "jaxpar_steps", "Steps done by this process.", registry=self._registry
        )
        self._skipped = prometheus.Counter(
            "jaxpar_skipped_steps", COUNTED["skipped"], registry=self._registry
        )
        about, count = (
            ("jaxpar_saves", "Checkpoints saved by this process."),
            num_saves or (lambda: 0),
        )
        self._registry.register(Totals(lambda: {about: count()}))
        goodput = self._gauge(
            "goodput", "Steps at their median pace, over the time since the run began."
        )
        goodput.set_function(self._goodput)
        try:
            page = (
                prometheus.CONTENT_TYPE_LATEST,
                lambda: prometheus.generate_latest(self._registry),
            )
            self._server = PageServer({"/metrics": page, "/": page}, address, port)
        except OSError as error:
            raise OSError(
                f"{arg('metrics_port')} must be free, and {arg('metrics_address')} an address of this machine; got "
                f"{with_port(address, port)} ({error.strerror}). Choose another port, or another address."
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="jaxpar-metrics", daemon=True
        )
        self._thread.start()

    def _gauge(self, name: str, about: str, *, of: str = "exporter") -> Any:
        if (of, name) not in self._gauges:
            self._gauges[of, name] = self._new_gauge(
                re.sub(r"[^a-zA-Z0-9_]", "_", f"jaxpar_{name}"), about
            )
        return self._gauges[of, name]

    def _new_gauge(self, name: str, about: str) -> Any:
        try:
            return self._prometheus.Gauge(name, about, registry=self._registry)
        except ValueError:  # another metric has the name
            return self._new_gauge(f"{name}_", about)

    def _goodput(self) -> float:
        useful = statistics.median(self._seconds) * len(self._seconds) if self._seconds else 0.0
        return min(useful / max(time.monotonic() - self._began, 1e-9), 1.0)

    def written(self, line: Mapping[str, Number]) -> None:
        """Updates the metrics."""
        for name, value in line.items():
            if name not in COUNTED:
                self._gauge(name, f"{name} of the last step, as in metrics.jsonl.", of="line").set(
                    value
                )
        self._steps.inc()
        self._skipped.inc(max(line.get("skipped", 0), 0))
        self._seconds.append(line["step_seconds"])
        if self._flops and self._peak:
            mfu = self._flops / line["step_seconds"] / self._peak
            self._gauge("mfu", "Useful operations per second over the peak of the devices.").set(
                mfu
            )

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _peak_flops() -> float | None:
    """Returns the peak of all devices; None where no datasheet is known of their kind, by its whole name."""
    kind = jax.devices()[0].device_kind
    gpu = GPUS[SAME_PEAK[kind]] if kind in SAME_PEAK else gpu_of(kind)
    return None if gpu is None else gpu.peak_flops * jax.device_count()


class TensorBoardWriter(Watcher):
    """Writes every column of metrics.jsonl as a scalar for TensorBoard.

    Args:
        folder: The folder for the event files.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        with needing_extra(f"{arg('tensorboard')} needs the package tensorboardX", "tb"):
            from tensorboardX.proto import event_pb2
            from tensorboardX.record_writer import RecordWriter
            from tensorboardX.summary import scalar
        messages: Any = (
            event_pb2  # its classes are created at import, so type checkers do not know them
        )
        event = lambda **of: messages.Event(wall_time=time.time(), **of).SerializeToString()
        self._scalar = lambda name, value, step: event(step=step, summary=scalar(name, value))
        # Not SummaryWriter: a full disk ends its thread, and the training then waits for it forever.
        self._new_writer = lambda path: RecordWriter(str(path))
        self._first_event = lambda: event(file_version="brain.Event:2")
        self._folder, self._flushed_at = folder, time.monotonic()
        self._writer: Any = None

    def open(self, first_step: int) -> None:
        """Creates the file."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
            self._writer = self._new_writer(path)
            self._writer.write(self._first_event())
        except OSError as error:
            self._end(error)

    def written(self, line: Mapping[str, Number]) -> None:
        """Writes the values of one step, until a write fails."""
        if self._writer is None:
            return
        try:
            for name, value in line.items():
                if name != "step" and math.isfinite(value):
                    self._writer.write(self._scalar(name, value, int(line["step"])))
            if time.monotonic() - self._flushed_at > SECONDS_TO_FLUSH:
                self._writer.flush()
                self._flushed_at = time.monotonic()
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        """Writes the remaining values."""
        self._end()

    def _end(self, problem: OSError | None = None) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                with contextlib.closing(writer):
                    writer.flush()
        except OSError as error:
            problem = problem or error
        if problem is not None:
            tell(f"TensorBoard: the last values are missing: {problem.strerror}")


class StepProfiler(Watcher):
    """Writes a trace of some steps, for https://ui.perfetto.dev (``perfetto_trace.json.gz``) and for xprof.

    Args:
        steps: The first step and the one after the last, as ``parse_steps`` returns them.
        folder: The folder in which ``plugins/profile/<time>/`` is created.
    """

    def __init__(self, steps: tuple[int, int], folder: Path) -> None:
        self._first, self._end = steps
        self._folder, self._is_tracing = folder, False

    def open(self, first_step: int) -> None:
        """Starts the trace if its steps include the first step of the run."""
        if self._first <= first_step < self._end:
            self._start()

    def _start(self) -> None:
        jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
        self._is_tracing = True

    def dispatched(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Starts the trace before its first step, when earlier steps have ended, and stops it after its last step."""
        if step + 1 == self._first:
            jax.block_until_ready(metrics)
            self._start()
        if self._is_tracing and step + 1 == self._end:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        """Writes the trace, even if steps are missing."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


def parse_steps(text: str, num_steps: int) -> tuple[int, int]:
    """Returns the first step and the one after the last: (10, 13) for ``10:13``, which means 10, 11 and 12.

    Raises:
        ValueError: The text is not such a pair, or the run does not have these steps.
    """
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end) <= num_steps):
        raise ValueError(
            f"{arg('profile')} must be first:end, steps of the run; got {text!r} with {arg(steps=num_steps)}. Choose such as "
            f"{max(num_steps - 3, 0)}:{num_steps}."
        )
    return int(first), int(end)
