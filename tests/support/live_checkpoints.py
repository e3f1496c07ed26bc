"""Programs that write checkpoints and read them at the same time; no value that is read may be wrong.

    python -m tests.support.live_checkpoints write RUN       saves step after step, and keeps two
    python -m tests.support.live_checkpoints restore RUN     restores the newest, again and again
    python -m tests.support.live_checkpoints export RUN      exports it, as `jaxpar export` does
    python -m tests.support.live_checkpoints follow FOLDER   reads the params of a run of chaos.py

RUN is a folder like that of recipes/gpt.py. The params of a step follow from its number, so that
every value is known. What `follow` reads is compared with the checksums of an undisturbed run, in
FOLDER's expected.json. Each prints a line of JSON with what it has done so far. They end with 1
where a value is wrong, or no step is found intact; otherwise they run until they are killed.
"""

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.checkpoint import BadCheckpointError
from jaxpar.checkpoint.checksums import row_sums
from jaxpar.checkpoint.restore import DeletedError
from jaxpar.checkpoint.stored_params import PARAMS, open_stored_params
from tests.support import model_folders
from tests.support.oracle import assert_same_bits

SOURCE = model_folders.GOLDEN / "llama"
EXPECTED = "expected.json"
OPTIMIZER = optax.sgd(0.1)
KEEP = 2
SECONDS = {"write": 0.3, "restore": 0.1, "export": 0.2, "follow": 0.2}  # between two rounds


def factor(step: int) -> np.float32:
    """What the params of a step are multiplied by; never 0, and exact."""
    return np.float32(1 + step % 1000)


def make_state(mesh: jax.sharding.Mesh, step: int) -> jaxpar.TrainState:
    """The state that is saved as a step."""
    whole = jax.sharding.NamedSharding(mesh, jaxpar.replicated())
    params = model_folders.read_params(SOURCE, model_folders.read_config(SOURCE))
    scaled = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) * factor(step), params)
    on_mesh = jaxpar.shard(scaled, jax.tree.map(lambda _: whole, scaled))
    zero = jaxpar.shard(np.int32(0), whole)
    return jaxpar.TrainState(
        jaxpar.shard(np.int32(step), whole), on_mesh, OPTIMIZER.init(on_mesh), zero
    )


def make_run(run: Path) -> Path:
    """A run's folder without checkpoints, at a path that is free."""
    shutil.copytree(SOURCE, run / "model")
    return run


def write(run: Path) -> Iterator[str]:
    """Saves step after step, after those that are there."""
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(run / "checkpoints", mesh, keep=KEEP)
    step = manager.latest() or 0
    while True:
        step += 1
        manager.save(make_state(mesh, step))
        yield "saved"


def restore(run: Path) -> Iterator[str]:
    """Restores the newest step."""
    mesh, said = jaxpar.make_mesh(), []
    manager = jaxpar.CheckpointManager(run / "checkpoints", mesh, say=said.append)
    target = make_state(mesh, 0)
    while True:
        state = manager.restore(target)
        assert_same_bits(jaxpar.fetch(state), jaxpar.fetch(make_state(mesh, int(state.step))))
        assert not said, f"a step that is deleted must not be taken for damaged: {said}"
        yield "restored"


def export(run: Path) -> Iterator[str]:
    """Exports the newest step."""
    source = model_folders.all_tensors(SOURCE)
    while True:
        with tempfile.TemporaryDirectory() as folder:
            out, said, told = Path(folder) / "out", io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
                code = jaxpar_main(["export", str(run), str(out), "--dtype", "float32"])
            if code and "got none in" in told.getvalue():
                raise FileNotFoundError(told.getvalue())
            assert code == 0 or "another process" in told.getvalue(), told.getvalue()
            if code == 0:
                times = factor(int(re.search(r"step (\d+) of", said.getvalue())[1]))
                want = {name: tensor.astype(np.float32) * times for name, tensor in source.items()}
                assert_same_bits(model_folders.all_tensors(out), want)
        yield "exported" if code == 0 else "deleted each time"


def follow(folder: Path) -> Iterator[str]:
    """Reads the params of the newest step of a run, and compares those of every step that the undisturbed run saved too."""
    expected = json.loads((folder / EXPECTED).read_text())
    while True:
        params, manifest = open_stored_params(folder / "run" / "checkpoints")
        values = {f"{PARAMS}{name}": np.asarray(array) for name, array in params.items()}
        known = expected.get(str(manifest.step))
        for name, value in values.items() if known else ():
            sums = row_sums(value, (0,) * value.ndim, value.shape)
            assert int(sums.sum(dtype=np.uint32)) == known[name], f"{name} of step {manifest.step}"
        yield "compared" if known else "read"


def repeat(rounds: Callable[[Path], Iterator[str]], folder: Path, pause: float) -> None:
    """Runs round after round, and counts what came of them."""
    counts: Counter[str] = Counter()
    going: Any = rounds(folder)
    while True:
        try:
            counts[next(going)] += 1
        except FileNotFoundError:
            if set(counts) - {"none yet"}:  # there was a step before
                raise
            counts["none yet"] += 1
            going = rounds(folder)
        except DeletedError:
            counts["deleted each time"] += 1
            going = rounds(folder)
        except BadCheckpointError as error:
            if "needs an intact checkpoint" in str(error):
                raise
            counts["a damaged value refused"] += (
                1  # of a file that was damaged after it was verified
            )
            going = rounds(folder)
        print(json.dumps(counts), flush=True)
        time.sleep(pause)


if __name__ == "__main__":
    name, place = sys.argv[1:]
    repeat(
        {"write": write, "restore": restore, "export": export, "follow": follow}[name],
        Path(place),
        SECONDS[name],
    )
