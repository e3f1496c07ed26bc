"""What a run has before its first step: the mesh that its flags ask for, the checkpoints in its folder, and its config.json."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

import jaxpar
from jaxpar.checkpoint import CheckpointManager
from jaxpar.checkpoint.checksums import diverged_replicas
from jaxpar.checkpoint.folder import Folder
from jaxpar.checkpoint.state import as_numbers
from jaxpar.fields import arg, switch
from jaxpar.guard import OF_ROWS
from jaxpar.inspect.text import bytes_text
from jaxpar.mesh import (
    OF_ZERO,
    arrange,
    check_every_process_takes_part,
    entry_axes,
    idle_text,
    shown_sizes,
)
from jaxpar.run import folder
from jaxpar.run.flags import MeshFlags, RunFlags
from jaxpar.run.messages import ConfigError, checks, say
from jaxpar.runtime.coordination import check_agreement
from jaxpar.runtime.lease import Lease
from jaxpar.runtime.output import write_whole
from jaxpar.runtime.supervise import is_restarted
from jaxpar.runtime.uncaught import FULL
from jaxpar.sharding import path_string
from jaxpar.step.sharding import left_whole
from jaxpar.trainable import trained_part

MUCH = 0.1  # the share of a device's state from which on it is told

# Settings of JAX that change what a step computes, of which the message about different programs could not say.
OF_PROGRAMS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def open_checkpoints(flags: RunFlags, mesh: jax.sharding.Mesh) -> CheckpointManager:
    """Returns the manager of the checkpoints in ``--out-dir``; unless it is a --dry-run, this run then owns the folder."""
    common, directory = flags.common, flags.common.out_dir / folder.CHECKPOINTS
    kept = {name: getattr(flags.checkpoint, name) for name in ("keep", "keep_every", "keep_best")}
    _check_same_start(flags)
    folder.check_own_config(common.out_dir)
    deletes = common.overwrite and not common.resume and not is_restarted()
    lease = Lease(common.out_dir, is_begun=False, follows=not deletes)
    checkpoints = CheckpointManager(
        directory, mesh, **kept, save_seconds=flags.budget.save, lease=lease
    )
    if not common.dry_run:
        checkpoints.own()
    try:
        _check_start(flags, checkpoints)
    except BaseException:
        checkpoints.disown()
        raise
    return checkpoints


def _check_start(flags: RunFlags, checkpoints: CheckpointManager) -> None:
    """Raises FileNotFoundError or ValueError unless a run can begin in its folder, or resume there."""
    common, latest = flags.common, checkpoints.latest()
    if common.resume and not checkpoints.has_any():
        found = folder.results(common.out_dir)
        anew = f", with {switch('overwrite')} for {found[0]}" if found else ""
        raise FileNotFoundError(
            f"{switch('resume')} needs a checkpoint; got none in {checkpoints.directory}. Name a run's folder by "
            f"{arg('out_dir')}, or leave {arg('resume')} out to begin one{anew}."
        )
    if common.resume and latest is not None and latest > common.steps:
        raise ValueError(
            f"{arg('steps')} must be at least the step to resume from; got {arg(steps=common.steps)}, a checkpoint of step "
            f"{latest}. Choose {arg(steps=latest)} or more: it counts from the beginning of the run."
        )
    if not (common.resume or common.overwrite or common.dry_run):
        _check_new(flags, checkpoints, latest)


def _check_same_start(flags: RunFlags) -> None:
    """Raises ConfigError where one process resumes and another begins: they would wait for one another."""
    if jax.process_count() == 1:
        return
    common = flags.common
    given = {f"flag {name}": getattr(common, name) for name in ("resume", "overwrite", "dry_run")}
    given |= {"path of out_dir": str(common.out_dir.absolute()), "version of JAX": jax.__version__}
    with checks():
        check_agreement(
            "begin", given, "Start all with the same code, flags and working directory."
        )


def _check_new(flags: RunFlags, checkpoints: CheckpointManager, latest: int | None) -> None:
    """Raises ValueError if ``--out-dir`` has checkpoints, or results of a run other than this one before a restart."""
    if checkpoints.has_any():
        of = "one that is damaged" if latest is None else f"one of step {latest}"
        go_on = "Choose" if latest is None else f"Continue it with {switch('resume')}, choose"
        raise ValueError(
            f"a new run needs a folder without checkpoints; got {of} in {checkpoints.directory}. {go_on} another "
            f"{arg('out_dir')}, or add {switch('overwrite')}, which deletes the earlier run."
        )
    if not (is_restarted() and folder.is_of(flags.common.out_dir, flags.as_json())):
        folder.check_new(flags.common.out_dir, overwrite=flags.common.overwrite)


def idle_changes(allowed: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Returns what to say of names in --allow-change that are no settings, neither saved nor of this run; "" for none."""
    unknown = [name for name in allowed if name not in settings]
    known = ", ".join(sorted(settings))
    return (
        f"{arg('allow_change')} has no effect for {', '.join(unknown)}: the settings are {known}"
        if unknown
        else ""
    )


