"""The flags of a training run in groups, each a frozen dataclass, and their checks.

A script composes its flags of these groups and its own. On the command line tyro shows each group under its name:

    @dataclass(frozen=True, kw_only=True)
    class Config(BasicFlags):                                # --mesh.data and so on
        common: OmitArgPrefixes[Common] = Common()           # --steps, not --common.steps
        recipe: OmitArgPrefixes[Recipe] = Recipe()           # the script's own
"""

import dataclasses
import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
from tyro.conf import OmitArgPrefixes

from jaxpar.fields import arg, brief, check_at_least, check_from, check_kind, near_name, switch
from jaxpar.mesh import shown_sizes
from jaxpar.metrics import exporters
from jaxpar.runtime.process_env import check_own_variables
from jaxpar.runtime.watchdog import Budgets

PREFIXED = ("mesh", "budget")  # the groups whose name is part of their flags


@dataclass(frozen=True)
class MeshFlags:
    """The sizes of the mesh.

    Attributes:
        replica: Groups of --mesh.data replicas each, such as nodes: ZeRO shards inside a group; -1: the devices that the other
            axes leave.
        data: Replicas, each with a part of the rows of a batch; -1: the devices that the other axes leave.
        context: Devices that share each sequence, for long ones: twice this must divide --seq; -1: the devices that the other
            axes leave.
        stage: Pipeline stages, each with a part of the layers; -1: the devices that the other axes leave.
        tensor: Shards of each weight; -1: the devices that the other axes leave.
    """

    replica: int = 1
    data: int = 1
    context: int = 1
    stage: int = 1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class CommonFlags:
    """What most runs are given.

    Attributes:
        steps: Training steps of the complete run, including those before a --resume.
        seed: Seed of the initial parameters and of the order of rows; 0 or more.
        out_dir: Folder for config.json, metrics.jsonl, plots and checkpoints.
        checkpoint_every: Steps between two checkpoints, with one more at the end; 0: only one, when Ctrl-C or SIGTERM asks the
            run to stop.
        resume: Resume from the newest undamaged checkpoint in --out-dir, on this or another mesh.
        overwrite: Delete an earlier run in --out-dir once this one is compiled. Without it, a new run is refused where there
            are results of another. A start with JAXPAR_RESUME=if-any, as each of a job, ignores it if there is a checkpoint.
        fake_devices: CPU devices to simulate, to try a mesh on any machine; 0: the real devices.
        dry_run: Check, compile and print the cost of a step; train and write nothing.
    """

    steps: int = 300
    seed: int = 0
    out_dir: Path = Path("runs")
    checkpoint_every: int = 0
    resume: bool = False
    overwrite: bool = False
    fake_devices: int = 0
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """When to save, what to keep, and what a run that goes on may change.

    Attributes:
        checkpoint_minutes: Minutes between two checkpoints, with one more at the end; 0: as for --checkpoint-every.
        keep: Number of newest checkpoints to keep.
        keep_every: Also keep each checkpoint whose step this divides; 0: none.
        keep_best: Also keep the checkpoint with the smallest metric of this name, such as test_loss; with "-" before it, the
            largest.
        patience: End the run early, with its last state saved if it has checkpoints, after so many evaluations in a row without
            a better metric of --keep-best; counted anew after a --resume. 0: never.
        allow_change: Flags that may differ from the checkpoint's run on --resume, such as learning_rate or batch_size; errors
            name them.
        compare_every: Steps between two comparisons of the replicas of the state, beside those of
            the saves; the run ends if they differ. 0: none. What ZeRO shards has no second copy, and
            is not compared.
        max_skipped: Consecutive skipped steps, whose gradients are not finite, before the run ends with exit code 86. A run
            all of whose steps were skipped ends so too. 0: any number.
    """

    checkpoint_minutes: float = 0.0
    keep: int = 3
    keep_every: int = 0
    keep_best: str | None = None
    patience: int = 0
    allow_change: tuple[str, ...] = ()
    compare_every: int = 100
    max_skipped: int = 10


