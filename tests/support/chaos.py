"""Runs of two processes under random faults, each of which must end as the run that nothing happened to: `make chaos`.

    python -m tests.support.chaos --seconds 1200 --seed 7

Runs train house prices through `python -m jaxpar launch`, one after another. Every few seconds one of FAULTS strikes, and a
launcher that has ended is started again until the run is done. Then its arrays, its model and its metrics (less the times and
rates, which no two runs share) must be those of the undisturbed run, byte for byte, and no process of it may be left. The seed
decides which faults strike, and after how long; the exact moments depend on the machine.

As root, checkpoints are on a small tmpfs, which can be filled and made read-only. Otherwise a limit on the size of files
simulates a full disk, and no disk is read-only.
"""

import argparse
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from jaxpar.runtime.exit_codes import ExitCode
from tests.support.chaos_faults import (
    BETWEEN_STARTS,
    FAULTS,
    Run,
    can_mount,
    is_done,
    processes_of,
)
from tests.support.waiting import WAIT_SECONDS, wait_until

DISK_BYTES = 16 << 20
NOT_TO_BE = (ExitCode.BAD_CONFIG, ExitCode.BAD_DATA, ExitCode.NOT_FINITE, 1)


def disturb(run: Run, counts: Counter, until: float) -> None:
    """Runs to the end, with faults until it is time to stop."""
    while True:
        run.launcher = run.start()
        while run.launcher.poll() is None:
            if time.monotonic() < until and not is_done(run.launcher, run.rng.uniform(3, 14)):
                strike(run, FAULTS, counts)
            elif time.monotonic() >= until:
                assert is_done(run.launcher, WAIT_SECONDS), (
                    f"a launcher must end once nothing disturbs; see {run.folder}"
                )
        code = run.launcher.returncode
        counts[f"exit code {code}"] += 1
        wait_until(lambda: not processes_of(run.out), f"nothing must be left running; see {run.folder}")
        if code == 0:
            return
        refused = run.was_overtaken and code == ExitCode.BAD_CONFIG
        assert refused or code not in NOT_TO_BE, f"exit code {code} of start {run.starts}; see {run.folder}"
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
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", folder], check=True, timeout=WAIT_SECONDS
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
        undisturbed = Run(folder, rng)
        assert undisturbed.start().wait() == 0, f"a run without faults must end with 0; see {folder}"
        want = undisturbed.result()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with disk() as folder:
            run = Run(folder, rng)
            disturb(run, counts, until)
            for name, got in run.result().items():
                assert got == want[name], f"{name} of a disturbed run are not the undisturbed one's; see {folder}"
        counts["runs that ended as the undisturbed one"] += 1
        print(f"{counts['runs that ended as the undisturbed one']} runs ended as the undisturbed one", flush=True)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200, help="how long faults strike (default: 1200)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the faults")
    args = parser.parse_args()
    for what, number in sorted(main(args.seconds, args.seed).items()):
        print(f"{number:6} {what}")
