"""Real processes for tests: runs of tiny_run.py, alone or by a launcher, and what they leave."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import WAIT_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "tests" / "support" / "tiny_run.py")
PLAIN = str(
    ROOT / "tests" / "support" / "plain_recipe.py"
)  # then the name of a recipe, and its flags


def environment():
    mine = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC",)}
    return mine | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def start(*args, variables=(), **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(
        [sys.executable, *map(str, args)], env=environment() | dict(variables), cwd=ROOT, **options
    )


def finish(process):
    """The exit code, and what the process said on standard output and on standard error."""
    out, err = process.communicate(timeout=WAIT_SECONDS)
    return process.returncode, out, err


def run(*args, **options):
    return finish(start(*args, **options))


def launched(folder, *flags, processes=2, restarts=0, devices=1):
    logs = folder.with_name(f"{folder.name}-logs")
    gang = (
        "-n",
        processes,
        "--devices-per-process",
        devices,
        "--log-dir",
        logs,
        "--max-restarts",
        restarts,
    )
    return ("-m", "jaxpar", "launch", *gang, RUN, folder, *flags)


def end_of(folder):
    return json.loads((folder / "end.json").read_text())


def steps_of(folder):
    """The steps that are saved; a run that saved none leaves no folder."""
    return sorted(
        int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()
    )


def wait_for(path, num_bytes=0):
    """Waits until a file is there, with so many bytes."""
    wait_until(
        lambda: path.exists() and path.stat().st_size >= num_bytes, f"{path.name} must be written"
    )


def wait_for_a_step(folder):
    """Waits until a checkpoint is committed."""
    wait_until(
        lambda: (folder / "checkpoints").is_dir() and steps_of(folder),
        "a checkpoint must be committed",
    )


def lives(process):
    """Whether a process runs; one that has ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_all_end(processes):
    """Fails unless the processes end; kills those that do not."""
    left = lambda: [process for process in processes if lives(process)]
    try:
        wait_until(
            lambda: not left(), lambda: f"{len(left())} of {len(processes)} processes are left"
        )
    finally:
        for process in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def read_lines(out_dir):
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def curve(out_dir):
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out_dir)]
