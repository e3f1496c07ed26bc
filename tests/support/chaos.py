"""Runs of two processes under random faults, each of which must end as the run that nothing happened to: `make chaos`.

    python -m tests.support.chaos --seconds 1200 --seed 7

Runs train house prices through `python -m jaxpar launch`, one after another. Every few seconds one of FAULTS strikes, and a
launcher that has ended is started again until the run is done. Then its arrays, its model and its metrics (less the times and
rates, which no two runs share) must be those of the undisturbed run, byte for byte, and no process of it may be left. The seed
decides which faults strike, and after how long; the exact moments depend on the machine.

Beside each run a reader follows its checkpoints. Beside all of them other programs save, restore and export without a pause
(`live_checkpoints.py`); the one that saves is killed now and then. None of them may read a wrong value, or find no step intact.

As root, checkpoints are on a small tmpfs, which can be filled and made read-only. Otherwise a limit on the size of files
simulates a full disk, and no disk is read-only.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from jaxpar.checkpoint.folder import damaged, differences
from jaxpar.checkpoint.manifest import FILE_NAME, read_manifest
from jaxpar.runtime.exit_codes import ExitCode
from tests.support.live_checkpoints import EXPECTED, make_run
from tests.support.waiting import WAIT_SECONDS, wait_until

DISK_BYTES = 16 << 20
NOT_TO_BE = (ExitCode.BAD_CONFIG, ExitCode.BAD_DATA, ExitCode.NOT_FINITE, 1)
ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY = 3000, 100
FILE_BYTES = 4096  # of a file, where no disk can be filled
TIMES = ("step_seconds", "rows_per_second")
LIMIT_FILES = (
    "import os, resource, sys\n"
    "os.environ['PYTHONDONTWRITEBYTECODE'] = '1'\n"  # Python would keep the beginnings of its own files
    f"resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, resource.RLIM_INFINITY))\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
RECIPE = (
    *("recipes/house_prices.py", "--mesh.data", 2, "--batch-size", 8, "--steps", STEPS),
    *("--checkpoint-every", SAVE_EVERY, "--budget.step", 8, "--budget.save", 15),
)
KEEP = 4  # checkpoints of a disturbed run


class Run:
    """A run in a folder: its launcher, started as often as it takes.

    Args:
        folder: An empty folder.
        rng: Makes the random choices.
        keep: Checkpoints to keep.
    """

    def __init__(self, folder: Path, rng: random.Random, keep: int = KEEP) -> None:
        self.folder, self.rng, self.keep = folder, rng, keep
        self.out = folder / "run"
        self.starts, self.files_are_limited = 0, False
        self.was_overtaken = False  # by a second run, which ended what the first had begun
        self.launcher: subprocess.Popen | None = None

    def start(self, *, logs: str = "logs") -> subprocess.Popen:
        """Starts a launcher; the run's own becomes ``launcher``."""
        self.starts += 1
        own = self.folder / f"{logs}-{self.starts}"
        args = (
            "-n",
            2,
            "--log-dir",
            own,
            "--max-restarts",
            3,
            *RECIPE,
            "--keep",
            self.keep,
            "--out-dir",
            self.out,
        )
        limit = (sys.executable, "-c", LIMIT_FILES) if self.files_are_limited else ()
        with (self.folder / f"{logs}-{self.starts}.txt").open("w") as log:
            return subprocess.Popen(
                [*limit, sys.executable, "-m", "jaxpar", "launch", *map(str, args)],
                env=os.environ
                | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAXPAR_RESUME": "if-any"},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def workers(self) -> list[int]:
        """The processes that train, in the order of their numbers, as far as there are any."""
        return [process for process in processes_of(self.out) if is_worker(process)]

    def num_steps(self) -> int:
        """The steps of which there are metrics."""
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def checksums(self) -> dict[str, dict[str, int]]:
        """The checksums of the arrays of each checkpoint, by step."""
        manifests = map(read_manifest, (self.out / "checkpoints").glob("[0-9]*"))
        return {
            str(manifest.step): {name: array.checksum for name, array in manifest.arrays.items()}
            for manifest in manifests
        }

    def result(self) -> dict:
        """What must be equal in every run."""
        arrays = read_manifest(self.out / "checkpoints" / str(STEPS)).arrays
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        metrics = [
            json.dumps({name: line[name] for name in line if name not in TIMES}) for line in lines
        ]
        return {
            "arrays": arrays,
            "model": (self.out / "model.json").read_bytes(),
            "metrics": metrics,
        }


def processes_of(out: Path) -> list[int]:
    """The processes that have a folder in their command line, except this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            args = path.read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if str(out).encode() in args and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return sorted(found)


def is_worker(process: int) -> bool:
    """Whether a process is a worker, not a launcher."""
    try:
        return b"launch" not in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def is_done(process: subprocess.Popen, seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def can_mount() -> bool:
    """Whether this process may mount a disk."""
    return os.geteuid() == 0 and sys.platform == "linux"


def signal_to_worker(number: signal.Signals) -> Callable[[Run], str]:
    """A signal to one of the processes that train."""

    def strike(run: Run) -> str:
        workers = run.workers()
        if not workers:
            return ""
        return send(run.rng.choice(workers), number)

    return strike


def signal_to_launcher(number: signal.Signals) -> Callable[[Run], str]:
    """A signal to the launcher. Once it is killed its workers must end by themselves."""

    def strike(run: Run) -> str:
        before = run.num_steps()
        if not (told := send(run.launcher.pid, number)) or number != signal.SIGKILL:
            return told
        run.launcher.wait(WAIT_SECONDS)
        wait_until(
            lambda: not run.workers(), f"workers must end with their launcher; see {run.folder}"
        )
        assert before > STEPS // 2 or run.num_steps() < STEPS, (
            f"workers trained on without it; see {run.folder}"
        )
        return told

    return strike


def send(process: int, number: signal.Signals) -> str:
    """Sends a signal."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return ""
    return f"{number.name} to {process}"


def full_disk(run: Run) -> str:
    """A disk without a free byte for some seconds; where no disk can be made, small files in the next start."""
    if not can_mount():
        run.files_are_limited = not run.files_are_limited
        return f"files are {'' if run.files_are_limited else 'not '}limited from the next start on"
    ballast, seconds = run.folder / "ballast", run.rng.uniform(0.5, 6)
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
    time.sleep(seconds)
    ballast.unlink()
    return f"a full disk for {seconds:.1f} s"


def read_only(run: Run) -> str:
    """Checkpoints that cannot be written for some seconds."""
    folder, seconds = run.out / "checkpoints", run.rng.uniform(0.5, 6)
    if not can_mount() or not folder.is_dir():
        return ""
    subprocess.run(["mount", "--bind", folder, folder], check=True, timeout=WAIT_SECONDS)
    try:
        if subprocess.run(
            ["mount", "-o", "remount,bind,ro", folder],
            capture_output=True,
            check=False,
            timeout=WAIT_SECONDS,
        ).returncode:
            return ""  # a file is open for writing
        time.sleep(seconds)
        return f"read-only checkpoints for {seconds:.1f} s"
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=WAIT_SECONDS)


