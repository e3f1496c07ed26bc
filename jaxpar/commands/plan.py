"""`python -m jaxpar plan`: ranks the meshes and settings for a model on a cluster, before renting GPUs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import tyro

from jaxpar.commands.cli import call
from jaxpar.commands.plan_flags import PlanFlags, check_plan_flags


def plan(flags: Annotated[PlanFlags, tyro.conf.arg(name="")]) -> None:
    """Ranks the meshes and settings for a model on a cluster, with their memory, traffic and time, the best first."""
    check_plan_flags(flags)
    from jaxpar.commands.plans import show_plans

    show_plans(flags)


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    _check_json(args)
    call(plan, args, "plan", example="--model llama3-8b --nodes 2 --gpu h100")


def _check_json(args: Sequence[str]) -> None:
    """Raises ValueError if a file follows --json, which tyro would call an unrecognized option."""
    for word, after in pairwise([*args, ""]):
        file = word.partition("=")[2] if word.startswith("--json=") else after
        if word.partition("=")[0] == "--json" and file and not file.startswith("-"):
            raise ValueError(
                f"--json is a switch, which prints the plans; got --json {file}. To write them to a file, redirect them: "
                f"--json > {file}"
            )
