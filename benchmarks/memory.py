"""What does a pipeline keep? Temporary bytes on a device, as the compiler allots them, by schedule and number of microbatches.

    python benchmarks/memory.py

Microbatches have the same size throughout, so a step of more of them has more rows. GPipe by `jax.grad` keeps what every tick
made for the backward pass; a schedule with a bound keeps what is between F and W.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

sys.path.insert(0, os.path.dirname(__file__))


@dataclass(frozen=True)
class Config:
    """What to compile."""

    num_stages: int = 4
    """Pipeline stages, each a fake device."""
    num_microbatches: tuple[int, ...] = (8, 32)
    """Microbatches of a step, one row of the table for each schedule, one column for each of these."""
    rows: int = 4
    """Rows of a microbatch."""
    out: Path | None = None
    """A JSON file for the figures."""
    smoke: bool = False
    """A tiny model: does it run?"""


def main(config: Config) -> None:
    import small_gpt
    from compiled import gpipe_step, jaxpar_step, plain_step
    from rich.console import Console
    from rich.table import Table

    import jaxpar

    mesh = jaxpar.make_mesh(stage=config.num_stages)
    ways = {
        "GPipe by jax.grad": gpipe_step,
        "jax.jit with shardings": plain_step,
        **{
            f"jaxpar {name}{', remat' if remat else ''}": lambda *args, name=name, remat=remat: jaxpar_step(
                *args, name, remat=remat
            )
            for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
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
    columns = [f"{count} microbatches, MiB" for count in config.num_microbatches]
    table = Table(
        "step", *columns, "of GPipe by jax.grad", title=f"Temporary memory on each of {config.num_stages} stages"
    )
    reference = figures["GPipe by jax.grad"]
    for name, by_count in figures.items():
        shares = " / ".join(f"{by_count[count] / reference[count]:.3f}" for count in config.num_microbatches)
        table.add_row(name, *(f"{size / 2**20:.0f}" for size in by_count.values()), shares)
    Console(width=120).print(table)
    if config.out is not None:
        config.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    from jaxpar.distributed import use_fake_devices

    use_fake_devices(arguments.num_stages)
    main(arguments)