def second_run(run: Run) -> str:
    """Another launcher of the same run, which must not disturb the first."""
    if run.num_steps() == 0 or run.launcher.poll() is not None:
        return ""
    other = run.start(logs="second")
    code = other.wait(WAIT_SECONDS)
    allowed = (
        ExitCode.BAD_CONFIG,
        ExitCode.DONE,
    )  # it may find the folder free while the first is started again
    assert code in allowed, f"a second run in the folder must be refused; it ended with {code}"
    run.was_overtaken |= code == ExitCode.DONE
    return f"a second run, which ended with {code}"


def flip_a_bit(run: Run) -> str:
    """Flips a bit of the newest checkpoint between two starts, if there is an older one to fall back to."""
    checkpoints = run.out / "checkpoints"
    steps = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())
    if run.launcher.poll() is None or sum(is_whole(checkpoints / str(step)) for step in steps) < 2:
        return ""
    files = [
        path
        for path in (checkpoints / str(steps[-1])).rglob("*")
        if path.is_file() and path.stat().st_size
    ]
    path = run.rng.choice(sorted(files))
    content = bytearray(path.read_bytes())
    at = run.rng.randrange(8 * len(content))
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)
    return f"a flipped bit in {path.relative_to(checkpoints)}"


def is_whole(checkpoint: Path) -> bool:
    """Whether a run can resume from a checkpoint."""
    try:
        files = read_manifest(checkpoint).files
    except ValueError:
        return False
    return not differences(checkpoint, files, ignored=[FILE_NAME]) and not damaged(
        checkpoint, files, files
    )


FAULTS = {
    "SIGKILL of a worker": signal_to_worker(signal.SIGKILL),
    "SIGSTOP of a worker": signal_to_worker(signal.SIGSTOP),
    "SIGTERM of a worker": signal_to_worker(signal.SIGTERM),
    "SIGKILL of the launcher": signal_to_launcher(signal.SIGKILL),
    "SIGTERM of the launcher": signal_to_launcher(signal.SIGTERM),
    "a full disk": full_disk,
    "a read-only disk": read_only,
    "a second run": second_run,
}
BETWEEN_STARTS = {"a flipped bit": flip_a_bit}