@dataclass(frozen=True, kw_only=True)
class MonitoringFlags:
    """What a run reports while it trains.

    Attributes:
        log_seconds: Off a terminal, seconds between two lines about the run: its phase, step, loss, rate and time left; 0:
            none. None: the environment's JAXPAR_LOG_SECONDS, or 15.
        log_json: Print each message and each of these lines as a line of JSON.
        metrics_port: Port at which to serve the run's metrics to Prometheus; 0: none.
        metrics_address: Address at which to serve them; the default is reachable from this machine only, 0.0.0.0 from all.
        profile: Steps to trace, such as 10:13 for 10, 11 and 12, into --out-dir/profile for Perfetto or xprof.
        tensorboard: Also write the run's metrics for TensorBoard, into --out-dir/tensorboard.
    """

    log_seconds: float | None = None
    log_json: bool = False
    metrics_port: int = 0
    metrics_address: str = "127.0.0.1"
    profile: str = ""
    tensorboard: bool = False


@dataclass(frozen=True, kw_only=True)
class GpuFlags:
    """GPUs that are not here.

    Attributes:
        compile_for: A dry run for GPUs that are not here: a100-40gb, a100-80gb, h100, h200 or b200. It needs the extra
            gpu-compile.
        nodes: Nodes to --compile-for. None: 1.
        gpus_per_node: GPUs of each node to --compile-for. None: 8.
    """

    compile_for: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The nodes to compile for, and the GPUs of each."""
        return (
            1 if self.nodes is None else self.nodes,
            8 if self.gpus_per_node is None else self.gpus_per_node,
        )


class RunFlags:
    """The base of a dataclass with all flags of a run, which has these groups as fields and may have others."""

    mesh: MeshFlags
    common: CommonFlags
    checkpoint: CheckpointFlags
    monitoring: MonitoringFlags
    gpu: GpuFlags
    budget: Budgets

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Returns the flags with these values, and with defaults elsewhere: ``of(steps=20, mesh=MeshFlags(data=2))``."""
        return cls().replace(**values)

    def replace(self, **values: Any) -> Self:
        """Returns the flags with other values, each under the name of its flag; raises TypeError if there is none."""
        assert dataclasses.is_dataclass(self)
        changes: dict[str, Any] = {}
        values = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in values.items()
        }
        if isinstance(values.get("out_dir"), str):
            values["out_dir"] = Path(values["out_dir"])
        for name, group in _groups(self).items():
            if name in PREFIXED:
                if not isinstance(given := values.pop(name, group), type(group)):
                    kind = type(group).__name__
                    raise TypeError(
                        f"{name} must be its flags together; got {given!r}. Write {name}={kind}(...)."
                    )
                changes[name] = given
            elif inside := {
                each.name: values.pop(each.name)
                for each in dataclasses.fields(group)
                if each.name in values
            }:
                changes[name] = dataclasses.replace(group, **inside)
        if values:
            raise TypeError(
                f"a value must be of a flag; got {', '.join(values)}. {_meant_flags(self, values)}"
            )
        return dataclasses.replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """Returns the flags by name as plain JSON values."""
        found: dict[str, Any] = {}
        for name, group in _groups(self).items():
            values = (
                shown_sizes(dataclasses.asdict(group))
                if name == "mesh"
                else dataclasses.asdict(group)
            )
            found |= {name: values} if name in PREFIXED else values
        return json.loads(json.dumps(found, default=str))

    @property
    def trains(self) -> bool:
        """Whether the flags ask for a run, not for an answer that takes no time."""
        return True

    @property
    def makes_state(self) -> bool:
        """Whether the run begins with a new state, and does not --resume or --compile-for."""
        return not (self.common.resume or self.gpu.compile_for)

    def values(self, *names: str) -> dict[str, Any]:
        """Returns some flags by name as plain JSON values, such as those that a resumed run must share with the saved one."""
        flags = self.as_json()
        return {name: flags[name] for name in names}

    def may_change(self, name: str) -> bool:
        """Returns whether a setting may differ from the saved one: in a new run, or where --allow-change names it."""
        return not self.common.resume or name in self.checkpoint.allow_change


@dataclass(frozen=True, kw_only=True)
class OwnFlags:
    """The base of the flags that a script alone has."""


@dataclass(frozen=True, kw_only=True)
class BasicFlags(RunFlags):
    """The flags of a loop, common ones first, rare ones last; a script replaces ``common`` and ``recipe`` by its own."""

    mesh: MeshFlags = MeshFlags()
    common: OmitArgPrefixes[CommonFlags] = CommonFlags()
    recipe: OmitArgPrefixes[OwnFlags] = OwnFlags()
    checkpoint: OmitArgPrefixes[CheckpointFlags] = CheckpointFlags()
    monitoring: OmitArgPrefixes[MonitoringFlags] = MonitoringFlags()
    gpu: OmitArgPrefixes[GpuFlags] = GpuFlags()
    budget: Budgets = Budgets()