def saved_settings(flags: RunFlags) -> dict[str, Any]:
    """Returns the settings that the newest checkpoint to --resume was saved with; none without one."""
    saved = (
        Folder(flags.common.out_dir / folder.CHECKPOINTS).committed() if flags.common.resume else {}
    )
    return dict(saved[max(saved)].config or {}) if saved else {}


def make_mesh(flags: RunFlags) -> jax.sharding.Mesh:
    """Returns the mesh that the flags ask for."""
    devices = None
    if flags.gpu.compile_for:
        num_nodes, each = flags.gpu.shape
        devices = jaxpar.compile_only_devices(
            flags.gpu.compile_for, num_nodes=num_nodes, devices_per_node=each
        )
    mesh, num_devices = arrange(dataclasses.asdict(flags.mesh), devices)
    if mesh.size < num_devices:
        say(idle_text(mesh, num_devices))
    return mesh


def left_whole_lines(params: Any, init_state: Sequence[Any]) -> Iterator[str]:
    """Yields a line on the params that ZeRO leaves whole, the largest first, if any; ``init_state`` may have a Parallel."""
    for parallel in (each for each in init_state if isinstance(each, jaxpar.Parallel)):
        if whole := left_whole(params, parallel):
            state = _state_of(whole, trained_part(params, parallel.trainable))
            yield (
                f"{arg(zero=parallel.zero)} does not split {bytes_text(sum(whole.values()))} of params, {state}, since data "
                f"times context, {math.prod(parallel.mesh.shape[axis] for axis in OF_ZERO)}, divides none of their dims that "
                f"no other axis splits: {_largest(whole)}"
            )


def state_left_whole(target: jaxpar.TrainState, init_state: Sequence[Any]) -> Iterator[str]:
    """Yields a line on optimizer state of other dims than its params that ZeRO leaves whole, if that is much of a device."""
    for parallel in (each for each in init_state if isinstance(each, jaxpar.Parallel)):
        if parallel.zero == 0 or math.prod(parallel.mesh.shape[axis] for axis in OF_ZERO) == 1:
            continue
        with_param = left_whole(target.params, parallel)  # of which ``left_whole_lines`` tells
        whole = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(target.opt_state):
            name, size = path_string(path), _bytes_on_device(leaf)
            of_param = (held for each, held in with_param.items() if name.endswith(each))
            if _is_whole(leaf) and size > max(of_param, default=0):
                whole[name] = size
        held = sum(map(_bytes_on_device, jax.tree.leaves((target.params, target.opt_state))))
        if (total := sum(whole.values())) > MUCH * held:
            yield (
                f"{arg(zero=parallel.zero)} does not split {bytes_text(total)} of optimizer state, {total / held:.0%} of what "
                f"a device holds between steps, since none of its dims is one along which a param is split: {_largest(whole)}"
            )


def _is_whole(leaf: Any) -> bool:
    """Whether the devices of ZeRO each hold all of an array, or all of what other axes leave of it."""
    axes = {axis for entry in leaf.sharding.spec for axis in entry_axes(entry)}
    return leaf.size > 1 and axes.isdisjoint(OF_ZERO)


