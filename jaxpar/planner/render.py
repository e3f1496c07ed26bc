"""Plans as a table that fits a terminal."""

from collections.abc import Sequence

from jaxpar.inspect.text import bytes_text, seconds_text, table
from jaxpar.planner.plans import Plan, wrapped

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


def remat_text(remat: bool | str) -> str:
    """Returns a value of ``Choice.remat`` as the flag ``--remat`` takes it: "yes", "no" or a name."""
    return remat if isinstance(remat, str) else "yes" if remat else "no"


def render(plans: Sequence[Plan], *, width: int | None = None) -> str:
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
    below = [wrapped("   ", plan.why, width) for plan in plans]
    return "\n".join(
        [header, rule, *(part for pair in zip(lines, below, strict=True) for part in pair if part.strip())]
    )


def _figures(rank: int, plan: Plan) -> list[str]:
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
