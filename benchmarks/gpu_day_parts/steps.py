"""Training steps of one model by jaxpar, plain JAX or PyTorch, which has the memory of the device for itself.

jaxpar's run comes first: it writes its first losses, which the others must have too, and its initial parameters for PyTorch.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import report
import timing
import torch_process
from gpt_training import CHECKED_STEPS, IN_DOCUMENTS, Ours, Work, figures, make_batch, make_shape

from gpu_day_parts import roofline
from gpu_day_parts.common import Context

STEPS, ROUNDS = 3, 7
TITLE = "Training steps"
COLUMNS = {
    "job": "",
    "run": "",
    "ms a step": ".1f",
    "spread": ".1%",
    "time ratio": ".3f",
    "tokens/s": ",.0f",
}
COLUMNS |= {"TFLOP/s": ".0f", "MFU": ".3f", "peak GiB": ".1f", "first compile s": ".1f"}
NOTE = (
    f"Medians of up to {ROUNDS} rounds of {STEPS} steps, each row in a process of its own; the spread is that of the rounds. "
    "Time ratio: over jaxpar's first row of the job; of documents over that of whole rows. All rows of a job have the same "
    "first losses. Only jaxpar's rows have the flags of XLA that `jaxpar.initialize` sets."
)


@dataclass(frozen=True)
class Run:
    """A way to train: by "jaxpar", "jax" or "torch"; a rematerialisation by name, or PyTorch's attention kernel."""

    library: str
    setting: str


RUNS = {
    "jaxpar": Run("jaxpar", "none"),
    "jaxpar, remat dots": Run("jaxpar", "dots"),
    "jax.checkpoint, dots": Run("jax", "dots"),
    "PyTorch, torch.compile": Run("torch", "flash"),
}


def measure(context: Context, name: str, run: str) -> Iterator[report.Table]:
    """Times steps of one of ``WORKS`` by one of ``RUNS``."""
    work, library = context.work(name), RUNS[run].library
    if library == "jaxpar":
        import jaxpar

        jaxpar.initialize()  # XLA's flags for GPUs, as in a training run
    folder = context.folder / name
    folder.mkdir(exist_ok=True)
    by_library = by_torch if library == "torch" else by_jax
    found, bounds = by_library(context, work, RUNS[run], folder)
    check_same(folder, work, run, found)
    context.say(
        f"{run}: {found['ms a step']:.2f} ms a step, MFU {report.cell(found['MFU'], '.3f')}"
    )
    yield table(work, run, found)
    if bounds:
        yield roofline.table(work.job, run, bounds)


def by_jax(
    context: Context, work: Work, run: Run, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the figures of steps by jaxpar or JAX, and what the roofline and the plan say of them."""
    import jax

    ours = Ours(work, run.setting, plain=run.library == "jax")
    is_for_torch = context.torch_python and torch_process.has_model(work)
    if is_for_torch and not (folder / "spec.json").exists():
        torch_process.write_inputs(
            folder, work, ours.shape, ours.host_params(), make_batch(work, ours.shape)
        )
    losses = ours.train(CHECKED_STEPS)
    seconds = rounds(context, lambda count: [ours.train(count), time.perf_counter()][1])
    ours.note_peak()
    found = {"losses": losses, "parameters": ours.num_params} | ours.facts
    found |= rates(work, ours.shape, ours.num_params, seconds, jax.devices()[0].device_kind)
    remat = run.setting if run.library == "jaxpar" else None
    return found, roofline.of_step(ours, found["ms a step"] / 1e3, remat)


def by_torch(
    context: Context, work: Work, run: Run, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the figures of steps by PyTorch, from the parameters that jaxpar's run wrote."""
    if not context.torch_python:
        raise RuntimeError(
            "there is no PyTorch: install it, or name its interpreter with --torch-python"
        )
    if not (folder / "spec.json").exists():
        raise RuntimeError("jaxpar's run did not write the initial parameters")
    how = "eager" if context.smoke else "compile"
    with torch_process.start(
        context.torch_python, folder, how, run.setting, cpu=context.smoke
    ) as theirs:
        losses = torch_process.first_losses(theirs)
        seconds = rounds(context, lambda count: [theirs.train(count), time.perf_counter()][1])
        num_params, kind = theirs.about["num_params"], theirs.about["device_kind"]
        found = {"losses": losses, "parameters": num_params} | theirs.facts
        found["run"] = (
            f"PyTorch {theirs.about['torch']}, {'no compiler' if context.smoke else 'torch.compile'}"
        )
        return found | rates(work, make_shape(work), num_params, seconds, kind), {}


def rounds(context: Context, train: Callable[[int], float]) -> list[float]:
    """Returns the seconds of a step in each round; ``train(count)`` runs steps and returns the time at their end."""
    steps, count = (1, 1) if context.smoke else (STEPS, ROUNDS)
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        seconds.append((train(steps) - began) / steps)
        if context.left < 3 * steps * seconds[-1]:
            break
    return seconds


def rates(
    work: Work, shape: Any, num_params: int, seconds: list[float], kind: str
) -> dict[str, Any]:
    found = figures(work, shape, num_params, statistics.median(seconds), kind)
    return found | {"spread": timing.spread(seconds)}


def check_same(folder: Path, work: Work, run: str, found: dict[str, Any]) -> None:
    """Keeps the first losses of a job; raises if another run of it has others, or another model."""
    kept = folder / "first.json"
    if not kept.exists():
        kept.write_text(
            json.dumps({"run": run, "losses": found["losses"], "parameters": found["parameters"]})
        )
        return
    first = json.loads(kept.read_text())
    if first["parameters"] != found["parameters"]:
        raise RuntimeError(
            f"another model: {found['parameters']} parameters, {first['parameters']} by {first['run']}"
        )
    losses = first["losses"], found["losses"]
    if not torch_process.losses_agree(make_shape(work), *losses):
        raise RuntimeError(
            f"it does not train this model: losses {losses[1]}, {losses[0]} by {first['run']}"
        )


def table(work: Work, run: str, found: dict[str, Any]) -> report.Table:
    row = {"job": work.job, "run": run} | found
    return report.Table(
        TITLE, COLUMNS, [{column: row.get(column) for column in COLUMNS}], "one device", NOTE
    )


def with_ratios(steps: report.Table) -> report.Table:
    """Returns the table with each row's time over that of the first row of its job, of documents of whole rows."""
    first: dict[str, float] = {}
    rows = []
    for row in steps.rows:
        reference = first.setdefault(row["job"].replace(IN_DOCUMENTS, ""), row["ms a step"])
        rows.append(row | {"time ratio": row["ms a step"] / reference})
    return replace(steps, rows=rows)
