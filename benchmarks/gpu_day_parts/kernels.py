"""Where the time of a training step goes: a profile of two steps of the 1.1B Llama, kernel by kernel."""

import collections
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from gpt_training import CHECKED_STEPS, Ours

from gpu_day_parts.common import Context

STEPS, MOST = 2, 24
BY_KIND = {"kernels": "", "ms a step": ".1f", "share": ".1%"}
BY_NAME = {"kernel": "", "ms a step": ".2f", "times a step": ".0f"}
# Parts of kernels' names, which are cuDNN's, cuBLAS', Triton's and XLA's; all others are elementwise, reductions and slices.
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "compute_dot_do_o", "convert_dq"),
    "products": ("nvjet", "gemm", "cublas", "cutlass", "mosaic", "dot_general"),
    "copies": ("memcpy", "memset", "copy"),
}
OTHER = "elementwise, reductions, slices"


def measure(context: Context) -> Iterator[report.Table]:
    """Profiles steps that are compiled and have run."""
    import jax

    work = context.work("llama")
    ours = Ours(work)
    ours.train(CHECKED_STEPS)
    with tempfile.TemporaryDirectory(dir=context.folder) as folder:
        with jax.profiler.trace(folder):
            ours.train(STEPS)
        spent, times = kernels_of(Path(folder), everywhere=context.smoke)
    if not spent:
        raise RuntimeError("the profile has no kernels of a GPU")
    yield from tables(work.job, spent, times)


def kernels_of(folder: Path, *, everywhere: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the milliseconds of a step in each kernel of the first GPU, and how often a step runs it.

    Args:
        folder: What ``jax.profiler.trace`` wrote.
        everywhere: Whether what other devices did counts too.
    """
    import jax

    data = jax.profiler.ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    spent, times = collections.Counter[str](), collections.Counter[str]()
    for plane in data.planes:
        if not everywhere and not plane.name.endswith("GPU:0"):
            continue
        for line in plane.lines:
            # A GPU's other lines sum up the kernels of its streams.
            if everywhere or line.name.startswith("Stream"):
                add(line, spent, times)
    per_step = lambda counted: {name: count / STEPS for name, count in counted.items()}
    return per_step(spent), per_step(times)


def add(line: Any, spent: collections.Counter, times: collections.Counter) -> None:
    for event in line.events:
        spent[event.name] += event.duration_ns / 1e6
        times[event.name] += 1


def kind_of(kernel: str) -> str:
    """Returns what a kernel does, by its name."""
    name = kernel.lower()
    return next(
        (kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER
    )


def tables(job: str, spent: dict[str, float], times: dict[str, float]) -> Iterator[report.Table]:
    """Yields the time by kind of kernel, and the kernels that take most of it."""
    whole, by_kind = sum(spent.values()), collections.defaultdict[str, float](float)
    for name, milliseconds in spent.items():
        by_kind[kind_of(name)] += milliseconds
    kinds = sorted(by_kind.items(), key=lambda item: -item[1])
    rows = [dict(zip(BY_KIND, (kind, ms, ms / whole), strict=True)) for kind, ms in kinds]
    note = f"By the kernels' names, of {whole:.1f} ms in all."
    yield report.Table(f"Where the time of a step goes: {job}", BY_KIND, rows, "one device", note)
    most = sorted(spent, key=lambda name: -spent[name])[:MOST]
    rows = [dict(zip(BY_NAME, (name[:80], spent[name], times[name]), strict=True)) for name in most]
    note = f"{len(most)} of {len(spent)}."
    yield report.Table(f"The kernels that take longest: {job}", BY_NAME, rows, "one device", note)
