"""The roofline and the plan of a compiled training step, beside what the step took and needed on the device."""

from typing import Any

import report
from gpt_training import GIB, Ours, device_peak, planned_bytes

from gpu_day_parts.common import gpu_of, in_words

COLUMNS = {
    "job": "",
    "run": "",
    "products ms": ".1f",
    "as compiled ms": ".1f",
    "measured ms": ".1f",
}
COLUMNS |= {
    "measured / as compiled": ".3f",
    "host waits": ".0f",
    "planned ms": ".1f",
    "measured / planned": ".3f",
}
COLUMNS |= {"plan GiB": ".1f", "compiler GiB": ".1f", "device GiB": ".1f", "device / plan": ".3f"}
REMAT = {"none": False, "full": True}
TITLE = "The same steps by the roofline, the planner and the device"
NOTE = (
    "As compiled: by the roofline, at the datasheet's rates. Planned: by the planner, with its constants for this GPU. Plan "
    "and compiler: the bytes that they expect; device: the peak of the process."
)


def of_step(ours: Ours, seconds: float, remat: str | None) -> dict[str, Any]:
    """Returns the bounds of a step that took ``seconds``, what the planner says of it, and the memory; or an "error".

    Args:
        ours: The compiled step.
        seconds: What a step took.
        remat: Its rematerialisation by name, where the planner knows it.
    """
    found = {"measured ms": seconds * 1e3, "compiler GiB": planned_bytes(ours.step) / GIB}
    if (peak := device_peak()) is not None:
        found["device GiB"] = peak / GIB
    gpu = gpu_of(ours.mesh.devices.flat[0])
    try:
        found |= {} if gpu is None else roofline_of(ours.step, ours.mesh, gpu)
        is_planned = (
            remat in REMAT and not ours.work.documents
        )  # for which attention takes less time
        found |= planned(ours, gpu or "h100", REMAT[remat]) if is_planned else {}
    except Exception as error:  # the step's own figures stay
        return found | {"error": in_words(error)}
    return found | ratios(found)


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Returns what was measured over what was expected, where both are there."""
    pairs = {
        "measured / as compiled": ("measured ms", "as compiled ms"),
        "measured / planned": ("measured ms", "planned ms"),
        "device / plan": ("device GiB", "plan GiB"),
    }
    return {
        name: found[top] / found[base]
        for name, (top, base) in pairs.items()
        if {top, base} <= set(found)
    }


def roofline_of(compiled: Any, mesh: Any, gpu: str) -> dict[str, Any]:
    """Returns the bounds of a compiled step on one GPU, in milliseconds."""
    import jaxpar
    from jaxpar.planner import cluster, roofline

    bound = roofline(jaxpar.inspect_step(compiled, mesh=mesh), cluster(gpu, devices_per_node=1))
    found = {"products ms": bound.products * 1e3, "as compiled ms": bound.as_compiled * 1e3}
    return found | {"host waits": bound.host_waits}


def planned(ours: Ours, gpu: str, remat: bool) -> dict[str, Any]:
    """Returns the time and the memory of a step by the planner, which compiles nothing."""
    import jax.numpy as jnp
    import optax

    from jaxpar.planner import Choice, cluster, price, transformer_shape

    dtype = jnp.float32 if ours.lora is None else jnp.bfloat16
    model = transformer_shape(ours.shape, seq=ours.work.seq, lora=ours.lora, param_dtype=dtype)
    machine, choice, rows = (
        cluster(gpu, devices_per_node=1),
        Choice(remat=remat),
        ours.work.batch_size,
    )
    plan = price(model, machine, choice, batch_size=rows, optimizer=optax.adamw(1e-4))
    return {"planned ms": plan.step_seconds * 1e3, "plan GiB": plan.memory_bytes / GIB}


def table(job: str, run: str, bounds: dict[str, Any]) -> report.Table:
    """Returns the bounds of a run."""
    row = {"job": job, "run": run} | bounds
    note = f"{NOTE} {run}: {row['error']}." if "error" in row else NOTE
    return report.Table(
        TITLE, COLUMNS, [{column: row.get(column) for column in COLUMNS}], "one device", note
    )
