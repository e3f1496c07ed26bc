"""What does a pipeline cost? CPU seconds of a step per schedule and executor, against one device with accumulation.

    python benchmarks/pipeline.py                       4 stages, 8 microbatches, every schedule
    python benchmarks/pipeline.py --num-microbatches 32

The stages are fake devices that share the cores of this machine, so wall time says little; CPU seconds say what work there
is: bubbles cost none, copies and recomputation do. The memory is what XLA allots for temporary values on each device.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, os.path.dirname(__file__))


@dataclass(frozen=True)
class Config:
    """What to measure."""

    num_stages: int = 4
    """Pipeline stages, each a fake device."""
    num_microbatches: int = 8
    """Microbatches of a step."""
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "1f1b:fused", "interleaved", "zb-h1", "zb-v")
    """Schedules of the SPMD executor, with a form after a colon (unit where none is given)."""
    free: tuple[str, ...] = ("1f1b", "zb-h1")
    """Schedules of the free-running executor."""
    repeats: int = 5
    """Rounds; a round runs each candidate once."""
    out: Path | None = None
    """A JSON file for the figures."""
    smoke: bool = False
    """A tiny model, one round: does it run?"""


def main(config: Config) -> None:
    import jax
    import numpy as np
    import small_gpt
    import timing

    import jaxpar
    from jaxpar.schedule import make_schedule

    shape = small_gpt.Shape(**small_gpt.SMOKE) if config.smoke else small_gpt.Shape()
    params, batch, count = small_gpt.make_params(shape), small_gpt.make_batch(shape), config.num_microbatches
    mesh = jaxpar.make_mesh(stage=config.num_stages)
    rows = jaxpar.shard_batch(batch, mesh)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    candidates, extra = {}, {}

    def add(name: str, step, *args) -> None:
        start = time.perf_counter()
        compiled = jax.jit(step).lower(*args).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        extra[name] = {"temp MiB": round(memory), "compile s": round(time.perf_counter() - start, 1)}
        candidates[name] = lambda: compiled(*args)

    add("one device", lambda p, b: small_gpt.one_device(p, b, count), params, batch)
    for wanted in config.schedules:
        name, _, form = wanted.partition(":")
        table = make_schedule(name, config.num_stages, count, 2 if name == "interleaved" else None, form=form or "unit")
        layout = jaxpar.LayerLayout(shape.layers, table.num_stages, table.num_chunks, placement=table.placement)
        packed = jaxpar.shard(params | {"layers": layout.pack(params["layers"])}, shardings)
        step = jaxpar.value_and_grad(
            small_gpt.MODEL, small_gpt.loss, mesh, schedule=table, num_microbatches=count, layout=layout
        )
        add(f"spmd {wanted}", step, packed, rows)
    on_mesh = jaxpar.shard(params, shardings)
    for name in config.free:
        free = jaxpar.value_and_grad(
            small_gpt.MODEL, small_gpt.loss, mesh, schedule=name, num_microbatches=count, executor="free"
        )
        candidates[f"free {name}"] = lambda free=free: free(on_mesh, rows)

    timings = timing.measure(candidates, reference="one device", repeats=1 if config.smoke else config.repeats)
    losses = {name: float(run()[0]) for name, run in candidates.items()}
    if not np.allclose(list(losses.values()), losses["one device"], rtol=1e-4):
        raise SystemExit(f"the candidates do not train one model: losses {losses}")
    title = f"Pipeline step, {config.num_stages} stages, {count} microbatches, loss {losses['one device']:.5f}"
    timing.report(title, timings, extra, config.out)


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    from jaxpar.distributed import use_fake_devices

    use_fake_devices(arguments.num_stages)
    main(arguments)
