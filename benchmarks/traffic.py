"""How much must cross each axis, and how much does? Bytes that the busiest device sends a step, from the compiled program.

    python benchmarks/traffic.py

The least, by ring algorithms: over `data` 2 (N-1)/N of a device's gradients once a step; over `tensor` four all-reduces of an
activation a layer and microbatch, 2 (N-1)/N each; over `stage` one activation and one gradient a boundary and microbatch.
Embedding and head are whole on every device of this model; what they cost beside that is in the last column.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, os.path.dirname(__file__))


@dataclass(frozen=True)
class Config:
    """What to count."""

    num_microbatches: int = 8
    """Microbatches of a step."""
    out: Path | None = None
    """A JSON file for the figures."""
    smoke: bool = False
    """A tiny model: does it run?"""


def main(config: Config) -> None:
    import small_gpt
    from compiled import Step, gpipe_step, jaxpar_step, plain_step
    from rich.console import Console
    from rich.table import Table

    import jaxpar
    from jaxpar.inspect.text import bytes_text

    shape = small_gpt.Shape(**small_gpt.SMOKE) if config.smoke else small_gpt.Shape()
    count = config.num_microbatches
    meshes = {axis: jaxpar.make_mesh(**{axis: 4}) for axis in ("data", "tensor", "stage")}
    ways = {
        "data": {
            "jaxpar": jaxpar_step(shape, meshes["data"], count),
            # Of microbatches in a scan XLA's partitioner would let every device compute all.
            "jax.jit with shardings, one batch": plain_step(shape, meshes["data"], 1),
        },
        "tensor": {
            "jaxpar": jaxpar_step(shape, meshes["tensor"], count),
            "jax.jit with shardings": plain_step(shape, meshes["tensor"], count),
        },
        "stage": {
            **{
                f"jaxpar {name}": jaxpar_step(shape, meshes["stage"], count, name)
                for name in ("1f1b", "zb-h1", "gpipe")
            },
            "jax.jit with shardings": plain_step(shape, meshes["stage"], count),
            "GPipe by jax.grad": gpipe_step(shape, meshes["stage"], count),
        },
    }

    def least(axis: str, step: Step) -> int:
        gradients = sum(leaf.dtype.itemsize * leaf.size for part in step.params.values() for leaf in part.values())
        return {
            "data": 2 * 3 * gradients // 4,
            "tensor": 4 * shape.layers * count * 2 * 3 * step.activation_bytes // 4,
            "stage": 2 * count * step.activation_bytes,
        }[axis]

    def in_layers(axis: str, step: Step) -> int:
        """The bytes that the formula speaks of: over stage those of the messages."""
        if axis != "stage":
            return step.report.bytes_moved(axis=axis)
        return step.report.bytes_moved("collective-permute", axis)

    table = Table(
        "axis", "step", "least", "sent", "ratio", "beside it", title=f"Traffic, 4 devices, {count} microbatches"
    )
    rows = []
    for axis, steps in ways.items():
        for name, step in steps.items():
            wanted, sent = least(axis, step), in_layers(axis, step)
            beside = step.report.bytes_moved(axis=axis) - sent
            rows.append({"axis": axis, "step": name, "least": wanted, "sent": sent, "beside": beside})
            table.add_row(axis, name, bytes_text(wanted), bytes_text(sent), f"{sent / wanted:.4f}", bytes_text(beside))
    Console(width=120).print(table)
    if config.out is not None:
        config.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    from jaxpar.distributed import use_fake_devices

    use_fake_devices(4)
    main(arguments)
