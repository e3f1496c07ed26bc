"""A line a step in metrics.jsonl, also across a resume and when a step's loss is not finite."""

import json
import math

import jax.numpy as jnp
import pytest

from jaxpar.metrics import MetricsLog, read_metrics


def log_steps(folder, steps, *, loss=lambda step: 1 / (1 + step), first_step=0):
    with MetricsLog(folder, 10, items_per_step=47, first_step=first_step) as log:
        for step in steps:
            log.log(step, {"grad_norm": jnp.float32(2), "loss": jnp.float32(loss(step)), "weights/area": 3.5})
    return log


def test_each_step_has_a_line_with_loss_norm_seconds_and_rate(tmp_path):
    log = log_steps(tmp_path / "run", range(3))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = ["step", "loss", "grad_norm", "weights/area", "step_seconds", "rows_per_second"]
    assert [list(line) for line in lines] == [names] * 3
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["loss"] for line in lines] == pytest.approx([1, 1 / 2, 1 / 3])
    assert all(line["rows_per_second"] == pytest.approx(47 / line["step_seconds"]) for line in lines)
    assert log.last == lines[-1]


def test_a_resumed_run_goes_on_behind_the_lines_of_its_steps(tmp_path):
    log_steps(tmp_path, range(6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a crash cut it short
    log_steps(tmp_path, range(4, 8), loss=lambda step: 100 + step, first_step=4)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["loss"] for line in lines[3:5]] == [0.25, 104]


def test_a_new_run_begins_a_new_file(tmp_path):
    log_steps(tmp_path, range(6))
    log_steps(tmp_path, range(2))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_loss_that_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path):
    log_steps(tmp_path, range(2), loss=lambda step: math.nan if step else 1.0)
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(text[1], parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[1]["loss"])


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
