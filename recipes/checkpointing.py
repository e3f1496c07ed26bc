"""The checkpoints of a recipe's run, its start or resumption, and the guard of its training loop."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cli
import jax
import run_folder

import jaxpar
from jaxpar.checkpoint import CheckpointManager, Manifest
from jaxpar.checkpoint.folder import Folder
from jaxpar.data.batches import Origin
from jaxpar.guard import Guard
from jaxpar.metrics.log import MetricsLog
from jaxpar.runtime.lease import Lease
from jaxpar.runtime.watchdog import Watchdog

CHECKED_BYTES = 2**20  # at each end of a file


def open_checkpoints(flags: cli.SharedFlags, mesh: jax.sharding.Mesh) -> CheckpointManager:
    """Returns the manager of the checkpoints in ``--out-dir``; unless it is a --dry-run, this run then owns the folder.

    Args:
        flags: The flags.
        mesh: The run's mesh.

    Raises:
        FileNotFoundError: There is nothing to --resume.
        HeldError: Another run writes to ``--out-dir``.
        ValueError: The run to resume is past --steps, or a new run would overwrite an earlier one without --overwrite.
    """
    checkpoints = CheckpointManager(
        flags.out_dir / run_folder.CHECKPOINTS,
        mesh,
        keep=flags.keep,
        keep_every=flags.keep_every,
        keep_best=flags.keep_best,
        save_seconds=flags.budget.save,
        lease=Lease(flags.out_dir),
    )
    if not flags.dry_run:
        checkpoints.own()
    latest = checkpoints.latest()
    if flags.resume and not checkpoints.has_any():
        raise FileNotFoundError(
            f"--resume needs a checkpoint; got none in {checkpoints.directory}. Name a run's folder by --out-dir, or leave "
            "--resume out to begin one."
        )
    if flags.resume and latest is not None and latest > flags.steps:
        raise ValueError(
            f"--steps must be at least the step to resume from; got --steps {flags.steps}, a checkpoint of step {latest}. "
            f"Choose --steps {latest} or more: it counts from the beginning of the run."
        )
    if not (flags.resume or flags.overwrite or flags.dry_run):
        check_new(flags, checkpoints, latest)
    return checkpoints


def check_new(flags: cli.SharedFlags, checkpoints: CheckpointManager, latest: int | None) -> None:
    """Raises ValueError if ``--out-dir`` has checkpoints, or results of a run other than this one before a restart."""
    if checkpoints.has_any():
        of, go_on = (
            ("one that is damaged", "Choose")
            if latest is None
            else (f"one of step {latest}", "Continue it with --resume, choose")
        )
        raise ValueError(
            f"a new run needs a folder without checkpoints; got {of} in {checkpoints.directory}. {go_on} another --out-dir, or "
            "add --overwrite, which deletes the earlier run."
        )
    if not (cli.is_restarted() and run_folder.is_of(flags.out_dir, cli.as_json(flags))):
        run_folder.check_new(flags.out_dir, overwrite=flags.overwrite)


def overwrite(flags: cli.SharedFlags, checkpoints: CheckpointManager) -> None:
    """With --overwrite, deletes the earlier run in ``--out-dir``; call it before the first file is written.

    Raises:
        LostError: Another run has taken the folder.
    """
    if flags.overwrite and jax.process_index() == 0 and run_folder.has_run(flags.out_dir):
        checkpoints.lease.check()
        run_folder.delete_run(flags.out_dir)
        cli.say(f"deleted: the earlier run in {flags.out_dir}")


def saved_settings(flags: cli.SharedFlags) -> dict[str, Any]:
    """Returns the settings that the newest checkpoint to --resume was saved with; none without one."""
    folder = Folder(flags.out_dir / run_folder.CHECKPOINTS)
    found = [folder.look(step) for step in reversed(folder.numbered())] if flags.resume else []
    return next((dict(each.config or {}) for each in found if isinstance(each, Manifest)), {})


def checksum_of_model(folder: Path) -> str:
    """Returns a checksum of the names, sizes, beginnings and ends of a model's files, which does not depend on the folder."""
    found = 0
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        size = path.stat().st_size
        found = zlib.crc32(f"{path.name} {size}".encode(), found)
        with path.open("rb") as file:
            found = zlib.crc32(file.read(CHECKED_BYTES), found)
            file.seek(max(size - CHECKED_BYTES, 0))
            found = zlib.crc32(file.read(), found)
    return f"{found:08x}"


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
        state: The checkpoint's state; None for a new run.
        origin: The step and the position in the data.
        saved: The settings that the checkpoint was saved with.
    """

    state: jaxpar.TrainState | None
    origin: Origin
    saved: dict[str, Any]


def resume(
    flags: cli.SharedFlags, checkpoints: CheckpointManager, target: jaxpar.TrainState, config: dict[str, Any]
) -> Start:
    """Returns where the run begins: with --resume at the newest undamaged checkpoint, otherwise at step 0.

    Args:
        flags: The run's flags.
        checkpoints: The manager of those in ``--out-dir``.
        target: What to restore into, from ``jaxpar.abstract_state``.
        config: The settings that the results depend on: they must equal the saved ones, except for names in ``--allow-change``,
            and ``steps``: a run may be made longer or shorter.
    """
    if not flags.resume:
        return Start(None, Origin(), {})
    with Watchdog(flags.budget) as watchdog, watchdog.phase("save"):
        state = checkpoints.restore(target, config=config, allow=("steps", *flags.allow_change))
    manifest = checkpoints.manifest(int(jaxpar.fetch(state.step)))
    cli.say(f"resumed from step {manifest.step}, saved on {', '.join(f'{a}={n}' for a, n in manifest.mesh.items())}")
    return Start(state, Origin(manifest.step, manifest.samples or 0), dict(manifest.config or {}))


def guard(
    flags: cli.SharedFlags,
    checkpoints: CheckpointManager,
    log: MetricsLog,
    *,
    config: dict[str, Any],
    samples: Callable[[int], int],
    remedy: str,
    draw: Callable[[], None],
) -> Guard:
    """Returns the guard of the training loop: checkpointing, preemption and hang detection, as the flags ask.

    Args:
        flags: The run's flags.
        checkpoints: The manager of those in ``--out-dir``.
        log: The metrics log, flushed before each save, so that it has the line of each saved step.
        config: The settings that the results depend on.
        samples: ``samples(step)``: the position in the data after that many steps.
        remedy: The learning rate to choose if steps are not finite.
        draw: Draws the pictures of a run that is asked to stop.
    """

    def draw_what_there_is() -> None:
        with cli.spared(f"a picture in {flags.out_dir}"):  # the state is saved, which the exit code reports
            draw()

    key = jax.random.key(flags.seed)
    if flags.checkpoint_every or flags.checkpoint_minutes or flags.resume:
        remedy += " To continue from a checkpoint with another, add --resume --allow-change learning_rate."
    remedy += " To begin again, add --overwrite."
    return Guard(
        checkpoints,
        num_steps=flags.steps,
        save_every=flags.checkpoint_every,
        save_minutes=flags.checkpoint_minutes,
        max_skipped=flags.max_skipped,
        budgets=flags.budget,
        about=lambda step: {"config": config, "samples": samples(step), "key": key},
        before_save=log.flush,
        at_stop=draw_what_there_is,
        remedy=remedy,
    )


def say_skipped(state: jaxpar.TrainState) -> None:
    """Prints how many steps changed nothing, if any."""
    if skipped := int(jaxpar.fetch(state.num_skipped)):
        cli.say(f"{skipped} steps changed nothing, since their loss or gradients were not finite")