def _meant_flags(flags: Any, wrong: Iterable[str]) -> str:
    groups = _groups(flags)
    prefixed = {name: group for name, group in groups.items() if name in PREFIXED}
    inside = {
        name: f"{of}={type(group).__name__}({name}=...)"
        for of, group in prefixed.items()
        for name in vars(group)
    }
    names = [
        *prefixed,
        *(name for of, group in groups.items() if of not in PREFIXED for name in vars(group)),
    ]
    near = [name for each in wrong if (name := inside.get(each) or near_name(each, names))]
    return (
        f"Did you mean {', '.join(near)}?"
        if near
        else f"Choose from {', '.join(sorted({*names}))}."
    )


def _groups(flags: Any) -> dict[str, Any]:
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}


def own_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the values of ``as_json`` that belong to the script, with --steps and --seed, which all runs have."""
    groups = (CommonFlags, CheckpointFlags, MonitoringFlags, GpuFlags)
    shared = {
        *PREFIXED,
        *(field.name for group in groups for field in dataclasses.fields(group)),
    } - {"steps", "seed"}
    return {name: value for name, value in values.items() if name not in shared}


# What a flag must be, by the type of its field; numbers that need not be whole are checked with their ranges.
_KINDS: dict[Any, tuple[tuple[Any, ...], str, str]] = {
    bool: ((bool,), "a bool", "Use True or False."),
    int: ((Integral,), "a whole number", "Write 100, say."),
    str: ((str,), "a text", "Put it in quotes."),
    str | None: ((str, None), "a text", "Put it in quotes, or leave it out."),
    tuple[str, ...]: ((tuple, list), "a tuple of texts", 'Write ("learning_rate",), say.'),
    Path: ((Path,), "a path", 'Write Path("runs/mine"), say.'),
}


def _check_kinds(flags: RunFlags) -> None:
    """Raises TypeError for a flag of another kind than its field's: a switch that is "no", steps that are not whole."""
    for group in (flags.common, flags.checkpoint, flags.monitoring, flags.gpu):
        for field in dataclasses.fields(group):
            if field.type in _KINDS:
                kinds, rule, remedy = _KINDS[field.type]
                check_kind(kinds, rule, remedy, **{field.name: getattr(group, field.name)})


def check_run_flags(flags: RunFlags) -> None:
    """Raises ValueError where a flag is out of range or does not fit this machine; the mesh is checked when it is created."""
    check_own_variables(os.environ)
    check_run_numbers(flags)
    check_out_dir(flags.common.out_dir)
    check_access(flags.common.out_dir)


