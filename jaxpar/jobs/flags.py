"""The flags of `manifest`, and of the recipe that a job runs: those that a plan sets, and those that have no effect.

A plan is untrusted data, as `python -m jaxpar plan --json` writes it: no setting may hold a flag.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from os.path import normpath
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxpar import fields
from jaxpar.jobs import forms
from jaxpar.jobs.job import (
    AXES,
    JobSettings,
    KubernetesSettings,
    SlurmSettings,
    flag_value,
    flag_values,
    is_recipe,
    mesh_of,
)
from jaxpar.jobs.workload import USUAL_GRACE
from jaxpar.models.quantized import Kind
from jaxpar.models.transformer.config import COMPUTE_DTYPES
from jaxpar.runtime.output import printable
from jaxpar.runtime.watchdog import Budgets
from jaxpar.schedule import SCHEDULES

# The settings of a plan that are also flags of a recipe. A plan without model, seq and dtype is of a model that is no preset, a
# folder's or one's own.
FLAGS = (
    *("model", "batch_size", "seq", "dtype", "schedule", "num_microbatches", "zero"),
    *("experts", "expert_buffer", "lora_rank", "quantize", "products"),
)
# Flags that change what was planned, and which a plan sets only where they do not have these values.
OPTIONAL = {
    "--num-chunks": ["1"],
    "--remat": ["none"],
    "--sequence-parallel": ["off"],
    "--layers-per-virtual-stage": [],
}
OPTIONAL |= {"--experts": [], "--expert-buffer": [], "--lora-rank": []}
OPTIONAL |= {"--quantize": [], "--products": ["compute"]}
OPTIONAL |= {"--lora-targets": ["w_qkv", "w_out", "w_up", "w_down"]}
# What a plan says nothing of, or not by a flag of the recipe: with other values its job is not the planned one.
OPTIONAL |= {"--optimizer": ["adamw"], "--momentum": [], "--window": [], "--max-documents": []}
OPTIONAL |= {"--expert-split": ["experts"], "--router-bias-rate": []}
# Flags of a recipe that `plan` does not have.
NOT_OF_PLAN = (
    *("--optimizer", "--momentum", "--window", "--max-documents", "--expert-split"),
    *("--router-bias-rate", "--dtype", "--layers-per-virtual-stage"),
)
UNORDERED = ("--lora-targets",)
# What a plan says of its settings, which is no setting of a job.
FIGURES = (
    *("gpu", "software", "ideal_step_seconds", "tokens_per_second", "tflops_per_device"),
    *("model_tflops_per_device", "bubble_fraction", "seconds", "memory_bytes", "bytes_per_device"),
    *("bytes_moved", "compiled_memory_bytes", "why", "guesses"),
    *("uncounted", "helps"),
)
MAX_PARTS = 2**16
_SLURM, _KUBERNETES = (
    [each.name for each in dataclasses.fields(of)] for of in (SlurmSettings, KubernetesSettings)
)
OF_SERVICE = ("name", "image", "namespace", "checkpoint_claim", "toleration", "env", "run_as_user")
_NOT_OF_SERVICE = [
    each.name for each in dataclasses.fields(JobSettings) if each.name not in OF_SERVICE
]
_GROUPS = ("service", "mesh")  # of flags
OF_DEVICES = ("jobset", "trainjob", "sbatch")  # the kinds that request devices of a node
IN_TOKENS = {"--batch-tokens": "--batch-size", "--microbatch-tokens": "--num-microbatches"}
# A PodMonitor takes all flags of its job, so that one command line writes both.
UNUSED = {
    "jobset": (*_SLURM, "service"),
    "trainjob": ("max_restarts", *_SLURM, "service"),
    "sbatch": (*_KUBERNETES, "service"),
    "podmonitor": ("service",),
    "service": (*_NOT_OF_SERVICE, "mesh", "plan"),
}


@dataclass(frozen=True, kw_only=True)
class PlannedSettings:
    """The settings of a plan that become flags of a recipe; a plan has ``FIGURES`` too, and nothing else."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # What every plan has.
    data: forms.Count
    stage: forms.Count
    tensor: forms.Count
    replica: forms.Count
    context: forms.Count
    schedule: Annotated[str, forms.one_of(SCHEDULES)]
    executor: Literal["spmd", "mpmd"]
    batch_size: forms.Count
    num_microbatches: forms.Count
    num_chunks: forms.Count
    zero: Annotated[int, Field(ge=0, le=3)]
    remat: Literal[True, False, "dots"]
    nodes: forms.Count | None = None
    gpus_per_node: forms.Count | None = None
    model: forms.Word | None = None
    dtype: Annotated[str, forms.one_of(COMPUTE_DTYPES)] | None = None
    seq: forms.Count | None = None
    init_from: str | None = None
    own_model: str | None = None
    ignore_config_keys: Annotated[list[forms.Word], Field(max_length=MAX_PARTS)] | None = None
    attention: Literal["flash", "xla"] | None = None
    window: forms.Count | None = None
    lora_rank: forms.Count | None = None
    lora_targets: Annotated[list[forms.Word], Field(max_length=MAX_PARTS)] | None = None
    quantize: Kind | None = None
    products: Literal["compute", "fp8"] | None = None
    sequence_parallel: bool = False
    layers_per_virtual_stage: (
        Annotated[list[forms.CountOrZero], Field(max_length=MAX_PARTS)] | None
    ) = None
    experts: Literal["tensor", "data"] | None = None
    expert_buffer: forms.Positive | None = None
    step_seconds: forms.Positive | None = None


