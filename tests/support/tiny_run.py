"""A small run as a program, for tests that kill it: Adam on 48 rows, 8 a step, in one process or several.

    python tests/support/tiny_run.py FOLDER [--steps 15] [--every 5] [--seconds 0] [--faults kill@7:1,stick@9:0] [--resume]

Each step appends the rows that it takes to FOLDER/rows-<process>.jsonl; the end writes checksums and losses to FOLDER/end.json.
A test whose subject is no process calls ``train`` in its own.
"""

import argparse
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import optax
from orbax.checkpoint._src.futures import signaling_client

import jaxpar
from jaxpar.checkpoint import BadCheckpointError, has_steps
from jaxpar.checkpoint.checksums import check_arrays
from jaxpar.data.batches import batch_rows, samples_before
from jaxpar.guard import Guard
from jaxpar.runtime.distributed import leave
from jaxpar.runtime.supervise import RESUME_IF_ANY, RESUME_VARIABLE
from jaxpar.runtime.watchdog import SECONDS_TO_LISTEN, Budgets
from tests.support import broken_disk
from tests.support.waiting import NEVER, wait_until

NUM_ROWS, BATCH_SIZE, WIDTH = 48, 8, 64
RNG = np.random.default_rng(0)
X, Y = (
    RNG.normal(size=(NUM_ROWS, WIDTH)).astype(np.float32),
    RNG.normal(size=(NUM_ROWS, WIDTH)).astype(np.float32),
)


FIRST = {"w": (0.1 * RNG.normal(size=(WIDTH, WIDTH))).astype(np.float32)}


def model(params, batch):
    return jax.numpy.tanh(batch["x"] @ params["w"])


def loss(outputs, batch):
    return jaxpar.losses.squared_error(outputs, batch["y"])


