"""The roofline and the plan of a compiled training step, beside what the step took and needed on the device."""

from typing import Any

import report
from gpt_training import GIB, Ours, Work, device_peak, planned_bytes

from gpu_day_parts.common import gpu_of, in_words

COLUMNS = {"run": "", "products ms": ".2f", "least ms": ".2f", "as compiled ms": ".2f", "most ms": ".2f"}
COLUMNS |= {"measured ms": ".2f", "measured / as compiled": ".3f", "host waits": ".0f", "planned ms": ".2f"}
COLUMNS |= {"plan GiB": ".2f", "compiler GiB": ".2f", "device GiB": ".2f", "device / plan": ".3f"}
REMAT = {"none": False, "full": True}


def of_step(work: Work, shape: Any, ours: Ours, seconds: float, remat: str | None) -> dict[str, Any]:
    """Returns the bounds of a step that took ``seconds``, what the planner says of it, and the memory; or an "error".

    Args:
        work: What it trains.
        shape: The model's configuration.
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
        found |= planned(work, shape, gpu or "h100", REMAT[remat]) if remat in REMAT else {}
    except Exception as error:  # the step's own figures stay
        return found | {"error": in_words(error)}
    if "as compiled ms" in found:
        found["measured / as compiled"] = found["measured ms"] / found["as compiled ms"]
    if "plan GiB" in found and "device GiB" in found:
        found["device / plan"] = found["device GiB"] / found["plan GiB"]
    return found


def roofline_of(compiled: Any, mesh: Any, gpu: str) -> dict[str, Any]:
    """Returns the bounds of a compiled step on one GPU, in milliseconds."""
    import jaxpar
    from jaxpar.planner import cluster, roofline

    bound = roofline(jaxpar.inspect_step(compiled, mesh=mesh), cluster(gpu, devices_per_node=1))
    names = ("products", "least", "as_compiled", "most")
    found = {f"{name.replace('_', ' ')} ms": getattr(bound, name) * 1e3 for name in names}
    return found | {"host waits": bound.host_waits}


def planned(work: Work, shape: Any, gpu: str, remat: bool) -> dict[str, Any]:
    """Returns the time and the memory of a step by the planner, which compiles nothing."""
    import optax

    from jaxpar.planner import Choice, cluster, price, transformer_shape

    model = transformer_shape(shape, seq=work.seq)
    plan = price(
        model,
        cluster(gpu, devices_per_node=1),
        Choice(remat=remat),
        batch_size=work.batch_size,
        optimizer=optax.adamw(1e-4),
    )
    return {"planned ms": plan.step_seconds * 1e3, "plan GiB": plan.memory_bytes / GIB}


def table(found: dict[str, dict]) -> report.Table:
    """Returns the bounds of all candidates that have them."""
    rows, errors = [], ""
    for run, answer in found.items():
        if "bounds" not in answer:
            continue
        own = {"run": run} | answer["bounds"]
        rows.append({column: own.get(column) for column in COLUMNS})
        errors += f" {run}: {own['error']}." if "error" in own else ""
    return report.Table(
        "The same steps by the roofline, the planner and the device",
        COLUMNS,
        rows,
        "one device",
        "Least, as compiled and most are one time on one device, since nothing is sent. Planned: by the planner's assumed "
        f"efficiencies. Plan and compiler: the bytes that they expect; device: the peak of the process.{errors}",
    )
