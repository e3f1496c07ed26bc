"""A run's numbers beside metrics.jsonl: Prometheus while it runs, TensorBoard, a trace of some steps."""

import contextlib
import errno
import gzip
import http.client
import json
import os
import re
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import house_prices
from jaxpar.commands import recipe as cli
from jaxpar.metrics import exporters
from jaxpar.metrics.exporters import (
    PrometheusExporter,
    StepProfiler,
    TensorBoardWriter,
    Watcher,
    parse_steps,
)
from jaxpar.metrics.log import MetricsLog
from tests.support.prometheus import scrape
from tests.support.waiting import WAIT_SECONDS


def log_steps(folder, watchers, num_steps=4, **kept):
    with MetricsLog(folder, num_steps, items_per_step=8, watchers=watchers, **kept) as log:
        for step in range(num_steps):
            log.log(step, {"loss": 1.0 / (step + 1), "grad_norm": 2.0, "skipped": float(step == 1)})
            yield step


def test_the_counters_move_while_the_run_goes_on(tmp_path):
    saved = []
    exporter = PrometheusExporter(
        0, num_saves=lambda: len(saved), flops_per_step=1e9, peak_flops=1e15
    )
    seen = []
    for step in log_steps(tmp_path, [exporter]):
        saved.append(step)
        seen.append(scrape(exporter.port))
    assert [each["jaxpar_steps_total"] for each in seen] == [0, 1, 2, 3], (
        "a step late, as metrics.jsonl is"
    )
    assert [each["jaxpar_saves_total"] for each in seen] == [1, 2, 3, 4]
    assert [each["jaxpar_skipped_steps_total"] for each in seen] == [0, 0, 1, 1]
    assert [each.get("jaxpar_loss") for each in seen] == [None, 1.0, 0.5, 1 / 3]
    last = seen[-1]
    assert last["jaxpar_step"] == 2
    assert last["jaxpar_mfu"] == pytest.approx(1e-6 / last["jaxpar_step_seconds"])
    assert last["jaxpar_rows_per_second"] == pytest.approx(8 / last["jaxpar_step_seconds"])
    assert 0 < last["jaxpar_goodput"] <= 1
    with pytest.raises(OSError, match="refused"):
        scrape(exporter.port)


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("cpu", None),
    ],
)
def test_the_peak_for_the_mfu_is_that_of_the_whole_name_of_a_gpu(monkeypatch, kind, tflops):
    monkeypatch.setattr(exporters.jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr(exporters.jax, "device_count", lambda: 2)
    assert exporters._peak_flops() == (None if tflops is None else 2e12 * tflops)


def test_metrics_of_any_name_are_gauges_of_their_own(tmp_path):
    names = ("top-5", "top_5", "goodput", "mfu", "steps", "steps_total", "nats/token", "größe")
    exporter = PrometheusExporter(0, flops_per_step=1e9, peak_flops=1e15)
    with MetricsLog(tmp_path, 2, items_per_step=8, watchers=[exporter]) as log:
        for step in range(2):
            log.log(step, {"loss": 1.0} | {name: 10.0 + at for at, name in enumerate(names)})
        log.flush()
        seen = scrape(exporter.port)
    found = sorted(value for name, value in seen.items() if 10 <= value < 10 + len(names))
    assert found == [10.0 + at for at in range(len(names))], seen
    assert (seen["jaxpar_steps_total"], seen["jaxpar_top_5"], seen["jaxpar_top_5_"]) == (2, 10, 11)
    assert 0 < seen["jaxpar_goodput"] <= 1


@pytest.mark.full
def test_a_recipe_serves_its_numbers_while_it_trains(tmp_path, capsys, monkeypatch):
    for after_training in ("conclude", "draw_descent"):
        monkeypatch.setattr(house_prices, after_training, lambda *_: None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seen, done = [], threading.Event()

    def watch():
        while not done.is_set():
            with contextlib.suppress(OSError):
                seen.append(scrape(port))
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    flags = [
        "--steps",
        "200",
        "--checkpoint-every",
        "100",
        "--out-dir",
        str(tmp_path),
        "--metrics-port",
        str(port),
    ]
    try:
        cli.run(house_prices.main, house_prices.Config, flags)
    finally:
        done.set()
        thread.join()
    steps = [each["jaxpar_steps_total"] for each in seen]
    assert steps == sorted(steps)
    assert len(set(steps)) > 2, "the counter moves"
    assert max(each["jaxpar_saves_total"] for each in seen) >= 1
    assert f"metrics at http://127.0.0.1:{port}/metrics" in capsys.readouterr().out


def test_it_listens_at_the_given_address_alone():
    exporter = PrometheusExporter(0)
    try:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", exporter.port), timeout=WAIT_SECONDS)
    finally:
        exporter.close()


def test_it_answers_only_to_names_of_this_machine():
    exporter = PrometheusExporter(0)
    status = {}
    for host in (f"localhost:{exporter.port}", "elsewhere.example"):
        connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=WAIT_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"Host": host})
            status[host.partition(":")[0]] = connection.getresponse().status
    exporter.close()
    assert status == {"localhost": 200, "elsewhere.example": 421}


