"""Reads a plan as `python -m jaxpar plan --json` writes it, as untrusted data."""

import re
from collections.abc import Sequence
from typing import Any

from jaxpar.jobs.job import AXES

# The settings of a plan that are also flags of a recipe. A plan without the first four is of a model that is not a preset.
FLAGS = ("model", "batch_size", "seq", "dtype", "schedule", "num_microbatches", "zero", "lora_rank")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")  # one word that is not a flag
NAMES = ("model", "dtype", "schedule", "executor")
LEAST = {"zero": 0} | dict.fromkeys((*AXES, "batch_size", "seq", "num_microbatches", "num_chunks", "lora_rank"), 1)
MAX_PARTS = 2**16


def first_plan(found: Any) -> dict[str, Any]:
    """Returns the first plan in parsed JSON, a list of plans or a single one.

    Raises:
        ValueError: There is no plan, or a setting has another type than `plan --json` writes.
    """
    plan = found[0] if isinstance(found, list) and found else found
    if not isinstance(plan, dict):
        raise ValueError(
            f"a plan must be what `python -m jaxpar plan --json` writes; got JSON of another form, a {type(plan).__name__}. "
            "Write it by plan --json."
        )
    if missing := [axis for axis in AXES if plan.get(axis) is None]:
        raise ValueError(
            f"a plan must have {', '.join(AXES)}; got none for {', '.join(missing)}. Write it by plan --json."
        )
    check_plan(plan)
    return plan


def check_plan(plan: dict[str, Any]) -> None:
    """Raises ValueError unless the settings that become flags are words, integers or booleans, so that none can hold a flag."""
    for name in NAMES:
        value = plan.get(name)
        if value is not None and not (isinstance(value, str) and NAME.fullmatch(value)):
            raise _wrong(name, "one word of letters, digits, ., _ and -", value)
    for name, least in LEAST.items():
        value = plan.get(name)
        if value is not None and not _is_integer(value, least):
            raise _wrong(name, f"an integer of {least} or more", value)
    parts = plan.get("layers_per_virtual_stage")
    if parts is not None and not (
        isinstance(parts, list) and len(parts) <= MAX_PARTS and all(_is_integer(part, 0) for part in parts)
    ):
        raise _wrong("layers_per_virtual_stage", "a list of integers of 0 or more", parts)
    if not isinstance(remat := plan.get("remat", False), bool) and remat != "dots":
        raise _wrong("remat", 'true, false or "dots"', remat)


def _is_integer(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**31


def _wrong(name: str, rule: str, value: Any) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return ValueError(f"{name} of a plan must be {rule}; got {shown}. Write the plan by plan --json.")


def plan_flags(plan: dict[str, Any], command: Sequence[str]) -> list[str]:
    """Returns a plan's settings as a recipe's flags, except those that the command already has."""
    check_plan(plan)
    flags = {f"--mesh.{axis}": [plan[axis]] for axis in AXES}
    flags |= {f"--{name.replace('_', '-')}": [plan[name]] for name in FLAGS if plan.get(name) is not None}
    chunks = plan.get("num_chunks")
    if chunks is not None and (chunks > 1 or plan.get("schedule") == "interleaved"):
        flags["--num-chunks"] = [chunks]
    if len(set(parts := plan.get("layers_per_virtual_stage") or ())) > 1:
        flags["--layers-per-virtual-stage"] = list(parts)
    if remat := plan.get("remat"):  # True in a plan: the forward passes of complete layers are recomputed
        flags["--remat"] = ["full" if remat is True else remat]
    given = {word.split("=")[0] for word in command}
    return [str(word) for flag, values in flags.items() if flag not in given for word in (flag, *values)]
