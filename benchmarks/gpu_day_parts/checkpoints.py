"""What a checkpoint of the 1B Llama with AdamW costs: how long the loop is blocked, how fast it is written and read back.

Training goes on beside the first timed save. The restored state must equal the saved one in every bit.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from gpt_training import GIB, Ours

from gpu_day_parts.common import Context

COLUMNS = {
    "state GiB": ".2f",
    "on disk GiB": ".2f",
    "loop stands still s": ".2f",
    "save s": ".2f",
    "written GB/s": ".2f",
}
COLUMNS |= {
    "ms a step": ".1f",
    "ms a step beside a save": ".1f",
    "restore s": ".2f",
    "read GB/s": ".2f",
    "restored equal": "",
}


def measure(context: Context) -> Iterator[report.Table]:
    """Trains, saves twice and restores."""
    import jax
    import jax.numpy as jnp

    import jaxpar

    with tempfile.TemporaryDirectory(dir=context.folder) as folder:
        layers = () if context.smoke else tuple(layers_that_fit(Path(folder)).items())
        work = context.work("llama", changes=layers)
        ours = Ours(work)
        ours.train(1 if context.smoke else 3)
        step_seconds = per_step(ours, 2 if context.smoke else 10)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(ours.state))
        context.say(f"a state of {size / GIB:.2f} GiB, a step of {step_seconds * 1e3:.1f} ms")
        manager = jaxpar.CheckpointManager(folder, ours.mesh, keep=1)
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
            "state GiB": size / GIB,
            "ms a step": step_seconds * 1e3,
        }
        manager.save(ours.state)  # compiles, and makes the files' cache warm
        ours.train(1)
        kept, step = jax.tree.map(jnp.copy, ours.state), int(ours.state.step)
        waited, saved, beside = save_while_training(manager, ours)
        row |= {"loop stands still s": waited, "save s": saved, "written GB/s": size / saved / 1e9}
        row |= {"ms a step beside a save": beside * 1e3, "on disk GiB": on_disk(Path(folder)) / GIB}
        context.say(f"saved in {saved:.1f} s, of which the loop stood still {waited:.2f} s")
        yield table(work, ours.shape, row)
        began = time.perf_counter()
        restored = manager.restore(kept, step=step)
        jax.block_until_ready(restored)
        row |= {"restore s": time.perf_counter() - began}
        row |= {
            "read GB/s": size / row["restore s"] / 1e9,
            "restored equal": "yes" if equal(kept, restored) else "NO",
        }
        manager.close()
        yield table(work, ours.shape, row)
        if row["restored equal"] != "yes":
            raise AssertionError("the restored state is not the saved one")


def layers_that_fit(folder: Path) -> dict[str, int]:
    """Returns fewer layers where the disk has no room for two checkpoints: an old one is deleted after the new one is whole."""
    free = shutil.disk_usage(folder).free
    return next(
        (
            {"num_layers": count}
            for count in (22, 11, 6)
            if 2.5 * 12 * (0.05e9 * count + 0.14e9) < free
        ),
        {"num_layers": 2},
    )


def per_step(ours: Ours, count: int) -> float:
    began = time.perf_counter()
    ours.train(count)
    return (time.perf_counter() - began) / count


def save_while_training(manager: Any, ours: Ours) -> tuple[float, float, float]:
    """Returns the seconds until a save returned and until it was committed, and those of a step meanwhile."""
    began = time.perf_counter()
    manager.save_async(ours.state)
    waited = time.perf_counter() - began
    seconds = []
    while manager.saving is not None or not seconds:
        seconds.append(per_step(ours, 1))
    saved = time.perf_counter() - began
    manager.wait()
    if manager.failures:
        raise OSError("; ".join(manager.failures))
    return waited, saved, sum(seconds) / len(seconds)


def on_disk(folder: Path) -> int:
    """Returns the bytes of the files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def equal(saved: Any, restored: Any) -> bool:
    """Returns whether all arrays have the same bits."""
    import jax
    import jax.numpy as jnp

    def same(a: Any, b: Any) -> Any:
        bits = lambda x: (
            jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
        )
        return a.dtype == b.dtype and a.shape == b.shape and bool(jnp.array_equal(bits(a), bits(b)))

    return jax.tree.structure(saved) == jax.tree.structure(restored) and all(
        map(same, jax.tree.leaves(saved), jax.tree.leaves(restored))
    )


def table(work: Any, shape: Any, row: dict[str, Any]) -> report.Table:
    title = f"A checkpoint of {work.model} with {shape.num_layers} layers and AdamW's state"
    note = "A save compares replicas, copies, writes, hashes and commits; a restore verifies every file and array."
    return report.Table(title, COLUMNS, [row], "one device", note)
