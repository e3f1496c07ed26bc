"""What do checkpoints cost a run? CPU seconds of a save against those of the steps between two, and how long the loop waits.

The small GPT with Adam. A save is all of it: comparing replicas, copying, writing, hashing, committing; its CPU time is that of
all threads, beside the training or not.

    python benchmarks/checkpoint.py [--fake-devices 4] [--smoke]
"""

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import optax
import small_gpt
import timing
import tyro

import jaxpar
from jaxpar.guard import Guard


@dataclass(frozen=True)
class Config:
    fake_devices: int = 1
    """CPU devices, all on the data axis."""
    every: int = 50
    """Steps between two saves, for the share."""
    repeats: int = 5
    """Of steps, and of saves."""
    out: Path | None = None
    """JSON file for the figures."""
    smoke: bool = False
    """A tiny model, once."""


def main(config: Config) -> None:
    shape = small_gpt.Shape(2, 16, 2, 8, 32, 8) if config.smoke else small_gpt.Shape()
    repeats = 1 if config.smoke else config.repeats
    mesh = jaxpar.make_mesh(data=-1)
    params, optimizer = small_gpt.make_params(shape), optax.adam(1e-3)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    state = jaxpar.init_state(lambda key: params, jax.random.key(0), optimizer, mesh, shardings)
    batch = jaxpar.shard_batch(small_gpt.make_batch(shape), mesh)
    step = jaxpar.make_train_step(jaxpar.value_and_grad(small_gpt.MODEL, small_gpt.loss, mesh), optimizer)
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)

    steps, saves, waits, guards = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, Guard(num_steps=10**9) as guard:
        checkpoints = jaxpar.CheckpointManager(folder, mesh, keep=1)
        checkpoints.save(state)  # compiles
        for _ in range(repeats):
            began = time.process_time()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            steps.append(time.process_time() - began)
            began = time.process_time()
            guard.after_step(int(state.step), state, metrics)
            guards.append(time.process_time() - began)
            wall, began = time.perf_counter(), time.process_time()
            checkpoints.save_async(state)
            waits.append(time.perf_counter() - wall)
            checkpoints.wait()
            saves.append(time.process_time() - began)
        assert not checkpoints.failures, checkpoints.failures
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    a_step, a_save = statistics.median(steps), statistics.median(saves)
    figures = {
        "state_mib": round(state_bytes / 2**20, 1),
        "step_cpu_seconds": round(a_step, 4),
        "guard_cpu_seconds_a_step": round(statistics.median(guards), 6),
        "save_cpu_seconds": round(a_save, 4),
        "loop_waits_seconds": round(statistics.median(waits), 4),
        "overhead": round((a_save + config.every * statistics.median(guards)) / (config.every * a_step), 5),
    }
    print(", ".join(f"{name} {value}" for name, value in timing.machine().items()))
    for name, value in figures.items():
        print(f"{name:>26} {value}")
    print(f"a save every {config.every} steps costs {figures['overhead']:.2%} of the CPU time of the steps")
    if config.out is not None:
        config.out.write_text(json.dumps({"config": asdict(config), "figures": figures}, default=str, indent=2) + "\n")


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    jaxpar.use_fake_devices(arguments.fake_devices)
    main(arguments)
