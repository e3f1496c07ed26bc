"""How much memory does a pipeline need? Temporary bytes on a device, as compiled, by schedule and number of microbatches.

    python benchmarks/memory.py

All microbatches have the same size, so a step with more of them has more rows. GPipe by `jax.grad` stores the activations of
every tick for the backward pass; a schedule with a bound stores only those of microbatches between F and W. Ratios are to the
first row, by number of microbatches; the bytes are those of compiled programs and do not depend on the machine.
"""

from dataclasses import dataclass, replace

import report
import tyro

MIB = 2**20


@dataclass(frozen=True)
class Config(report.Options):
    """What to compile."""

    num_stages: int = 4
    """Pipeline stages, each a fake device."""
    num_microbatches: tuple[int, ...] = (8, 32)
    """Microbatches of a step, with columns for each number."""
    rows: int = 4
    """Rows of a microbatch."""


def main(config: Config) -> None:
    import small_gpt
    from compiled_steps import gpipe_step, jaxpar_step, plain_step

    import jaxpar
    from jaxpar.schedule import SCHEDULES

    record = report.Record.start("memory", config)
    mesh = jaxpar.make_mesh(stage=config.num_stages)
    ways = {
        "GPipe by jax.grad": gpipe_step,
        "jax.jit with shardings": plain_step,
        **{
            f"jaxpar {name}{', remat' if remat else ''}": lambda *args, name=name, remat=remat: (
                jaxpar_step(*args, name, remat=remat)
            )
            for name in SCHEDULES
            for remat in (False, True)
        },
    }
    if config.smoke:
        ways = {name: ways[name] for name in ("GPipe by jax.grad", "jaxpar 1f1b")}
    figures: dict[str, dict[int, int]] = {name: {} for name in ways}
    for count in config.num_microbatches:
        shape = small_gpt.Shape(**small_gpt.SMOKE) if config.smoke else small_gpt.Shape()
        shape = replace(shape, batch=config.rows * count)
        for name, make in ways.items():
            figures[name][count] = make(shape, mesh, count).report.memory.temp_bytes
    reference = figures["GPipe by jax.grad"]
    columns = {"step": ""}
    for count in config.num_microbatches:
        columns |= {f"{count} microbatches, MiB": ".1f", f"{count}, ratio": ".3f"}
    rows = []
    for name, by_count in figures.items():
        cells = [
            x for count, size in by_count.items() for x in (size / MIB, size / reference[count])
        ]
        rows.append(dict(zip(columns, (name, *cells), strict=True)))
    title = f"Temporary memory of a step on each device, microbatches of {config.rows} rows"
    record.tables.append(report.Table(title, columns, rows, report.mesh_text(mesh)))
    record.finish(config.out)


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    from jaxpar.runtime.distributed import use_fake_devices

    use_fake_devices(arguments.num_stages)
    main(arguments)