def flags(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name, kind, default in (
        ("steps", int, 15),
        ("every", int, 5),
        ("seconds", float, 0.0),
        ("faults", str, ""),
        ("budget", float, NEVER),
        ("save-budget", float, NEVER),
        ("data", int, -1),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args(arguments)


def strike(faults, step, folder, every, guard):
    """Causes the faults of this step and process, each only once per folder."""
    for fault in filter(None, faults.split(",")):
        kind, where = fault.split("@")
        at, process = map(int, where.split(":"))
        mark = folder / f"struck-{fault}"
        if step != at or process != jax.process_index() or mark.exists():
            continue
        if kind in (
            "kill-saved",
            "fill-saved",
        ):  # the newest save that is due, which a busy machine may take long over
            wait_until((folder / "checkpoints" / str(step - step % every)).is_dir)
        mark.write_text(str(os.getpid()))
        if kind in ("kill", "kill-saved"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "fill-saved":
            fill_disk(folder)
        elif kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "stick":
            stuck_here(guard)
        elif kind == "wait":
            threading.Event().wait()
        elif kind == "error":
            raise RuntimeError("an error of one process")
        elif kind == "mend":
            broken_disk.mend()
        elif kind == "stop":
            broken_disk.stop_at_write("saving-")
        elif kind.startswith("E"):
            broken_disk.fail_writes("/checkpoints", kind)


def fill_disk(folder):
    """From now on no file has room that is larger than half of the largest that is saved."""
    sizes = [path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    sys.dont_write_bytecode = True  # Python would keep the beginnings of its own files
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) // 2, resource.RLIM_INFINITY))


def watch_for_stopped(folder, guard):
    """Once the other process has stopped, moves this one's clock to shortly before the end of the budget of each save."""

    def watch():
        wait_until(lambda: any(state_of(path) == "T" for path in folder.glob("struck-stop@*")))
        watchdog, ahead = guard._watchdog, 0.0
        while True:
            now = time.monotonic() + ahead
            left = min(phase.seconds_left(now) for phase in (watchdog._phase, watchdog._beside))
            if SECONDS_TO_LISTEN < left < float("inf"):
                ahead += left - SECONDS_TO_LISTEN
                watchdog._clock = lambda ahead=ahead: time.monotonic() + ahead
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()


def state_of(mark):
    """The state of the process that wrote a mark, as /proc gives it: "T" if it is stopped."""
    try:
        return Path(f"/proc/{mark.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def prolong_waits_of_orbax():
    """Makes the waits of Orbax's threads for those of the other process end as good as never, in place of after 300 s."""
    client = signaling_client.JaxDistributedSignalingClient
    get, meet = client.blocking_key_value_get, client.wait_at_barrier
    client.blocking_key_value_get = lambda self, key, timeout_secs: get(self, key, int(NEVER))
    client.wait_at_barrier = lambda self, key, *, timeout_secs, process_ids=None: meet(
        self, key, timeout_secs=int(NEVER), process_ids=process_ids
    )


def stuck_here(guard):
    guard._watchdog._clock = lambda: time.monotonic() + 2 * NEVER  # the budget of the step is over
    while True:
        time.sleep(0.05)


def train(args):
    args.folder.mkdir(parents=True, exist_ok=True)
    mesh = jaxpar.make_mesh(data=args.data)
    optimizer = optax.adam(1e-2)
    shardings = jaxpar.shardings_from_paths(FIRST, mesh, {"w": jaxpar.replicated()})
    first = (lambda _: FIRST, None, optimizer, mesh, shardings)
    checkpoints = jaxpar.CheckpointManager(
        args.folder / "checkpoints", mesh, save_seconds=args.save_budget
    )
    restarted = os.environ.get(RESUME_VARIABLE) == RESUME_IF_ANY and has_steps(
        checkpoints.directory
    )
    if args.resume or restarted:
        state = checkpoints.restore(
            jaxpar.abstract_state(*first), config={"batch_size": BATCH_SIZE}
        )
    else:
        state = jaxpar.init_state(*first)
    start = int(jaxpar.fetch(state.step))
    train_step = jaxpar.make_train_step(jaxpar.value_and_grad(model, loss, mesh), optimizer)
    losses = []
    guard = Guard(
        checkpoints,
        num_steps=args.steps,
        save_every=args.every,
        budgets=Budgets(step=args.budget, save=args.save_budget),
        about=lambda step: {
            "config": {"batch_size": BATCH_SIZE},
            "samples": samples_before(NUM_ROWS, BATCH_SIZE, step),
        },
    )
    rows_log = (args.folder / f"rows-{jax.process_index()}.jsonl").open("a", buffering=1)
    with rows_log, guard:
        if "stop@" in args.faults:
            watch_for_stopped(args.folder, guard)
        for step in range(start, args.steps):
            strike(args.faults, step, args.folder, args.every, guard)
            rows = batch_rows(NUM_ROWS, BATCH_SIZE, seed=0, step=step)
            rows_log.write(json.dumps({"step": step, "rows": rows.tolist()}) + "\n")
            batch = {"x": X[rows], "y": Y[rows]}
            if f"nan@{step}" in args.faults:
                batch["x"] = batch["x"] * np.float32(np.nan)
            state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
            losses.append(float(metrics["loss"]).hex())
            time.sleep(args.seconds)
            guard.after_step(step + 1, state, metrics)
    sums = {path: found.checksum for path, found in check_arrays(state, mesh).items()}
    if jax.process_index() == 0:
        end = {"start": start, "checksums": sums, "losses": losses}
        (args.folder / "end.json").write_text(json.dumps(end))


if __name__ == "__main__":
    # A run ends soon by its own means, or not at all while a test waits: neither JAX nor Orbax ends it by a time-out.
    jaxpar.initialize(heartbeat_seconds=int(NEVER))
    prolong_waits_of_orbax()
    try:
        train(flags())
    except BadCheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        leave(65)
    except SystemExit as end:
        leave(end.code or 0)
    leave(0)
