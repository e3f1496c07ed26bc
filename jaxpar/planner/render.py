"""Plans as text that fits a terminal: a table of several, and the details of one with a picture of where its time goes."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpar.inspect.text import bytes_text, table

if TYPE_CHECKING:
    from jaxpar.planner.plans import Plan

WORDS_OF_TIME = {
    "compute": "computing",
    "again": "recomputing",
    "tensor": "tensor",
    "bubble": "waiting for stages",
    "data": "data",
    "ends": "embedding and head over stage",
    "update": "update",
}
COLUMNS = (
    "",
    "data",
    "stage",
    "tensor",
    "schedule",
    "microbatches",
    "zero",
    "remat",
    "memory",
    "step",
    "bubble",
)
_HEADER = (*COLUMNS, "TFLOP/s")
_LEFT_OUT = "bubble", "zero", "microbatches"  # in a narrow terminal, in this order
_LABEL = 10


def seconds_text(seconds: float, digits: int = 3) -> str:
    """Returns a time to ``digits`` significant digits, or to all digits before the point: "0.012 s", "1834 s"."""
    return f"{seconds:.0f} s" if seconds >= 10 ** (digits - 1) else f"{seconds:.{digits}g} s"


def remat_text(remat: bool | str) -> str:
    """Returns a value of ``Choice.remat`` as the flag ``--remat`` takes it: "yes", "no" or a name."""
    return remat if isinstance(remat, str) else "yes" if remat else "no"


def render(plans: Sequence["Plan"], *, width: int | None = None) -> str:
    """Returns plans as a table, the best first, with the memory and the time of each and the reason for its rank.

    Args:
        plans: The plans, the best first.
        width: The columns of the terminal: reasons that do not fit beside the figures are put below them, and columns of lesser
            importance are left out, which ``details`` has. None: as wide as it gets.
    """
    rows = [[*_HEADER], *(_figures(rank, plan) for rank, plan in enumerate(plans, 1))]
    reasons = ["why", *(plan.why for plan in plans)]
    whole = table([[*row, why] for row, why in zip(rows, reasons, strict=True)])
    if width is None or max(map(len, whole.splitlines())) <= width:
        return whole
    for name in _LEFT_OUT:
        if max(map(len, table(rows).splitlines())) <= width:
            break
        at = rows[0].index(name)
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    header, rule, *lines = table(rows).splitlines()
    below = [_wrapped("   ", plan.why, width) for plan in plans]
    return "\n".join(
        [header, rule, *(part for pair in zip(lines, below, strict=True) for part in pair if part.strip())]
    )


def _figures(rank: int, plan: "Plan") -> list[str]:
    choice = plan.choice
    chunks = f" x{choice.num_chunks}" if choice.num_chunks > 1 else ""
    return [
        str(rank),
        *(str(size) for size in (choice.data, choice.stage, choice.tensor)),
        f"{choice.schedule}{chunks}" if choice.stage > 1 else "-",
        str(choice.num_microbatches),
        str(choice.zero),
        remat_text(choice.remat),
        bytes_text(plan.memory_bytes),
        seconds_text(plan.step_seconds),
        f"{plan.bubble_fraction:.1%}",
        f"{plan.flops / plan.step_seconds / 1e12:.0f}",
    ]


def details(plan: "Plan", memory_bytes: int | float, *, width: int | None = None, title: str = "") -> str:
    """Returns a breakdown of memory, traffic and time as text.

    Args:
        plan: The plan.
        memory_bytes: Memory of a device.
        width: The columns of the terminal, at which lines are wrapped; None: as wide as they get.
        title: What the text begins with.
    """
    time = plan.ranked_by
    held = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in plan.bytes_per_device.items())
    moved = ", ".join(f"{axis} {bytes_text(size)}" for axis, size in plan.bytes_moved.items() if size)
    parts = [
        ("memory", f"{bytes_text(plan.memory_bytes)} of {bytes_text(memory_bytes)} a device: {held}"),
        ("sent", f"{moved or 'nothing'} by a device in a step"),
        (
            "step",
            seconds_text(time.total)
            + (f" as {plan.software} runs it, not jaxpar" if plan.software != "jaxpar" else ""),
        ),
        ("", _bars(plan, width)),
        (
            "rate",
            f"{plan.tokens / time.total:,.0f} tokens/s; TFLOP/s a device: {plan.flops / time.total / 1e12:.0f}, "
            f"of which useful {plan.useful_flops / time.total / 1e12:.0f}",
        ),
    ]
    layers = plan.choice.layers_per_virtual_stage
    if layers and len(set(layers)) > 1:
        parts.append(("layers", " ".join(map(str, layers))))
    if plan.choice.stage > 1:
        other = plan.time if plan.is_ideal else plan.ideal_time
        form = "in lock-step (executor=spmd)" if plan.is_ideal else "with stages that run freely"
        parts.append(("else", f"{seconds_text(other.total)} {form}"))
    parts += [("helps" if at == 0 else "", str(gain)) for at, gain in enumerate(plan.gains)]
    lines = [part if not name and "\n" in part else _wrapped(f"  {name}", part, width) for name, part in parts]
    return "\n".join(
        [_wrapped("", f"{title}{plan.choice.axes()}, {plan.why}".removesuffix(", "), width, indent=0), *lines]
    )


def _bars(plan: "Plan", width: int | None) -> str:
    """Returns a line with a bar for each part of a step's time."""
    time = plan.ranked_by
    longest = min(40, (width or 100) - _LABEL - 48)
    shown = {WORDS_OF_TIME[name]: value for name, value in vars(time).items() if value > 0.0005 * time.total}
    share = {name: value / time.total for name, value in shown.items()}
    lines = [
        f"{'':{_LABEL}}{name:29}  {seconds_text(value):>9}  {share[name]:4.0%}  {'#' * round(longest * share[name])}"
        for name, value in shown.items()
    ]
    return "\n".join(line.rstrip() for line in lines) + ("\n" if len(lines) == 1 else "")


def _wrapped(label: str, text: str, width: int | None, indent: int = _LABEL) -> str:
    first = f"{label:{indent}}" if indent else ""
    if width is None:
        return first + text
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False)
