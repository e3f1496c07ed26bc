"""Whether a run still runs: what its lease tells to those who watch it, on the same machine and on another."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxpar.report import page, read_run, render_page
from jaxpar.report.page import live_data
from jaxpar.runtime.lease import STALE_SECONDS, this_process
from jaxpar.runtime.life import ENDED, RUNNING, LifeWatch
from tests.support.leases import ELSEWHERE, put


@pytest.fixture
def folder(tmp_path):
    """A run of 10 steps of which 4 are done."""
    (tmp_path / "report.json").write_text(
        json.dumps({"kind": "run", "num_steps": 10, "facts": {}, "problems": {}})
    )
    lines = [{"step": step, "loss": 1.0, "step_seconds": 60.0} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def killed():
    return dataclasses.replace(
        this_process(), start="0", token="another"
    )  # this process id, of an earlier process


def test_a_run_of_this_machine_runs_until_its_process_is_gone(folder):
    assert LifeWatch(folder).look().state == "unknown", "no lease"
    put(folder, this_process())
    assert LifeWatch(folder).look() == RUNNING
    put(folder, dataclasses.replace(this_process(), released=True))
    assert LifeWatch(folder).look() == ENDED
    put(folder, killed())
    life = LifeWatch(folder).look()
    assert life.state == "killed"
    assert life.text.startswith("killed: process ")


def test_a_run_of_another_machine_runs_while_its_lease_beats(folder):
    now = [0.0]
    put(folder, ELSEWHERE)
    watch = LifeWatch(folder, lambda: now[0])
    assert watch.look().state == "unknown"
    now[0] += 5
    put(folder, dataclasses.replace(ELSEWHERE, beats=1))
    assert watch.look() == RUNNING
    now[0] += STALE_SECONDS - 1
    assert watch.look() == RUNNING
    now[0] += 1
    assert watch.look().text.startswith("no sign of life for 60 s from process")
    put(folder, dataclasses.replace(ELSEWHERE, beats=2))
    assert watch.look() == RUNNING, "it was only slow"


def test_a_killed_run_is_not_shown_as_live_nor_with_time_left(folder):
    put(folder, this_process())
    data = read_run(folder)
    shown, live = render_page(data, seconds=1.0), live_data(data, "")
    assert '<p id="state">running</p>' in shown
    assert "<dt>left at this pace</dt><dd>6 min 0 s</dd>" in shown
    assert live["state"] == "running"
    put(folder, killed())
    data = read_run(folder)
    shown, live = render_page(data, seconds=1.0), live_data(data, "")
    assert "left at this pace" not in shown + json.dumps(live)
    assert '<p id="state">killed: process ' in shown
    assert live["state"].startswith("killed: process ")
    assert "<dt>state</dt><dd>killed: process " in render_page(data), (
        "a page that is written, not served"
    )


def test_a_page_does_not_call_a_run_live_by_itself():
    script = (Path(page.__file__).parent / "page.js").read_text()
    assert '"live, "' not in script
    assert "live.state" in script