def first_plan(found: Any) -> PlannedSettings:
    """Returns the first plan in parsed JSON, a list of plans or a single one.

    Raises:
        ValueError: There is no plan, it lacks a field that `plan --json` writes, it has another one or one of another type, or
            its mesh is of other machines.
    """
    remedy = "Write it by `python -m jaxpar plan --json`."
    if found == []:
        raise ValueError(f"a list of plans must have one; got []. {remedy}")
    plan = found[0] if isinstance(found, list) else found
    if isinstance(plan, dict):
        plan = {name: value for name, value in plan.items() if name not in FIGURES}
    settings = fields.read(PlannedSettings, plan, "a plan", remedy)
    _check_model(settings, remedy)
    num_devices = math.prod(getattr(settings, axis) for axis in AXES)
    nodes, each = settings.nodes, settings.gpus_per_node
    if nodes is not None and each is not None and nodes * each != num_devices:
        raise ValueError(
            f"the mesh of a plan must have its devices; got nodes={nodes} of gpus_per_node={each}, and a mesh of {num_devices}"
            f". {remedy}"
        )
    return settings


def _check_model(plan: PlannedSettings, remedy: str) -> None:
    """Raises ValueError for a plan that names no model, or a transformer without what its rows and numbers are."""
    names = "model", "init_from", "own_model"
    named = {name: value for name in names if (value := getattr(plan, name)) is not None}
    if not named:
        raise ValueError(
            f"a plan must have one of the fields {', '.join(names)}; got none. {remedy}"
        )
    missing = [name for name in ("seq", "dtype") if getattr(plan, name) is None]
    if missing and plan.own_model is None:
        of_model = ", ".join(
            f"{name} {printable(str(value))[:80]}" for name, value in named.items()
        )
        raise ValueError(
            f"a plan of a transformer must have the fields seq and dtype; got {of_model}, and no {' and no '.join(missing)}. "
            f"{remedy}"
        )


