"""Which runs are restarted, how often, and the report at the end; tests/test_faults.py has real processes."""

import errno
import re
from pathlib import Path

import pytest

from jaxpar.runtime import supervise as module
from jaxpar.runtime.launch import Launch
from jaxpar.runtime.supervise import Progress, Reached, Start, read_progress, report, supervise


@pytest.fixture
def launch(tmp_path):
    return Launch(("true",), 2, log_dir=tmp_path)


def starts_of(monkeypatch, *starts):
    """Lets the supervisor see these starts, and counts them."""
    left = list(starts)
    monkeypatch.setattr(module, "_start", lambda launch, number: left.pop(0))
    return left


def start(code, first=0, done=10, was_asked=False):
    return Start(code, 1, 5.0, None if done is None else Reached(first, done, 4.0), was_asked)


@pytest.mark.parametrize(
    ("starts", "restarts", "code", "why"),
    [
        ([start(0)], 3, 0, None),
        ([start(-9), start(0, 5, 20)], 3, 0, None),
        ([start(-9), start(1), start(-6)], 2, 134, "no restart: --max-restarts 2 is used up"),
        (
            [start(2, done=None)],
            3,
            2,
            "no restart: exit code 2: bad configuration or data, which a restart cannot fix",
        ),
        (
            [start(65, done=None)],
            3,
            65,
            "no restart: exit code 65: a bad checkpoint, or bad data met while training",
        ),
        ([start(86)], 3, 86, "no restart: exit code 86: the loss or gradients were not finite"),
        ([start(74)], 3, 74, "no restart: exit code 74"),
        (
            [start(75), start(0)],
            3,
            0,
            "launch: a restart that does not count: process 1 ended first",
        ),
        (
            [start(75), start(75), start(-9), start(75), start(0)],
            1,
            0,
            "launch: restart 1 of at most 1",
        ),
        ([start(-9), start(75), start(1)], 1, 1, "no restart: --max-restarts 1 is used up"),
        ([start(75, was_asked=True)], 3, 75, "no restart: asked to stop"),
        (
            [start(1, done=None), start(1, done=None)],
            9,
            1,
            "no restart: two consecutive starts completed no step",
        ),
        ([start(124), start(70), start(0)], 3, 0, None),
    ],
)
def test_a_run_is_started_again_where_that_can_mend_it(
    monkeypatch, capsys, launch, starts, restarts, code, why
):
    left = starts_of(monkeypatch, *starts)
    assert supervise(launch, restarts) == code
    assert left == []
    said = capsys.readouterr().err
    assert (why or "goodput") in said
    assert len(re.findall("launch: a? ?restart ", said)) == len(starts) - 1
    assert (launch.log_dir / "goodput.json").is_file()


def test_a_restart_without_a_checkpoint_is_not_said_to_resume(monkeypatch, capsys, launch):
    starts_of(monkeypatch, start(-9, 0, 49), start(0))
    assert supervise(launch, 1) == 0
    said = "after step 49; resuming from the last intact checkpoint, or beginning anew where there is none"
    assert said in capsys.readouterr().err


def test_restarts_must_not_be_negative(launch):
    with pytest.raises(ValueError, match="--max-restarts must be 0 or more; got -1"):
        supervise(launch, -1)


def test_the_report_counts_only_steps_that_were_not_done_again():
    starts = [
        Start(-9, 1, 10.0, Reached(0, 40, 8.0)),
        Start(1, 0, 5.0, None),
        Start(0, 0, 25.0, Reached(30, 100, 20.0)),
    ]
    assert report(starts).splitlines() == [
        "start 0: steps 0 to 40 in 8.0 s, then process 1 ended first (ended by SIGKILL); 10 steps were redone",
        "start 1: no step in 5.0 s, then process 0 ended first (exit code 1: an error)",
        "start 2: steps 30 to 100 in 20.0 s, then done",
        "goodput 65%: 26.0 s of useful steps in 40.0 s",
    ]


def test_progress_outlives_its_process(tmp_path):
    path = tmp_path / "progress.json"
    assert read_progress(path) is None
    progress = Progress(path)
    assert read_progress(path) is None
    for step in (101, 102, 1000):
        progress.done(step)
    reached = read_progress(path)
    assert (reached.first, reached.done) == (100, 1000)
    assert reached.seconds >= 0
    Progress(None).done(3)


def test_a_disk_that_fails_under_the_launcher_changes_no_exit_code(monkeypatch, capsys, launch):
    starts_of(monkeypatch, start(74))
    (launch.log_dir / "goodput.json").mkdir()
    assert supervise(launch, 3) == 74
    assert "launch: goodput.json is not complete: [Errno 21]" in capsys.readouterr().err


def test_where_no_restart_can_be_made_the_run_ends_as_it_did_before(monkeypatch, capsys, launch):
    left = [start(-9)]

    def next_start(launch, number):
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return left.pop()

    monkeypatch.setattr(module, "_start", next_start)
    assert supervise(launch, 3) == 137
    assert "launch: no restart: [Errno 28] No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/progress.json"])
def test_a_disk_that_fails_under_the_progress_ends_no_training(path):
    Progress(Path(path)).done(1)
