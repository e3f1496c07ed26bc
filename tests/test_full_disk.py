"""Recipes whose disk is full: they end with exit code 74 and one message, and go on once there is room."""

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import house_prices
from jaxpar.commands import recipe as cli
from jaxpar.run import make_mesh, messages
from jaxpar.run.start import write_config
from tests.support.failed_saves import GIVES_WRITES_UP, writes_given_up  # noqa: F401 (a fixture)
from tests.support.real_runs import PLAIN, ROOT, environment
from tests.support.waiting import WAIT_SECONDS

pytestmark = GIVES_WRITES_UP
NO_BYTECODE = {
    "PYTHONDONTWRITEBYTECODE": "1"
}  # else a file that may not grow would be a module of other tests


@contextlib.contextmanager
def small_files(num_bytes):
    """No file of this process may grow larger: the kernel's EFBIG stands for a disk's ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(*command):
    command = [sys.executable, *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment() | NO_BYTECODE, timeout=WAIT_SECONDS, **pipes
    )
    return ended.returncode, ended.stderr


def error_of(err):
    """The one message that a run ends with."""
    assert "Traceback" not in err, err
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    return error


def steps_in(folder):
    return [
        json.loads(line)["step"]
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if line[-1] == "}"
    ]


@pytest.mark.parametrize(
    ("file_bytes", "steps", "what"),
    [(8192, 300, "metrics.jsonl"), pytest.param(16384, 5, "loss.png", marks=pytest.mark.full)],
)
def test_a_recipe_whose_files_cannot_be_written_ends_with_74_and_one_message(
    tmp_path, monkeypatch, capsys, compiled_afresh, file_bytes, steps, what
):
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # Python would keep the beginnings of its own files
    flags = ["--out-dir", str(tmp_path / "out"), "--steps", str(steps)]
    with small_files(file_bytes), pytest.raises(SystemExit, match="74"):
        cli.run(house_prices.main, house_prices.Config, flags)
    error = error_of(capsys.readouterr().err)
    assert error.startswith("error: a run's files must be written; got: ")
    assert "File too large" in error
    assert error.endswith(
        "Raise the limit of a file's size (ulimit -f), then begin again with --overwrite."
    )
    steps_written = steps_in(tmp_path / "out")
    assert steps_written == list(range(len(steps_written)))
    if what == "metrics.jsonl":
        assert f"so that its last {steps - len(steps_written)} lines may be missing" in error
    else:
        assert len(steps_written) == steps


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_from_the_beginning_ends_a_run_with_74_and_keeps_the_config_before(
    tmp_path, monkeypatch, capsys, fault
):
    (tmp_path / "config.json").write_text("{}")

    def fail(path, text, **options):
        path.touch()
        raise OSError(fault, os.strerror(fault))

    def write(flags):
        write_config(flags, make_mesh(flags))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(SystemExit, match="74"):
        cli.run(write, house_prices.Config, ["--out-dir", str(tmp_path)])
    assert (
        f"got: {os.strerror(fault)}, in {tmp_path / 'config.json'}. Make room, then begin again."
        in capsys.readouterr().err
    )
    assert os.listdir(tmp_path) == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_pictures_that_cannot_be_drawn_leave_the_exit_code_of_a_run_that_saved(tmp_path, capsys):
    with messages.spared("a picture"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert capsys.readouterr().err == "a picture could not be written: No space left on device\n"
    with pytest.raises(FileNotFoundError), messages.spared("a picture"):
        (tmp_path / "missing").read_text()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 160 KiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", place],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    if mounted.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True, timeout=WAIT_SECONDS)


@pytest.mark.full
def test_a_recipe_that_fills_its_disk_ends_with_74_and_resumes_to_the_same_end_once_there_is_room(
    tmp_path, small_disk, monkeypatch
):
    monkeypatch.setattr(house_prices, "conclude", lambda *_: None)
    flags = ("--steps", "600", "--checkpoint-every", "150")
    cli.run(house_prices.main, house_prices.Config, ["--out-dir", str(tmp_path / "whole"), *flags])
    out = small_disk / "out"
    code, err = run(PLAIN, "house_prices", "--out-dir", out, *flags)
    assert code == 74, err
    error = error_of(err)
    assert error.startswith("error: the final state was not saved: ")
    assert "NOT SAVED: checkpoint of step 600" in err
    assert "its lines wait in memory" in err
    assert "metrics.jsonl must have a line for each step; got No space left on device" in err
    assert os.listdir(out / "checkpoints")
    subprocess.run(
        ["mount", "-o", "remount,size=64m", small_disk], check=True, timeout=WAIT_SECONDS
    )
    cli.run(house_prices.main, house_prices.Config, ["--out-dir", str(out), *flags, "--resume"])
    numbers = lambda folder: [
        (line["step"], line["loss"])
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    ]
    assert (out / "model.json").read_text() == (tmp_path / "whole" / "model.json").read_text()
    assert numbers(out) == numbers(tmp_path / "whole")