def check_recipe(plan: PlannedSettings, command: Sequence[str]) -> None:
    """Raises ValueError where the recipe of a command would run something else than what a plan is for."""
    if plan.stage > 1 and plan.executor != "spmd":
        raise ValueError(
            f"recipes run a pipeline with executor=spmd; got a plan for executor={plan.executor}, ranked by free-running "
            "time. Plan again with --executor spmd."
        )
    dtype = flag_value(command, "--dtype") or plan.dtype or "bfloat16"
    runs, of = ("flash", "flash") if dtype == "bfloat16" else ("xla", "XLA's")
    if plan.attention not in (None, runs):
        raise ValueError(
            f"recipes in {dtype} run {of} attention on GPUs; got a plan for attention={plan.attention}. Plan again with "
            f"--attention {runs}."
        )
    if plan.init_from is not None and flag_value(command, "--init-from") is None:
        raise ValueError(
            "a plan for a folder needs a command with --init-from, the same folder where the job runs; got a plan for "
            f"{printable(plan.init_from)} and none. Add it to the command."
        )


def plan_flags(plan: PlannedSettings, command: Sequence[str]) -> list[str]:
    """Returns a plan's settings as a recipe's flags, except those that the command already has.

    A command with ``--init-from`` names its model by that.
    """
    given = _names(command)
    if "--init-from" in given:
        given.add("--model")
    given |= {flag for in_tokens, flag in IN_TOKENS.items() if in_tokens in given}
    return [
        word
        for flag, values in _planned(plan).items()
        if flag not in given
        for word in (flag, *values)
    ]


def plan_remarks(plan: PlannedSettings, command: Sequence[str]) -> list[str]:
    """Returns lines about what the command changes of a plan, does not take from it, or begins with in its place."""
    planned = _planned(plan)
    if not is_recipe(command):
        missing = " ".join(word for flag, values in planned.items() for word in (flag, *values))
        return [
            f"the plan sets the number of nodes alone: {printable(command[0])[:80]} is a program of your own, which gets only "
            f"its own flags, and none of {missing}"
        ]
    meant = _meant(plan, planned)
    own = {flag: flag_values(command, flag) for flag in sorted(_names(command) & {*meant})}
    changed = [
        flag
        for flag, values in own.items()
        if not _are_alike(flag, values, meant[flag])
        and not flag.startswith("--mesh.")  # which must be that of the job
    ]
    folder = _of_folder(plan, command)
    if not changed:
        return folder
    told = [
        printable(f"{' '.join([flag, *own[flag]])} where it has {' '.join(meant[flag]) or 'none'}")
        for flag in changed
    ]
    missing = [flag for flag in changed if flag in NOT_OF_PLAN]
    remedy = (
        f"leave these flags out, or do not rely on those figures: `plan` has no {', '.join(missing)}"
        if missing
        else "leave these flags out, or plan again with them"
    )
    return [
        f"the command changes the plan: {', '.join(told)}. Memory and time that were planned are not those of this job: "
        f"{remedy}",
        *folder,
    ]


def slow_step_remarks(
    plan: PlannedSettings, command: Sequence[str], *, grace_seconds: float, save_seconds: float
) -> list[str]:
    """Returns a line for each time limit of a job that a planned step exceeds.

    Args:
        plan: The plan.
        command: The program and its flags.
        grace_seconds: From the signal to stop until the end.
        save_seconds: How long a save takes.
    """
    step = plan.step_seconds
    if step is None:
        return []
    lines = []
    budget = flag_value(command, "--budget.step") or f"{Budgets.step:g}"
    if is_recipe(command) and _is_below(budget, step):
        lines.append(
            f"a step of the plan takes {step:,.0f} s, and a run is ended in one of more than --budget.step "
            f"{printable(budget)}. Give it such as --budget.step {math.ceil(3 * step)}"
        )
    if step + save_seconds > grace_seconds:
        enough = math.ceil(step - USUAL_GRACE)  # the job then has twice that, and 30 s
        lines.append(
            f"a run that is told to stop ends its step, of {step:,.0f} s by the plan, and then saves: the "
            f"{grace_seconds:,.0f} s that it has for both are too few. Give --save-seconds {enough}, before the program"
        )
    return lines


