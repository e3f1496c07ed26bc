"""How many bytes must a step send over each axis, and how many does it send? Counted for the busiest device.

    python benchmarks/traffic.py

The minimum, with ring algorithms: over `data` 2 (N-1)/N of a device's gradients once in a step; over `tensor` four all-reduces
of an activation for each layer and microbatch, 2 (N-1)/N each; over `stage` one activation and one gradient for each boundary
and microbatch. Embedding and head are replicated on every device; the last column has their traffic over `stage` and all other
that is not messages. The counts are those of compiled programs and do not depend on the machine.
"""

from dataclasses import dataclass

import report
import tyro

MIB = 2**20


@dataclass(frozen=True)
class Config(report.Options):
    """What to count."""

    num_microbatches: int = 8
    """Microbatches of a step."""


def main(config: Config) -> None:
    import small_gpt
    from compiled_steps import Step, gpipe_step, jaxpar_step, plain_step

    import jaxpar

    record = report.Record.start("traffic", config)
    shape = small_gpt.Shape(**small_gpt.SMOKE) if config.smoke else small_gpt.Shape()
    count = config.num_microbatches
    meshes = {axis: jaxpar.make_mesh(**{axis: 4}) for axis in ("data", "tensor", "stage")}
    ways = {
        "data": {
            "jaxpar": jaxpar_step(shape, meshes["data"], count),
            # With microbatches in a scan, XLA's partitioner would compute all of them on every device.
            "jax.jit with shardings, one batch": plain_step(shape, meshes["data"], 1),
        },
        "tensor": {
            "jaxpar": jaxpar_step(shape, meshes["tensor"], count),
            "jax.jit with shardings": plain_step(shape, meshes["tensor"], count),
        },
        "stage": {
            **{
                f"jaxpar {name}": jaxpar_step(shape, meshes["stage"], count, name)
                for name in (("1f1b",) if config.smoke else ("1f1b", "zb-h1", "gpipe"))
            },
            "jax.jit with shardings": plain_step(shape, meshes["stage"], count),
            **(
                {}
                if config.smoke
                else {"GPipe by jax.grad": gpipe_step(shape, meshes["stage"], count)}
            ),
        },
    }

    def least(axis: str, step: Step) -> int:
        gradients = sum(
            leaf.dtype.itemsize * leaf.size
            for part in step.params.values()
            for leaf in part.values()
        )
        return {
            "data": 2 * 3 * gradients // 4,
            "tensor": 4 * shape.layers * count * 2 * 3 * step.activation_bytes // 4,
            "stage": 2 * count * step.activation_bytes,
        }[axis]

    def in_layers(axis: str, step: Step) -> int:
        """Returns the bytes that ``least`` counts: over stage those of the messages."""
        if axis != "stage":
            return step.report.bytes_moved(axis=axis)
        return step.report.bytes_moved("collective-permute", axis)

    columns = {
        "mesh": "",
        "step": "",
        "least MiB": ".2f",
        "sent MiB": ".2f",
        "ratio": ".4f",
        "beside it MiB": ".2f",
    }
    rows = []
    for axis, steps in ways.items():
        for name, step in steps.items():
            wanted, sent = least(axis, step), in_layers(axis, step)
            beside = step.report.bytes_moved(axis=axis) - sent
            figures = (wanted / MIB, sent / MIB, sent / wanted, beside / MIB)
            rows.append(
                dict(zip(columns, (report.mesh_text(meshes[axis]), name, *figures), strict=True))
            )
    title = f"Bytes that the busiest device sends over the axis of its mesh in a step of {count} microbatches"
    record.tables.append(report.Table(title, columns, rows))
    record.finish(config.out)


if __name__ == "__main__":
    arguments = tyro.cli(Config, description=__doc__)
    from jaxpar.runtime.distributed import use_fake_devices

    use_fake_devices(4)
    main(arguments)
