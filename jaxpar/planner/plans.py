"""A plan: a choice with its memory, traffic and time, the reason for its rank, and the changes that would help it; as text."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxpar.inspect.text import bytes_text, seconds_text, table
from jaxpar.mesh import AXES
from jaxpar.planner.job import Choice
from jaxpar.planner.step_time import StepTime
from jaxpar.schedule import simulate

# Parts of a step's time: each in words, and what a plan does in which it is longer than in another.
PARTS = {
    "compute": ("computing", "computes longer"),
    "again": ("recomputing", "recomputes forward passes"),
    "tensor": ("sending inside layers", "sends more inside layers"),
    "bubble": ("waiting for stages", "waits longer for other stages"),
    "data": ("data", "sends more over data"),
    "ends": ("embedding and head over stage", "sends more of embedding and head over stage"),
    "update": ("update", "updates longer"),
}
SETTINGS = tuple(field.name for field in fields(Choice) if field.name != "layers_per_virtual_stage")
_LABEL = 10  # columns
SHOWN = 2  # of what a plan does not know
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


@dataclass(frozen=True)
class Gain:
    """What one change gives.

    Attributes:
        change: The change.
        faster: How many more tokens a second it gives, as a share of those without it: 0.5 where 3 take the time of 2.
        more_bytes: The bytes of memory that a device needs more; fewer if negative.
        missing_bytes: The bytes of memory that a device has too little for it, 0 if it fits.
    """

    change: str
    faster: float
    more_bytes: int
    missing_bytes: int = 0

    def __str__(self) -> str:
        word = "more" if self.more_bytes > 0 else "less"
        more = f"{bytes_text(abs(self.more_bytes))} {word}" if self.more_bytes else ""
        missing = f"{bytes_text(self.missing_bytes)} too much" if self.missing_bytes else ""
        return ", ".join(filter(None, [f"{self.change}: {self.faster:.0%} faster", more, missing]))


@dataclass(frozen=True)
class Plan:
    """One way to run a model on a cluster, with its memory, traffic and time.

    Attributes:
        choice: Mesh axes and settings.
        bytes_per_device: Bytes by kind.
        bytes_moved: Bytes that a device sends in a step, by axis, in ops that the schedule needs; with ``mask_idle_ops``, as on
            GPUs, idle stages send more over ``stage`` and ``tensor``, and those that share the head its input and gradient.
        time: Time of a step with ``executor="spmd"``, in lock-step.
        ideal_time: Time of a step with free-running stages, as with ``executor="mpmd"`` and in other frameworks.
        is_ideal: Whether plans are ranked by ``ideal_time``.
        tokens: Tokens of a step, or rows where the model has no tokens.
        tokens_per_row: Tokens of a row; 1 where the model has no tokens.
        flops: Floating-point operations of matrix products in a step on a device, including recomputed ones.
        useful_flops: Those of one forward and one backward pass.
        why: Why it is the best, or why it is not.
        gains: What would help it most.
        software: What runs it.
        zero_shards_nothing: Whether its ZeRO level shards nothing, since the devices over which it would divide no free dim.
        tensor_shards_nothing: Whether no param is sharded over its ``tensor`` axis, whose devices then all compute the same.
        guesses: Of what in the model it is not known how XLA shards it over ``tensor``, so that figures can be far off
            (``guesses.py``).
        uncounted: The operations of the model of whose work a plan has the bytes alone.
    """

    choice: Choice
    bytes_per_device: Mapping[str, int]
    bytes_moved: Mapping[str, int]
    time: StepTime
    ideal_time: StepTime
    is_ideal: bool
    tokens: int
    flops: int | float
    useful_flops: int | float
    why: str = ""
    gains: tuple[Gain, ...] = ()
    software: str = "jaxpar"
    zero_shards_nothing: bool = False
    tensor_shards_nothing: bool = False
    guesses: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    tokens_per_row: int = 1

    @property
    def ranked_by(self) -> StepTime:
        """The time by which plans are ranked."""
        return self.ideal_time if self.is_ideal else self.time

    @property
    def step_seconds(self) -> int | float:
        """Seconds of a step."""
        return self.ranked_by.total

    @property
    def time_by_part(self) -> dict[str, int | float]:
        """Seconds of a step by part, in words."""
        return {PARTS[name][0]: seconds for name, seconds in vars(self.ranked_by).items()}

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device that needs the most memory."""
        return sum(self.bytes_per_device.values())

    @property
    def bubble_fraction(self) -> int | float:
        """The share of the pipeline's time in which its busiest stage waits."""
        time = self.ranked_by
        waits = max(time.bubble, 0)  # a difference of sums, which rounding can leave below 0
        return waits / (time.compute + time.again + time.tensor + waits)

    @property
    def bytes_by_stage(self) -> dict[str, dict[str, int]]:
        """Bytes of a device of each stage, by kind. In lock-step all stages run one program and have the same buffers."""
        choice, by_kind = self.choice, dict(self.bytes_per_device)
        live = [1] * choice.stage
        if self.is_ideal and choice.stage > 1:
            live = list(simulate(choice.table(choice.num_simulated, "published")).peak_live)
        part = lambda stage: (
            by_kind | {"activations": by_kind["activations"] * live[stage] // max(live)}
        )
        return {f"stage {stage}": part(stage) for stage in range(choice.stage)}

    def details(
        self, memory_bytes: int | float, *, width: int | None = None, title: str = ""
    ) -> str:
        """Returns a breakdown of memory, traffic and time as text, for devices with ``memory_bytes`` of memory.

        Args:
            memory_bytes: Memory of a device.
            width: The columns of the terminal; None: as wide as it gets.
            title: What the text begins with.
        """
        time = self.ranked_by
        held = ", ".join(
            f"{kind} {bytes_text(size)}" for kind, size in self.bytes_per_device.items()
        )
        moved = ", ".join(
            f"{axis} {bytes_text(size)}" for axis, size in self.bytes_moved.items() if size
        )
        whose = f" as {self.software} runs it, not jaxpar"
        tflops, useful = (flops / time.total / 1e12 for flops in (self.flops, self.useful_flops))
        unit = "tokens" if self.tokens_per_row > 1 else "rows"
        rate = f"{self.tokens / time.total:,.0f} {unit}/s; TFLOP/s a device: {tflops:.0f}, of which useful {useful:.0f}"
        parts = [
            (
                "memory",
                f"{bytes_text(self.memory_bytes)} of {bytes_text(memory_bytes)} a device: {held}",
            ),
            ("sent", f"{moved or 'nothing'} by a device in a step"),
            ("step", seconds_text(time.total) + ("" if self.software == "jaxpar" else whose)),
            ("", _bars(self, width)),
            ("rate", rate),
        ]
        choice, layers = self.choice, self.choice.layers_per_virtual_stage
        if self.zero_shards_nothing:
            why = f"data times context, {choice.parts()}, divides no free dim of the params"
            parts.append(("zero", f"level {choice.zero} shards nothing: {why}"))
        if self.tensor_shards_nothing:
            parts.append(
                (
                    "tensor",
                    "shards no param: its devices all compute the same, which TFLOP/s counts",
                )
            )
        if self.guesses:
            parts.append(("unsure", unsure_text(self.guesses)))
        if self.uncounted:
            parts.append(("lacks", uncounted_text(self.uncounted)))
        if layers and len(set(layers)) > 1:
            parts.append(("layers", " ".join(map(str, layers))))
        if choice.stage > 1:
            other = self.time if self.is_ideal else self.ideal_time
            form = (
                "in lock-step (executor=spmd)" if self.is_ideal else "with stages that run freely"
            )
            parts.append(("else", f"{seconds_text(other.total)} {form}"))
        parts += [("helps" if at == 0 else "", str(gain)) for at, gain in enumerate(self.gains)]
        lines = [
            part if not name and "\n" in part else wrapped(f"  {name}", part, width)
            for name, part in parts
        ]
        first = wrapped(
            "", f"{title}{choice.axes()}, {self.why}".removesuffix(", "), width, indent=0
        )
        return "\n".join([first, *lines])

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as plain values, the settings first."""
        choice, time, layers = self.choice, self.ranked_by, self.choice.layers_per_virtual_stage
        return {
            **{name: getattr(choice, name) for name in SETTINGS},
            "executor": "mpmd" if self.is_ideal else "spmd",
            "software": self.software,
            "layers_per_virtual_stage": list(layers) if layers and choice.stage > 1 else None,
            "step_seconds": self.step_seconds,
            "ideal_step_seconds": self.ideal_time.total,
            "tokens_per_second": self.tokens / self.step_seconds,
            "tflops_per_device": self.flops / self.step_seconds / 1e12,
            "model_tflops_per_device": self.useful_flops / self.step_seconds / 1e12,
            "bubble_fraction": self.bubble_fraction,
            "seconds": dict(vars(time)),
            "memory_bytes": self.memory_bytes,
            "bytes_per_device": dict(self.bytes_per_device),
            "bytes_moved": dict(self.bytes_moved),
            "why": self.why,
            "guesses": list(self.guesses),
            "uncounted": list(self.uncounted),
            "helps": [dict(vars(gain)) for gain in self.gains],
        }


def why_best(best: Plan, others: Sequence[Plan]) -> str:
    """Returns why a plan is the best: its lead over the next one."""
    if not others:
        return "the only mesh with these settings that fits"
    ahead = others[0].step_seconds / best.step_seconds - 1
    return (
        "as fast as the next"
        if ahead < 0.002
        else f"{ahead:.1%} faster than the next, which {_differs(best, others[0])}"
    )


def why_not(plan: Plan, best: Plan) -> str:
    """Returns why a plan is not the best: the part of a step that grew most."""
    slower = plan.step_seconds / best.step_seconds - 1
    if slower < 0.002:
        return "as fast as the best" + (
            ", with less memory free" if plan.memory_bytes > best.memory_bytes else ""
        )
    return f"{slower:.1%} slower: {_differs(best, plan)}"


def _differs(best: Plan, plan: Plan) -> str:
    more = {
        name: seconds - getattr(best.ranked_by, name)
        for name, seconds in vars(plan.ranked_by).items()
    }
    worst = max(more, key=lambda name: more[name])
    return f"{PARTS[worst][1]} (+{seconds_text(more[worst], 2)})"


def unsure_text(guesses: Sequence[str]) -> str:
    """Returns what it means for a plan that it guesses, with the first of what it guesses."""
    return (
        f"how XLA shards {_first(guesses)} over tensor is not known: a step can send far more, and compute less. Known are "
        "weights split by column and then by row"
    )


def uncounted_text(uncounted: Sequence[str]) -> str:
    """Returns what it means for a plan that it counts operations by their bytes alone, with the first of them."""
    return f"the operations of {_first(uncounted)}, of which only the bytes are counted: a step can take far longer"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def remarks(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns sentences below a table of plans, given as plain values, on what they do not know."""
    first = lambda name: next((plan[name] for plan in plans if plan[name]), None)
    found = []
    if guesses := first("guesses"):
        found.append(f"Plans with tensor > 1 are unsure: {unsure_text(guesses)}.")
    if uncounted := first("uncounted"):
        found.append(f"Plans lack {uncounted_text(uncounted)}.")
    return found


def _bars(plan: Plan, width: int | None) -> str:
    """Returns a line with a bar for each part of a step's time."""
    time = plan.ranked_by
    longest = min(40, (width or 100) - _LABEL - 48)
    shown = {
        name: value for name, value in plan.time_by_part.items() if value > 0.0005 * time.total
    }
    bar = lambda value: (
        f"{seconds_text(value):>9}  {value / time.total:4.0%}  {'#' * round(longest * value / time.total)}"
    )
    lines = [f"{'':{_LABEL}}{name:29}  {bar(value)}" for name, value in shown.items()]
    return "\n".join(line.rstrip() for line in lines) + ("\n" if len(lines) == 1 else "")


def wrapped(label: str, text: str, width: int | None, indent: int = _LABEL) -> str:
    """Returns text behind a label, wrapped to the columns of the terminal if they are given."""
    first = f"{label:{indent}}" if indent else ""
    if width is None:
        return first + text
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def remat_text(remat: bool | str) -> str:
    """Returns a value of ``Choice.remat`` as the flag ``--remat`` takes it: "yes", "no" or a name."""
    return remat if isinstance(remat, str) else "yes" if remat else "no"


def render(plans: Sequence[Plan], *, width: int | None = None) -> str:
    """Returns plans as a table, the best first, with the memory and the time of each and the reason for its rank.

    Args:
        plans: The plans, the best first.
        width: The columns of the terminal: reasons that do not fit beside the figures are put below them, after what columns
            of lesser importance have if these do not fit either. None: as wide as it gets.
    """
    axes = [
        axis
        for axis in AXES
        if axis in _HEADER or any(plan.choice.mesh.shape[axis] > 1 for plan in plans)
    ]
    axes += ["experts"] if any(plan.choice.experts for plan in plans) else []
    header = ["", *axes, *(name for name in _HEADER[1:] if name not in AXES)]
    rows = [header, *(_figures(rank, plan, axes) for rank, plan in enumerate(plans, 1))]
    reasons = ["why", *(plan.why for plan in plans)]
    whole = table([[*row, why] for row, why in zip(rows, reasons, strict=True)])
    told = remarks([vars(plan) for plan in plans])
    after = ["", *(wrapped("", text, width, indent=0) for text in told)] if told else []
    if width is None or max(map(len, whole.splitlines())) <= width:
        return "\n".join([whole, *after])
    moved = [""] * len(plans)
    for name in _LEFT_OUT:
        if max(map(len, table(rows).splitlines())) <= width:
            break
        at = rows[0].index(name)
        moved = [f"{told}{name} {row[at]}, " for told, row in zip(moved, rows[1:], strict=True)]
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    header, rule, *lines = table(rows).splitlines()
    texts = [f"{told}{plan.why}" for told, plan in zip(moved, plans, strict=True)]
    below = [wrapped("   ", text.removesuffix(", "), width) for text in texts]
    pairs = zip(lines, below, strict=True)
    shown = [part for pair in pairs for part in pair if part.strip()]
    return "\n".join([header, rule, *shown, *after])


def _figures(rank: int, plan: Plan, axes: Sequence[str]) -> list[str]:
    choice = plan.choice
    chunks = f" x{choice.num_chunks}" if choice.num_chunks > 1 else ""
    return [
        str(rank),
        *(str(getattr(choice, axis) or "-") for axis in axes),
        f"{choice.schedule}{chunks}" if choice.stage > 1 else "-",
        str(choice.num_microbatches),
        str(choice.zero),
        remat_text(choice.remat),
        bytes_text(plan.memory_bytes),
        seconds_text(plan.step_seconds),
        f"{plan.bubble_fraction:.1%}",
        f"{plan.flops / plan.step_seconds / 1e12:.0f}",
    ]