def _is_below(text: str, number: float) -> bool:
    """Whether a text is a limit below a number, 0 being none; what is no number is refused elsewhere."""
    try:
        return 0 < float(text) < number
    except ValueError:
        return False


def _of_folder(plan: PlannedSettings, command: Sequence[str]) -> list[str]:
    """Returns a line if a command begins with the model in a folder, and its plan is for one by name, or in another folder."""
    folder = flag_value(command, "--init-from")
    of_folder = plan.init_from is not None
    planned = plan.init_from if of_folder else plan.model
    if folder is None or planned is None or (of_folder and normpath(folder) == normpath(planned)):
        return []
    return [
        f"the model in --init-from {printable(folder)} was not compared with the plan, which is for "
        f"{'the one in' if of_folder else '--model'} {printable(planned)}: memory and time that were planned are those of this "
        "job if the two have the same sizes"
    ]


def _names(command: Sequence[str]) -> set[str]:
    """Returns the flags of a command line, and its other words."""
    return {word.split("=")[0] for word in command}


def _meant(plan: PlannedSettings, planned: dict[str, list[str]]) -> dict[str, list[str]]:
    """Returns the values of all flags that change what was planned, as the plan has them."""
    meant = OPTIONAL | planned
    if plan.window is not None:
        meant["--window"] = [str(plan.window)]
    if plan.lora_rank is None:
        meant["--lora-targets"] = []
    if plan.seq is not None:
        of_replica = plan.batch_size // (plan.replica * plan.data)
        rows = plan.batch_size, of_replica // plan.num_microbatches
        meant |= {flag: [str(plan.seq * each)] for flag, each in zip(IN_TOKENS, rows, strict=True)}
    return meant


def _are_alike(flag: str, values: list[str], others: list[str]) -> bool:
    """Whether two values of a flag ask for the same."""
    return sorted(values) == sorted(others) if flag in UNORDERED else values == others


def _planned(plan: PlannedSettings) -> dict[str, list[str]]:
    """Returns the values of the flags of a recipe that a plan sets."""
    flags: dict[str, list[Any]] = {f"--mesh.{axis}": [size] for axis, size in mesh_of(plan).items()}
    told = {name: getattr(plan, name) for name in FLAGS}
    flags |= {
        f"--{name.replace('_', '-')}": [value] for name, value in told.items() if value is not None
    }
    if plan.ignore_config_keys:
        flags["--ignore-config-keys"] = list(plan.ignore_config_keys)
    if plan.lora_targets:
        flags["--lora-targets"] = list(plan.lora_targets)
    if plan.num_chunks is not None and (plan.num_chunks > 1 or plan.schedule == "interleaved"):
        flags["--num-chunks"] = [plan.num_chunks]
    if len(set(parts := plan.layers_per_virtual_stage or ())) > 1:
        flags["--layers-per-virtual-stage"] = list(parts)
    if plan.remat:  # True in a plan: the forward passes of complete layers are recomputed
        flags["--remat"] = ["full" if plan.remat is True else plan.remat]
    if plan.sequence_parallel and plan.tensor > 1:
        flags["--sequence-parallel"] = []
    return {flag: [str(value) for value in values] for flag, values in flags.items()}


def unused_flags(kind: str, given: Collection[str], *, has_fake_devices: bool = False) -> list[str]:
    """Returns a line that names the flags without effect on this kind of job, and one for those without effect on its devices.

    Args:
        kind: That of ``manifest --kind``.
        given: The names of the settings that the command gives.
        has_fake_devices: Whether its nodes have fake devices in place of GPUs.
    """
    names = [
        f"--{name.replace('_', '-')}" + ".*" * (name in _GROUPS)
        for name in UNUSED[kind]
        if name in given
    ]
    lines = [f"not used by --kind {kind}: {', '.join(names)}"] if names else []
    if has_fake_devices and kind in OF_DEVICES and "gpus_per_node" in given:
        lines.append("not used with --fake-devices-per-node: --gpus-per-node")
    return lines