class Beside:
    """Programs that write and read checkpoints beside the runs; the ``with`` block ends them.

    Args:
        folder: Where their output goes.
        counts: What they have done is added to it.
    """

    def __init__(self, folder: Path, counts: Counter) -> None:
        self.folder, self.counts = folder, counts
        self.programs: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Beside":
        return self

    def start(self, name: str, place: Path) -> None:
        """Starts a program of ``live_checkpoints.py``, after the last one of its name."""
        with (self.folder / f"{name}.txt").open("a") as log:
            self.programs[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.support.live_checkpoints", name, str(place)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def check(self) -> None:
        """Fails if a program has ended by itself."""
        for name, program in self.programs.items():
            assert program.poll() is None, (
                f"{name} found a wrong value or ended; see {self.folder / name}.txt"
            )

    def end(self, name: str) -> None:
        """Kills a program, which must still run, and counts what it has done."""
        self.check()
        program = self.programs.pop(name)
        program.kill()
        program.wait(WAIT_SECONDS)
        lines = (self.folder / f"{name}.txt").read_text().splitlines()
        last = next(
            (line for line in reversed(lines) if line.startswith("{") and line.endswith("}")), "{}"
        )
        self.counts.update({f"{name}: {what}": count for what, count in json.loads(last).items()})
        (self.folder / f"{name}.txt").unlink()

    def restart(self, name: str, place: Path) -> None:
        """Kills a program and starts it again."""
        self.end(name)
        self.start(name, place)

    def __exit__(self, kind: object, *_: object) -> None:
        for name in list(self.programs):
            if kind is None:
                self.end(name)
            else:
                self.programs[name].kill()
                self.programs[name].wait(WAIT_SECONDS)


# --- runs that are disturbed ---------------------------------------------------------------------------------------------


def disturb(run: Run, counts: Counter, until: float, beside: Beside, live: Path) -> None:
    """Runs to the end, with faults until it is time to stop."""
    while True:
        run.launcher = run.start()
        beside.restart("write", live)
        while run.launcher.poll() is None:
            beside.check()
            if time.monotonic() < until and not is_done(run.launcher, run.rng.uniform(3, 14)):
                strike(run, FAULTS, counts)
            elif time.monotonic() >= until:
                assert is_done(run.launcher, WAIT_SECONDS), (
                    f"a launcher must end once nothing disturbs; see {run.folder}"
                )
        code = run.launcher.returncode
        counts[f"exit code {code}"] += 1
        wait_until(
            lambda: not processes_of(run.out), f"nothing must be left running; see {run.folder}"
        )
        if code == 0:
            return
        refused = run.was_overtaken and code == ExitCode.BAD_CONFIG
        assert refused or code not in NOT_TO_BE, (
            f"exit code {code} of start {run.starts}; see {run.folder}"
        )
        if time.monotonic() < until and run.rng.random() < 0.5:
            strike(run, BETWEEN_STARTS, counts)
        run.files_are_limited &= time.monotonic() < until


def strike(run: Run, faults: dict[str, Callable[[Run], str]], counts: Counter) -> None:
    """Causes one of the faults, and prints a line about it."""
    name = run.rng.choice(sorted(faults))
    if told := faults[name](run):
        counts[name] += 1
        print(f"  start {run.starts}, {run.num_steps()} steps: {told}", flush=True)


@contextmanager
def disk():
    """A folder, if possible one that is a small disk of its own. It stays where something failed."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if can_mount():
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", folder],
            check=True,
            timeout=WAIT_SECONDS,
        )
    yield folder
    if can_mount():
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=WAIT_SECONDS)
    folder.rmdir() if can_mount() else shutil.rmtree(folder)


def main(seconds: float, seed: int) -> Counter:
    """Disturbs runs for so many seconds; returns how often each fault and each exit code occurred."""
    print(f"seed {seed}", flush=True)
    rng, counts = random.Random(seed), Counter()
    with disk() as folder:
        undisturbed = Run(folder, rng, keep=STEPS // SAVE_EVERY)
        assert undisturbed.start().wait() == 0, (
            f"a run without faults must end with 0; see {folder}"
        )
        want, expected = undisturbed.result(), json.dumps(undisturbed.checksums())
    until = time.monotonic() + seconds
    place = Path(tempfile.mkdtemp(prefix="live-"))  # it stays where something failed
    with Beside(place, counts) as beside:
        live = make_run(place / "live")
        for name in ("write", "restore", "export"):
            beside.start(name, live)
        while time.monotonic() < until:
            with disk() as folder:
                run = Run(folder, rng)
                (folder / EXPECTED).write_text(expected)
                beside.start("follow", folder)
                disturb(run, counts, until, beside, live)
                beside.end("follow")
                for name, got in run.result().items():
                    assert got == want[name], (
                        f"{name} of a disturbed run are not the undisturbed one's; see {folder}"
                    )
            counts["runs that ended as the undisturbed one"] += 1
            print(
                f"{counts['runs that ended as the undisturbed one']} runs ended as the undisturbed one",
                flush=True,
            )
    shutil.rmtree(place)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=1200, help="how long faults strike (default: 1200)"
    )
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the faults"
    )
    args = parser.parse_args()
    for what, number in sorted(main(args.seconds, args.seed).items()):
        print(f"{number:6} {what}")
