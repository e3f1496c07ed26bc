"""What do checkpoints cost a run? CPU seconds of a save relative to those of the steps between two, and the loop's wait.

The small GPT with Adam. A save includes comparing replicas, copying, writing, hashing and committing; its CPU time is that of
all threads, concurrent with the training or not. The loop waits while its state is compared and copied; the rest runs in the
background. The guard runs after every step. Target: saves and guard take at most 3% of the steps' CPU time.

    python benchmarks/checkpoint.py [--fake-devices 4] [--smoke]
"""

import statistics
import tempfile
import time
from dataclasses import dataclass

import jax
import optax
import report
import small_gpt
import tyro

import jaxpar
from jaxpar.guard import Guard


@dataclass(frozen=True)
class Config(report.Options):
    fake_devices: int = 1
    """CPU devices, all on the data axis."""
    every: int = 50
    """Steps between two saves, to compute the share."""
    repeats: int = 5
    """Number of steps and of saves to measure."""


def main(config: Config) -> None:
    record = report.Record.start("checkpoint", config)
    shape = small_gpt.Shape(2, 16, 2, 8, 32, 8) if config.smoke else small_gpt.Shape()
    repeats = 1 if config.smoke else config.repeats
    mesh = jaxpar.make_mesh(data=-1)
    params, optimizer = small_gpt.make_params(shape), optax.adam(1e-3)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    state = jaxpar.init_state(lambda key: params, jax.random.key(0), optimizer, mesh, shardings)
    batch = jaxpar.shard_batch(small_gpt.make_batch(shape), mesh)
    step = jaxpar.make_train_step(
        jaxpar.value_and_grad(small_gpt.MODEL, small_gpt.loss, mesh), optimizer
    )
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)

    steps, saves, waits = [], [], []
    with tempfile.TemporaryDirectory() as folder, Guard(num_steps=10**9) as guard:
        checkpoints = jaxpar.CheckpointManager(folder, mesh, keep=1)
        checkpoints.save(state)  # compiles
        for _ in range(repeats):
            began = time.process_time()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            steps.append(time.process_time() - began)
            wall, began = time.perf_counter(), time.process_time()
            checkpoints.save_async(state)
            waits.append(time.perf_counter() - wall)
            checkpoints.wait()
            saves.append(time.process_time() - began)
        assert not checkpoints.failures, checkpoints.failures
        guards, now = 1000, int(state.step)
        time.sleep(1)  # threads of the last step spin for a while
        began = time.process_time()
        for number in range(guards):
            guard.after_step(now + number, state, metrics)
        a_guard = (time.process_time() - began) / guards
    a_step, a_save = statistics.median(steps), statistics.median(saves)
    figures = {
        "state MiB": (sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**20, ".1f"),
        "step CPU s": (a_step, ".2f"),
        "guard CPU s a step": (a_guard, ".6f"),
        "save CPU s": (a_save, ".2f"),
        "loop waits s": (statistics.median(waits), ".2f"),
        "saves and guard of the steps": (
            (a_save + config.every * a_guard) / (config.every * a_step),
            ".2%",
        ),
    }
    table = report.Table(
        title=f"A save every {config.every} steps, medians of {repeats}",
        columns={name: form for name, (_, form) in figures.items()},
        rows=[{name: value for name, (value, _) in figures.items()}],
        mesh=report.mesh_text(mesh),
    )
    record.tables.append(table)
    record.finish(config.out)


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    jaxpar.use_fake_devices(arguments.fake_devices)
    main(arguments)
