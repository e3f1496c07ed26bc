"""What does the program for GPUs do beside its products? Counted in steps compiled for GPUs that are not here.

    python benchmarks/gpu_program.py                           8 H100, every mesh, schedule and model (an hour)
    python benchmarks/gpu_program.py --models gpt --schedules 1f1b

An 8-layer GPT, 512 in width, and a Llama of 16 layers, 2,048 in width (0.8B parameters), with 16 and 8 microbatches of one row
for each replica, in bfloat16. It needs jaxpar[gpu-compile] and no GPU. Counted are copies of 1 MiB and more in the loops of
the program, those of whole rings of residuals over a step apart, waits of the host, and how many messages of the steady state
have a matrix product between their start and their end.
Then the temporary memory against that of the planner, and the highest MFU that the program can reach at the datasheet's rates
in the order in which it is compiled (`jaxpar/planner/compiled.py`).
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import report
import tyro

MIB = 2**20
CHUNKS = {"interleaved": 2, "zb-v": 2}
COLUMNS = {
    "schedule": "",
    "remat": "",
    "ZeRO": "d",
    "rings copied, MiB": ".1f",
    "copied a tick, MiB": ".1f",
    "host waits a tick": ".1f",
    "messages beside products": "",
    "temporary MiB": ".0f",
    "by plan": ".2f",
    "highest MFU": ".1%",
}


@dataclass(frozen=True)
class Config(report.Options):
    """What to compile."""

    gpu: str = "h100"
    """The GPU: a100-40gb, a100-80gb, h100, h200 or b200."""
    models: tuple[str, ...] = ("gpt", "llama")
    """gpt, llama."""
    meshes: tuple[str, ...] = ("2,2,2", "1,4,2", "2,4,1", "1,8,1")
    """Sizes of data, stage and tensor."""
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v")
    """Schedules, in the form that their names give."""
    remat: tuple[str, ...] = ("no", "yes")
    """Whether layers are recomputed."""
    zero: tuple[int, ...] = (0, 1, 3)
    """ZeRO levels, on meshes with more than one replica; 0 on the others."""


def main(config: Config) -> None:
    import jaxpar
    from jaxpar.planner import cluster

    record = report.Record.start("gpu_program", config)
    try:
        devices = jaxpar.compile_only_devices(config.gpu, devices_per_node=8)
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(report.CANNOT_RUN) from None
    models, meshes = (config.models[:1], config.meshes[:1]) if config.smoke else (config.models, config.meshes)
    for name in models:
        for sizes in meshes:
            axes = dict(zip(("data", "stage", "tensor"), map(int, sizes.split(",")), strict=True))
            mesh = jaxpar.make_mesh(**axes, devices=devices)
            rows = [
                counts(
                    name,
                    mesh,
                    cluster(config.gpu),
                    {**axes, "schedule": schedule, "remat": remat == "yes", "zero": zero},
                )
                for schedule in (config.schedules[:1] if config.smoke else config.schedules)
                for remat in (config.remat[:1] if config.smoke else config.remat)
                for zero in (config.zero if axes["data"] > 1 and not config.smoke else config.zero[:1])
            ]
            title = f"A step of {name}, compiled for eight {config.gpu}"
            record.tables.append(report.Table(title, COLUMNS, [row for row in rows if row], report.mesh_text(mesh)))
    record.finish(config.out)


def counts(name: str, mesh: Any, machines: Any, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a row of a table; None where the layers do not divide into the chunks."""
    import optax

    from jaxpar.planner import Choice, price, roofline
    from jaxpar.planner.compiled import compile_choice

    shape, count = shape_of(name), {"gpt": 16, "llama": 8}[name]
    choice = Choice(**settings, num_microbatches=count, num_chunks=CHUNKS.get(settings["schedule"], 1))
    if shape.num_layers < choice.stage * choice.num_chunks:
        return None
    num_rows, optimizer = choice.data * count, optax.adam(1e-4)
    plan = price(shape, machines, choice, batch_size=num_rows, optimizer=optimizer)
    _, found = compile_choice(shape, choice, mesh, optimizer, num_rows)
    gpu, ticks = found.gpu, choice.program(count).schedule.num_ticks
    assert gpu is not None
    copies, is_ring = [each for each in gpu.copies if each.times > 1], rings_of(shape, choice)
    messages = [each for each in gpu.transfers if each.kind == "collective-permute"]
    steady = max((each.times for each in messages), default=0)
    of_steady = [each for each in messages if each.times == steady]
    planned = plan.memory_bytes - plan.bytes_per_device["params"] - plan.bytes_per_device["optimizer"]
    cells = (
        choice.schedule,
        "yes" if choice.remat else "no",
        choice.zero,
        sum(each.num_bytes * each.times for each in copies if is_ring(each.array)) / MIB,
        sum(each.num_bytes * each.times for each in copies) / ticks / MIB,
        gpu.host_waits / ticks,
        f"{sum(each.flops_meanwhile > 0 for each in of_steady)} of {len(of_steady)}",
        found.memory.temp_bytes / MIB,
        found.memory.temp_bytes / planned,
        roofline(found, machines).mfu(plan.useful_flops),
    )
    row = dict(zip(COLUMNS, cells, strict=True))
    print(f"{name}, {choice.axes()}: {row}", file=sys.stderr, flush=True)
    return row


def rings_of(shape: Any, choice: Any) -> Callable[[str], bool]:
    """Returns whether an array in HLO's notation, such as ``bf16[2,4]``, is a ring of residuals with two slots or more.

    XLA may merge and reorder a ring's dims, so it is known by its number of elements: slots times layers of a chunk times those
    of a residual. An activation or a residual may have as many, and is known by its dims.
    """
    from jaxpar.planner.ops import Analysis

    analysis = Analysis(shape, 1, choice.tensor, choice.remat)
    slots, positions = choice.num_slots, choice.layout(shape.num_layers).positions_per_chunk
    residuals = {
        name: [each.shape for each in analysis.layer.shapes(analysis.split.values[name])]
        for name in ("residuals_b", "residuals_w", "cotangents_w")
    }
    sizes = {
        slots[name] * positions * math.prod(dims) for name in residuals if slots[name] > 1 for dims in residuals[name]
    }
    values = [*itertools.chain(*residuals.values()), *(each.shape for each in analysis.x)]
    without_ones = lambda dims: tuple(size for size in dims if size > 1)
    of_one_layer = set(map(without_ones, values))

    def is_ring(array: str) -> bool:
        dims = tuple(int(size) for size in array.partition("[")[2].partition("]")[0].split(",") if size)
        return math.prod(dims) in sizes and without_ones(dims) not in of_one_layer

    return is_ring


def shape_of(name: str) -> Any:
    from jaxpar.models import transformer
    from jaxpar.planner import transformer_shape

    if name == "llama":
        preset = transformer.preset("tinyllama-1.1b", vocab_multiple=128, compute_dtype="bfloat16")
        return transformer_shape(dataclasses.replace(preset, num_layers=16), seq=2048)
    preset = transformer.preset("gpt2", vocab_multiple=128, compute_dtype="bfloat16")
    sizes = {"num_layers": 8, "embed_dim": 512, "num_heads": 8, "mlp_dim": 2048, "max_positions": 512}
    return transformer_shape(dataclasses.replace(preset, **sizes), seq=512)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
