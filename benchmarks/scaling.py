"""How do compile time and host time grow? With microbatches, layers and devices, for a small GPT compiled from shapes.

    python benchmarks/scaling.py

`build` is Python: the schedule, its tables, the traced layer. `compile` is XLA. `instructions` are those of the program, which
do not depend on how busy the machine is.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

sys.path.insert(0, os.path.dirname(__file__))

MESHES = {8: (1, 4, 2), 32: (4, 4, 2), 128: (8, 8, 2), 512: (16, 16, 2)}  # devices: data, stage, tensor


@dataclass(frozen=True)
class Config:
    """What to compile."""

    num_microbatches: tuple[int, ...] = (8, 64, 256)
    """Microbatches, on 8 devices and 8 layers."""
    layers: tuple[int, ...] = (8, 32, 128)
    """Layers, on 8 devices with 8 microbatches."""
    devices: tuple[int, ...] = (8, 32, 128, 512)
    """Devices, with 16 layers and 16 microbatches: of these the mesh is known."""
    schedule: str = "1f1b"
    """The pipeline's schedule."""
    out: Path | None = None
    """A JSON file for the figures."""
    smoke: bool = False
    """The smallest alone: does it run?"""
    one: tuple[int, int, int] | None = None
    """Compile for these devices, layers and microbatches and print JSON: what this script asks of itself."""


def compile_one(devices: int, layers: int, count: int, name: str) -> dict:
    from jaxpar.distributed import use_fake_devices

    use_fake_devices(devices)
    import jax
    import small_gpt
    from compiled import batch_shapes, shapes

    import jaxpar
    from jaxpar.schedule import make_schedule

    data, stage, tensor = MESHES[devices]
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    shape = replace(small_gpt.Shape(), layers=layers, batch=4 * data * count)
    params = small_gpt.make_params(replace(shape, embed=64))
    shardings = jaxpar.shardings_from_paths(params, mesh, small_gpt.rules(tensor))
    shape, like = replace(shape, embed=64), shapes(params, shardings)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1))  # JAX's own start is not ours
    start = time.perf_counter()
    schedule = make_schedule(name, stage, count, form="unit")
    step = jaxpar.value_and_grad(
        small_gpt.MODEL, small_gpt.loss, mesh, schedule=schedule, num_microbatches=count, shardings=shardings
    )
    lowered = jax.jit(step).lower(like, batch_shapes(shape, mesh))
    built = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    text = compiled.as_text() or ""
    return {"build_seconds": built - start, "compile_seconds": done - built, "instructions": text.count(" = ")}


def main(config: Config) -> None:
    from rich.console import Console
    from rich.table import Table

    cases = {
        "microbatches": [(8, 8, count) for count in config.num_microbatches],
        "layers": [(8, layers, 8) for layers in config.layers],
        "devices": [(devices, 16, 16) for devices in config.devices],
    }
    table = Table("grows", "devices", "layers", "microbatches", "build s", "compile s", "instructions")
    rows = []
    if config.smoke:
        cases = {"devices": cases["devices"][:1]}
    for grows, sizes in cases.items():
        for size in sizes:
            command = [sys.executable, __file__, "--schedule", config.schedule, "--one", *map(str, size)]
            figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append({"grows": grows, "devices": size[0], "layers": size[1], "microbatches": size[2]} | figures)
            seconds = (f"{figures[f'{key}_seconds']:.1f}" for key in ("build", "compile"))
            table.add_row(grows, *map(str, size), *seconds, f"{figures['instructions']:,}")
    Console(width=100).print(table)
    if config.out is not None:
        config.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    if arguments.one is None:
        main(arguments)
    else:
        print(json.dumps(compile_one(*arguments.one, arguments.schedule)))
