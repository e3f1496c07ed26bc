"""What jaxpar.value_and_grad costs over jax.value_and_grad, with the same rematerialisation, without an optimizer."""

import time
from collections.abc import Iterator
from typing import Any

import report
from gpt_training import Model, make_batch, make_shape

from gpu_day_parts.common import Candidates, Context

COLUMNS = {
    "remat": "",
    "run": "",
    "ms a call": ".2f",
    "spread": ".1%",
    "time ratio": ".3f",
    "temporary GiB": ".2f",
}
COLUMNS |= {"compile s": ".1f"}
TURN, HOST_CALLS = 3, 200
TITLE = "Loss and gradients of the same model, without the optimizer"


def measure(context: Context) -> Iterator[report.Table]:
    """Compares the two for each rematerialisation, then what a call costs the host."""
    import jax

    import jaxpar

    work, mesh = context.work("llama"), jaxpar.make_mesh(devices=jax.devices()[:1])
    shape = make_shape(work)
    params, batch = (
        jax.jit(Model(shape, mesh).init)(jax.random.key(0)),
        jaxpar.shard_batch(make_batch(work, shape), mesh),
    )
    rows, notes = [], []
    for remat in ("none",) if context.smoke else ("none", "dots", "full"):
        candidates = Candidates(context, turn=1 if context.smoke else TURN)
        for name, function in functions(shape, mesh, remat).items():
            candidates.add(
                f"{name}, remat {remat}" if remat != "none" else name, function, params, batch
            )
        notes.append(candidates.note())
        if candidates.runs:
            rows += rows_of(candidates, remat)
            yield report.Table(TITLE, COLUMNS, rows, "one device", " ".join(filter(None, notes)))
    if not rows:
        raise RuntimeError(f"no candidate ran: {' '.join(notes)}")
    yield host_table(context)


def functions(shape: Any, mesh: Any, remat: str) -> dict[str, Any]:
    """Returns both functions; ``jax.value_and_grad`` of layers in ``jax.checkpoint`` where there is a rematerialisation."""
    model = Model(shape, mesh, remat)
    return {
        "jax.value_and_grad": model.plain_value_and_grad,
        "jaxpar.value_and_grad": model.value_and_grad,
    }


def rows_of(candidates: Candidates, remat: str) -> list[dict[str, Any]]:
    timings = candidates.timed(next(iter(candidates.runs)), repeats=5)
    both = len(timings) == 2
    return [
        {
            "remat": remat,
            "run": name.partition(",")[0],
            "ms a call": timed.wall_seconds / candidates.turn * 1e3,
            "spread": timed.wall_spread,
            "time ratio": timed.wall_ratio if both else None,
            "temporary GiB": candidates.facts[name]["temporary GiB"],
            "compile s": candidates.facts[name]["compile s"],
        }
        for name, timed in timings.items()
    ]


def host_table(context: Context) -> report.Table:
    """Returns the host's time of a call that is not under ``jax.jit``, until it returns: of a tiny model, on any device."""
    import jax

    import jaxpar

    mesh = jaxpar.make_mesh(devices=jax.devices()[:1])
    tiny = Context("gradients", context.folder, True, context.until, context.all_until).work(
        "llama"
    )
    shape = make_shape(tiny)
    model = Model(shape, mesh)
    params, batch = (
        jax.jit(model.init)(jax.random.key(0)),
        jaxpar.shard_batch(make_batch(tiny, shape), mesh),
    )
    runs = {
        "jax.jit(jax.value_and_grad)": jax.jit(model.plain_value_and_grad),
        "jaxpar.value_and_grad": model.value_and_grad,
    }
    calls, seconds = 3 if context.smoke else HOST_CALLS, {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run(params, batch))
    for _ in range(calls):
        for name, run in runs.items():
            began = time.perf_counter()
            results = run(params, batch)
            seconds[name].append(time.perf_counter() - began)
            jax.block_until_ready(results)
    median = {name: sorted(each)[len(each) // 2] * 1e6 for name, each in seconds.items()}
    columns = {"run": "", "host microseconds a call": ".0f"}
    rows = [dict(zip(columns, pair, strict=True)) for pair in median.items()]
    return report.Table(
        f"The host's time of a call, of a tiny model; medians of {calls}",
        columns,
        rows,
        "one device",
    )
