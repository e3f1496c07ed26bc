"""The cost of a compiled step on each device as data: memory by kind, and traffic by axis."""

from typing import Any

from jaxpar.inspect import StepReport
from jaxpar.inspect.report import axes_text
from jaxpar.planner.at_rest import local_bytes
from jaxpar.train import TrainState


def memory(report: StepReport, state: TrainState) -> dict[str, Any]:
    """Returns bytes on one device: "bars" by kind, "total_bytes" by the compiler, "limit_bytes" None.

    The kinds add up to the total. "batch" is all arguments but the state.

    Args:
        report: The report of the compiled step.
        state: The state that it takes, of arrays or ShapeDtypeStructs with shardings.
    """
    planned, params = report.memory, local_bytes(state.params)
    optimizer = local_bytes((state.opt_state, state.step, state.num_skipped))
    kinds = {
        "params": params,
        "optimizer": optimizer,
        "batch": max(0, planned.argument_bytes - params - optimizer),
        "temporary": planned.temp_bytes,
        "metrics and other outputs": planned.output_bytes - planned.alias_bytes,
        "program": planned.generated_code_bytes,
    }
    return {"bars": {"a device": kinds}, "limit_bytes": None, "total_bytes": planned.total_bytes}


def traffic(report: StepReport) -> dict[str, Any]:
    """Returns the bytes that a device sends in a step by axes, and each collective."""
    rows = [
        {
            "kind": each.kind,
            "axes": axes_text(each.axes),
            "runs": each.known_times,
            "is_bound": each.is_bound or each.times is None,
            "payload_bytes": each.payload_bytes,
            "bytes": each.bytes_moved,
        }
        for each in report.collectives
    ]
    is_known = all(each.times is not None for each in report.collectives)
    axes = {axes_text(axes): sent for axes, sent in report.bytes_by_axes().items()} if is_known else {}
    return {"axes": axes, "collectives": rows, "is_known": is_known}