def check_run_numbers(flags: RunFlags) -> None:
    """Raises ValueError where a flag is out of range, or does not go together with another, on any machine."""
    _check_kinds(flags)
    common, checkpoint = flags.common, flags.checkpoint
    no_saves = "or leave it out for no checkpoints."
    devices = "Give the number of CPU devices to simulate, or leave it out for the real ones."
    check_at_least(0, devices, fake_devices=common.fake_devices)
    check_at_least(1, steps=common.steps)
    check_at_least(
        0, f"Give a number of steps, {no_saves}", checkpoint_every=common.checkpoint_every
    )
    check_at_least(
        0, f"Give a number of minutes, {no_saves}", checkpoint_minutes=checkpoint.checkpoint_minutes
    )
    check_at_least(
        0, "Choose 100, say, or 0 for no comparisons.", compare_every=checkpoint.compare_every
    )
    check_at_least(1, "Give the number of checkpoints to keep.", keep=checkpoint.keep)
    check_at_least(0, "Give a number of steps, or 0 for none.", keep_every=checkpoint.keep_every)
    check_at_least(0, "Choose 10, say, or 0 for any number.", max_skipped=checkpoint.max_skipped)
    check_at_least(0, "Choose 5, say, or 0 to train all steps.", patience=checkpoint.patience)
    if checkpoint.patience and not checkpoint.keep_best:
        raise ValueError(
            f"{arg('patience')} waits for a better metric of {arg('keep_best')}; got {checkpoint.patience} and no metric. Name "
            f"it, such as {arg(keep_best='test_loss')}."
        )
    best = None if checkpoint.patience else checkpoint.keep_best
    kept = {"keep_best": ("the best", best), "keep_every": ("some", checkpoint.keep_every)}
    for name, (which, value) in kept.items():
        if value and not (common.checkpoint_every or checkpoint.checkpoint_minutes):
            raise ValueError(
                f"{arg(name)} keeps {which} of the checkpoints; got {value}, and no checkpoints. Add "
                f"{arg(checkpoint_every=50)}, say, or leave it out."
            )
    if flags.monitoring.metrics_port:
        check_from(1, 65535, "Choose 9090, say.", metrics_port=flags.monitoring.metrics_port)
    log_seconds(flags.monitoring.log_seconds)
    if flags.monitoring.profile:
        exporters.parse_steps(flags.monitoring.profile, common.steps)
    check_seed(common.seed)
    _check_devices(flags)


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that JAX would not take, or whose higher bits it would drop."""
    check_from(0, 2**32 - 1, "Choose 0, say.", seed=seed)


def log_seconds(given: float | None, variables: Mapping[str, str] = os.environ) -> float:
    """Returns the seconds between two lines about the run; raises ValueError where they are no such number.

    Args:
        given: The flag --log-seconds. None: the environment's JAXPAR_LOG_SECONDS, or 15.
        variables: The environment.
    """
    value = variables.get("JAXPAR_LOG_SECONDS", "15") if given is None else given
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"{arg('log_seconds')}, or JAXPAR_LOG_SECONDS, must be a number of seconds, 0 or more; got {value}. Choose "
            "15, say, or 0 for no lines."
        )
    return seconds


def _check_devices(flags: RunFlags) -> None:
    """Raises where the flags that choose devices do not go together."""
    for name, given in (("nodes", flags.gpu.nodes), ("gpus_per_node", flags.gpu.gpus_per_node)):
        if given is not None and not flags.gpu.compile_for:
            needed = arg("compile_for")
            raise ValueError(
                f"{arg(name)} applies to {needed}; got none. Add {arg(compile_for='h100')}, say."
            )
    if flags.common.overwrite and flags.common.resume:
        raise ValueError(
            f"{switch('overwrite')} deletes the earlier run, which {switch('resume')} continues; got both. Leave one of "
            "the two out."
        )
    for name, given in (
        ("fake_devices", flags.common.fake_devices),
        ("resume", flags.common.resume),
    ):
        if given and flags.gpu.compile_for:
            raise ValueError(
                f"{arg('compile_for')} compiles a first step for GPUs that are not here; got {arg(name)} too. Leave one of the "
                "two out."
            )


def check_out_dir(out_dir: Path, flag: str | None = None) -> None:
    """Raises ValueError unless the folder of a flag, by default --out-dir, is a writable folder, or can be created."""
    try:
        there = next(
            path
            for path in (out_dir.absolute(), *out_dir.absolute().parents)
            if path.exists() or path.is_symlink()
        )
    except OSError as error:  # such as a name that is too long
        raise ValueError(
            f"{flag or arg('out_dir')} must be a folder that can be written to; got {brief(str(out_dir))}: {error.strerror}. "
            "Name another."
        ) from error
    why = "" if there.is_dir() else "is a file" if there.exists() else "is a link to nothing"
    if not why:
        try:
            with tempfile.TemporaryFile(
                dir=there
            ):  # permissions do not tell of /proc or a full disk
                pass
        except OSError as error:
            why = f"may not be written to ({error.strerror})"
    if why:
        raise ValueError(
            f"{flag or arg('out_dir')} must be a folder that can be written to; got {out_dir}, but {there} {why}. Name another."
        )


def check_access(out_dir: Path) -> None:
    """Raises ValueError for files of an earlier run in a folder that are another user's, and that this one may not use.

    A run that has compiled would end with them, pass over a checkpoint, or save none.
    """
    changed = [out_dir / name for name in ("metrics.jsonl", ".lease", "checkpoints")]
    steps = [path for path in (out_dir / "checkpoints").glob("[0-9]*") if path.name.isdigit()]
    read = [each for path in steps for each in (path, *path.glob("*"))]
    for path in (*changed, *read):
        if not os.access(path, os.F_OK):
            continue
        needed = os.R_OK | (os.X_OK if path.is_dir() else 0) | (os.W_OK if path in changed else 0)
        if not os.access(path, needed):
            uses = "read and write" if path in changed else "read"
            raise ValueError(
                f"a run must be allowed to {uses} what is in its {arg('out_dir')}; got {path} of user {path.stat().st_uid}, "
                f"and this is user {os.geteuid()}. Give it to this user, chown -R {os.geteuid()} {shlex.quote(str(out_dir))}, "
                "or go on as that one."
            )