def _bytes_on_device(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _largest(sizes: Mapping[str, int]) -> str:
    """Returns the names of the three largest arrays with their bytes, and how many more there are."""
    named = sorted(sizes, key=lambda name: -sizes[name])[:3]
    shown = ", ".join(f"{name} {bytes_text(sizes[name])}" for name in named)
    return shown + (f" and {len(sizes) - 3} more" if len(sizes) > 3 else "")


def _state_of(whole: Mapping[str, int], trained: Any) -> str:
    """Returns what to say of the optimizer state of params, some of which may be frozen."""
    paths = {path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)}
    have_state = [path in paths for path in whole]
    if all(have_state):
        return "with their optimizer state"
    return "with the optimizer state of those that are trained" if any(have_state) else "all frozen"


def check_processes(
    mesh: jax.sharding.Mesh,
    flags: RunFlags,
    settings: Mapping[str, Any],
    read: Mapping[str, Callable[[], Any]],
) -> None:
    """Raises ConfigError where the processes of a run have other flags, settings or data, or one has no part of its mesh.

    Args:
        mesh: Its mesh.
        flags: The flags of the run.
        settings: Its settings.
        read: What they read, by name: functions that return it as plain JSON, called if there are several processes.
    """
    if jax.process_count() == 1:
        return
    with checks():
        check_every_process_takes_part(list(mesh.devices.flat), jax.devices())
        given = {f"flag {name}": value for name, value in flags.as_json().items()}
        given |= {f"setting {name}": value for name, value in settings.items()}
        given |= {f"jax.config {name}": str(jax.config.values.get(name)) for name in OF_PROGRAMS}
        check_agreement("train", given | {name: value() for name, value in read.items()})


def first_state(make_state: Callable[[], jaxpar.TrainState]) -> jaxpar.TrainState:
    """Returns a new state; raises ConfigError where the processes of a run have made different ones."""
    state = make_state()
    if jax.process_count() > 1 and (apart := diverged_replicas(as_numbers(state))):
        raise ConfigError(
            f"all processes must begin with the same state; got other values in {', '.join(apart[:8])}. Draw params from a "
            "key that is the same on all processes, or load them from one file: NumPy without a seed draws others."
        )
    return state


def advice_on_finite_steps(
    remedy: str, settings: Mapping[str, Any], *, has_checkpoint: bool = True
) -> str:
    """Returns a remedy with what to set for another try: the flags of a command, or the arguments of a script."""
    if has_checkpoint:
        allowed = f" {arg('allow_change')} learning_rate" if "learning_rate" in settings else ""
        remedy += f" To continue from a checkpoint with another, add {switch('resume')}{allowed}."
    return f"{remedy} To begin again, add {switch('overwrite')}. {OF_ROWS}"


def without_saves(flags: RunFlags, first_step: int) -> str:
    """Returns what to say of a run that has checkpoints and saves none before its last step; "" if it does save."""
    every, steps = flags.common.checkpoint_every, flags.common.steps
    if every <= steps or flags.checkpoint.checkpoint_minutes or first_step >= steps:
        return ""
    return (
        f"{arg(checkpoint_every=every)} is more than {arg(steps=steps)}: nothing is saved before the last step, unless the run "
        "is asked to stop"
    )


def write_config(flags: RunFlags, mesh: jax.sharding.Mesh) -> None:
    """Writes every flag to ``config.json``, with the actual sizes of the mesh; only the first process writes."""
    values = flags.replace(mesh=MeshFlags(**shown_sizes(mesh.shape))).as_json()
    out_dir = flags.common.out_dir
    if jax.process_index() == 0:
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            write_whole(out_dir / "config.json", json.dumps(values, indent=2) + "\n")
        except OSError as error:  # errors that check_out_dir cannot detect
            if error.errno in FULL:
                raise
            raise ConfigError(
                f"{arg('out_dir')} must be a folder that can be written to; got {out_dir}: {error.strerror}. Name another."
            ) from error
