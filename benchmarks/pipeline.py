"""What does a pipeline cost? CPU seconds of a step per schedule and executor, against one device with accumulation.

    python benchmarks/pipeline.py                       4 stages, 8 and 32 microbatches, every schedule
    python benchmarks/pipeline.py --num-microbatches 16 --schedules zb-h1 --mpmd

The small GPT of `small_gpt.py`, against plain `jax.jit` on one device that accumulates over the same microbatches. The stages
are fake devices that share the cores of this machine, so wall time says little; CPU seconds measure the work: bubbles cost
none, copies and recomputation do. The memory is XLA's allocation for temporary values on each device. Target: 1f1b and zb-h1
take at most 1.05 of the CPU seconds of one device.
"""

import time
from dataclasses import dataclass

import report
import tyro

COLUMNS = {
    "run": "",
    "CPU s": ".2f",
    "CPU ratio": ".3f",
    "wall s": ".2f",
    "wall ratio": ".2f",
    "temp MiB a device": ".0f",
    "compile s": ".1f",
}


@dataclass(frozen=True)
class Config(report.Options):
    """What to measure."""

    num_stages: int = 4
    """Pipeline stages, each a fake device."""
    num_microbatches: tuple[int, ...] = (8, 32)
    """Microbatches of a step, with a table for each number."""
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "1f1b:unit", "interleaved", "zb-h1", "zb-v")
    """Schedules of the SPMD executor, with a form after a colon (without one that of its name)."""
    mpmd: tuple[str, ...] = ("1f1b", "zb-h1")
    """Schedules of the MPMD executor."""
    repeats: int = 5
    """Rounds; a round runs each candidate once."""


def main(config: Config) -> None:
    record = report.Record.start("pipeline", config)
    for count in config.num_microbatches:
        record.tables.append(compare(config, count))
    record.finish(config.out)


def compare(config: Config, count: int) -> report.Table:
    """Runs all candidates in turn with one number of microbatches; returns their figures."""
    import jax
    import numpy as np
    import small_gpt
    import timing

    import jaxpar
    from jaxpar.schedule import lockstep_form, make_schedule

    shape = small_gpt.Shape(**small_gpt.SMOKE) if config.smoke else small_gpt.Shape()
    params, batch = small_gpt.make_params(shape), small_gpt.make_batch(shape)
    mesh = jaxpar.make_mesh(stage=config.num_stages)
    rows = jaxpar.shard_batch(batch, mesh)
    place = lambda params: jaxpar.shard(
        params, jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    )
    candidates, compiling = {}, {}

    def add(name: str, step, *args) -> None:
        start = time.perf_counter()
        compiled = jax.jit(step).lower(*args).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        compiling[name] = (memory, time.perf_counter() - start)
        candidates[name] = lambda: compiled(*args)

    add("one device", lambda p, b: small_gpt.one_device(p, b, count), params, batch)
    for wanted in config.schedules:
        name, _, form = wanted.partition(":")
        chunks, form = 2 if name == "interleaved" else None, form or lockstep_form(name)
        table = make_schedule(name, config.num_stages, count, chunks, form=form)
        layout = jaxpar.LayerLayout(
            shape.layers, table.num_stages, table.num_chunks, placement=table.placement
        )
        packed = place(layout.pack_params(params))
        step = jaxpar.value_and_grad(
            small_gpt.MODEL,
            small_gpt.loss,
            mesh,
            schedule=table,
            num_microbatches=count,
            layout=layout,
        )
        add(f"spmd {wanted}", step, packed, rows)
    on_mesh = place(params)
    for name in config.mpmd:
        mpmd = jaxpar.value_and_grad(
            small_gpt.MODEL,
            small_gpt.loss,
            mesh,
            schedule=name,
            num_microbatches=count,
            executor="mpmd",
        )
        candidates[f"mpmd {name}"] = lambda mpmd=mpmd: mpmd(on_mesh, rows)

    timings = timing.measure(
        candidates, reference="one device", repeats=1 if config.smoke else config.repeats
    )
    losses = {name: float(run()[0]) for name, run in candidates.items()}
    if not np.allclose(list(losses.values()), losses["one device"], rtol=1e-4):
        raise SystemExit(f"the candidates do not train one model: losses {losses}")
    figures = {
        name: (t.cpu_seconds, t.cpu_ratio, t.wall_seconds, t.wall_ratio)
        for name, t in timings.items()
    }
    return report.Table(
        title=f"A step of {count} microbatches, loss {losses['one device']:.5f} in all runs",
        columns=COLUMNS,
        rows=[
            dict(
                zip(
                    COLUMNS, (name, *figures[name], *compiling.get(name, (None, None))), strict=True
                )
            )
            for name in candidates
        ],
        mesh=report.mesh_text(mesh),
    )


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    from jaxpar.runtime.distributed import use_fake_devices

    use_fake_devices(arguments.num_stages)
    main(arguments)