def test_a_busy_port_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        rule = "metrics_port must be free, and metrics_address an address of this machine; got"
        with pytest.raises(OSError, match=rf"{rule} 127.0.0.1:{port}"):
            PrometheusExporter(port)
    with pytest.raises(
        OSError, match=rf"{rule} 192.0.2.1:{port}.*Choose another port, or another addr"
    ):
        PrometheusExporter(port, address="192.0.2.1")  # of documentation: no machine has it


def test_watchers_are_closed_when_a_run_breaks_off(tmp_path):
    class Seen(Watcher):
        calls = ()

        def close(self):
            self.calls += ("close",)

    seen = Seen()
    with (
        pytest.raises(RuntimeError, match="broken"),
        MetricsLog(tmp_path, 3, items_per_step=1, watchers=[seen]),
    ):
        raise RuntimeError("broken")
    assert seen.calls == ("close",)


def test_other_processes_watch_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    exporter = PrometheusExporter(0)
    for _ in log_steps(tmp_path, [exporter]):
        assert scrape(exporter.port)["jaxpar_steps_total"] == 0
    exporter.close()


def test_tensorboard_gets_every_column(tmp_path):
    for _ in log_steps(tmp_path, [TensorBoardWriter(tmp_path / "tb")]):
        pass
    (events,) = (tmp_path / "tb").iterdir()
    for name in (b"loss", b"grad_norm", b"step_seconds", b"rows_per_second"):
        assert name in events.read_bytes()


def test_tensorboard_on_a_full_disk_says_what_is_missing_and_stops_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("jaxpar.metrics.exporters.SECONDS_TO_FLUSH", 0.0)
    writer = TensorBoardWriter(tmp_path / "tb")
    writer.open(0)

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tensorboardX.record_writer.os.fsync", fail)
    for step in range(100):  # more than a queue would hold
        writer.written({"step": step, "loss": 1.0})
    writer.close()
    assert (
        capsys.readouterr().err
        == "TensorBoard: the last values are missing: No space left on device\n"
    )


def test_a_trace_holds_the_steps_asked_for_and_no_others(tmp_path):
    import jax

    step_of = jax.jit(lambda x: x @ x)
    x = np.ones((8, 8), np.float32)
    with MetricsLog(
        tmp_path, 6, items_per_step=1, watchers=[StepProfiler((2, 4), tmp_path / "profile")]
    ) as log:
        for step in range(6):
            with jax.profiler.TraceAnnotation(f"step-{step}"):
                log_me = {"loss": step_of(x)[0, 0]}
            log.log(step, log_me)
    (trace,) = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    text = gzip.decompress(trace.read_bytes()).decode()
    assert json.loads(text)
    assert set(re.findall(r"step-\d", text)) == {"step-2", "step-3"}


@pytest.mark.parametrize("text", ["3", "5:3", "a:b", "-1:2", "0:11", "2:2"])
def test_steps_that_cannot_be_traced_are_refused(text):
    with pytest.raises(ValueError, match=r"profile must be first:end.*with steps=10"):
        parse_steps(text, 10)
