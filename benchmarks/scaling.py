"""How do compile time and host time grow? With microbatches, layers and devices, for a small GPT compiled from shapes.

    python benchmarks/scaling.py

Build is the time of Python: the schedule, its tables, the traced layer. Compile is the time of XLA, for fake devices. Each is
measured once, in its own process; instructions are those of the compiled program and do not depend on the machine's load.
Ratios are to a table's first row.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import report
import tyro

MESHES = {
    8: (1, 4, 2),
    32: (4, 4, 2),
    128: (8, 8, 2),
    512: (16, 16, 2),
}  # devices: data, stage, tensor
AXES = ("data", "stage", "tensor")
COLUMNS = {
    "mesh": "",
    "devices": "d",
    "layers": "d",
    "microbatches": "d",
    "build s": ".2f",
    "build ratio": ".2f",
    "compile s": ".2f",
    "compile ratio": ".2f",
    "instructions": ",d",
}


@dataclass(frozen=True)
class Config(report.Options):
    """What to compile."""

    num_microbatches: tuple[int, ...] = (8, 64, 256)
    """Microbatches, on 8 devices and 8 layers."""
    layers: tuple[int, ...] = (8, 32, 128)
    """Layers, on 8 devices with 8 microbatches."""
    devices: tuple[int, ...] = (8, 32, 128, 512)
    """Devices, with 16 layers and 16 microbatches; there are meshes for the default numbers only."""
    schedule: str = "1f1b"
    """The pipeline's schedule."""
    one: tuple[int, int, int] | None = None
    """Compile for these devices, layers and microbatches and print JSON, which this script uses for each measurement."""


def compile_one(devices: int, layers: int, count: int, name: str) -> dict:
    from jaxpar.runtime.distributed import use_fake_devices

    use_fake_devices(devices)
    import jax
    import small_gpt
    from compiled_steps import shapes

    import jaxpar
    from jaxpar.schedule import lockstep_form, make_schedule

    data, stage, tensor = MESHES[devices]
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    shape = replace(small_gpt.Shape(), layers=layers, batch=4 * data * count)
    params = small_gpt.make_params(replace(shape, embed=64))
    shardings = jaxpar.shardings_from_paths(params, mesh, small_gpt.rules(tensor))
    shape, like = replace(shape, embed=64), shapes(params, shardings)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1))  # leaves out JAX's own start
    start = time.perf_counter()
    schedule = make_schedule(name, stage, count, form=lockstep_form(name))
    step = jaxpar.value_and_grad(
        small_gpt.MODEL,
        small_gpt.loss,
        mesh,
        schedule=schedule,
        num_microbatches=count,
        shardings=shardings,
    )
    lowered = jax.jit(step).lower(like, jaxpar.abstract_batch(small_gpt.make_batch(shape), mesh))
    built = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    text = compiled.as_text() or ""
    return {
        "build_seconds": built - start,
        "compile_seconds": done - built,
        "instructions": text.count(" = "),
    }


def main(config: Config) -> None:
    record = report.Record.start("scaling", config)
    cases = {
        "microbatches": [(8, 8, count) for count in config.num_microbatches],
        "layers": [(8, layers, 8) for layers in config.layers],
        "devices": [(devices, 16, 16) for devices in config.devices],
    }
    if config.smoke:
        cases = {"devices": cases["devices"][:1]}
    for grows, sizes in cases.items():
        found = [ask(size, config.schedule) for size in sizes]
        rows = [row(size, figures, found[0]) for size, figures in zip(sizes, found, strict=True)]
        record.tables.append(
            report.Table(f"More {grows}, schedule {config.schedule}", COLUMNS, rows)
        )
    record.finish(config.out)


def ask(size: tuple[int, int, int], schedule: str) -> dict:
    """Returns the figures of one size, measured in its own process."""
    command = [sys.executable, __file__, "--schedule", schedule, "--one", *map(str, size)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def row(size: tuple[int, int, int], figures: dict, first: dict) -> dict:
    devices, layers, count = size
    mesh = ", ".join(
        f"{axis} {extent}" for axis, extent in zip(AXES, MESHES[devices], strict=True) if extent > 1
    )
    measured = [
        x
        for name in ("build_seconds", "compile_seconds")
        for x in (figures[name], figures[name] / first[name])
    ]
    cells = (mesh, devices, layers, count, *measured, figures["instructions"])
    return dict(zip(COLUMNS, cells, strict=True))


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    if arguments.one is None:
        main(arguments)
    else:
        print(json.dumps(compile_one(*arguments.one, arguments.schedule)))
