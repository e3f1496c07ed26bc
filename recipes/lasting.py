"""How a recipe's run lasts: its checkpoints, where it begins, and what stands beside its loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import cli
import jax

import jaxpar
from jaxpar.batches import Origin
from jaxpar.checkpoint import CheckpointManager
from jaxpar.guard import Guard
from jaxpar.metrics import MetricsLog
from jaxpar.watchdog import Watchdog


def open_checkpoints(flags: cli.SharedFlags, mesh: jax.sharding.Mesh) -> CheckpointManager:
    """Returns the manager of the checkpoints in ``--out-dir``.

    Args:
        flags: The flags.
        mesh: Of the run.

    Raises:
        FileNotFoundError: There is nothing to --resume.
        ValueError: The run to resume is past --steps, or a new run would mix its checkpoints with those of an earlier one.
    """
    checkpoints = CheckpointManager(
        flags.out_dir / "checkpoints",
        mesh,
        keep=flags.keep,
        keep_every=flags.keep_every,
        keep_best=flags.keep_best,
    )
    latest = checkpoints.latest()
    if flags.resume and not checkpoints.has_any():
        raise FileNotFoundError(
            f"--resume needs a checkpoint; got none in {checkpoints.directory}. Name a run's folder by --out-dir, or train "
            "with --checkpoint-every first."
        )
    if flags.resume and latest is not None and latest > flags.steps:
        raise ValueError(
            f"--steps must be at least the step to resume from; got --steps {flags.steps}, a checkpoint of step {latest}. "
            f"Choose --steps {latest} or more: it counts from the beginning of the run."
        )
    if checkpoints.has_any() and not flags.resume:
        of = "one that is damaged" if latest is None else f"one of step {latest}"
        raise ValueError(
            f"a new run needs a folder without checkpoints; got {of} in {checkpoints.directory}. "
            "Go on with it by --resume, choose another --out-dir, or remove that folder."
        )
    return checkpoints


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
        state: Of the checkpoint; None for a new run.
        origin: The step and the position in the data.
    """

    state: jaxpar.TrainState | None
    origin: Origin


def resume(
    flags: cli.SharedFlags, checkpoints: CheckpointManager, target: jaxpar.TrainState, config: dict[str, Any]
) -> Start:
    """Returns where the run begins: with --resume at the newest checkpoint that is whole, else anew.

    Args:
        flags: The run's.
        checkpoints: In ``--out-dir``.
        target: What to restore into, from ``jaxpar.abstract_state``.
        config: What the run's numbers depend on: it must be the saved one, but for the names in ``--allow-change``.
    """
    if not flags.resume:
        return Start(None, Origin())
    with Watchdog(flags.budget) as watchdog, watchdog.phase("save"):
        state = checkpoints.restore(target, config=config, allow=flags.allow_change)
    manifest = checkpoints.manifest(int(jaxpar.fetch(state.step)))
    cli.say(f"resumed from step {manifest.step}, saved on {', '.join(f'{a}={n}' for a, n in manifest.mesh.items())}")
    return Start(state, Origin(manifest.step, manifest.samples or 0))


def guard(
    flags: cli.SharedFlags,
    checkpoints: CheckpointManager,
    log: MetricsLog,
    *,
    config: dict[str, Any],
    samples: Callable[[int], int],
    remedy: str,
) -> Guard:
    """Returns what stands beside the training loop, as the flags ask.

    Args:
        flags: The run's.
        checkpoints: In ``--out-dir``.
        log: Of the metrics, which is to have the line of each step that is saved.
        config: What the run's numbers depend on.
        samples: ``samples(step)``: the position in the data after so many steps.
        remedy: What to do where steps are not finite.
    """
    key = jax.random.key(flags.seed)
    return Guard(
        checkpoints,
        num_steps=flags.steps,
        save_every=flags.checkpoint_every,
        save_minutes=flags.checkpoint_minutes,
        max_skipped=flags.max_skipped,
        budgets=flags.budget,
        about=lambda step: {"config": config, "samples": samples(step), "key": key},
        before_save=log.flush,
        remedy=remedy,
    )


def say_skipped(state: jaxpar.TrainState) -> None:
    """Says how many steps changed nothing, if any."""
    if skipped := int(jaxpar.fetch(state.num_skipped)):
        cli.say(f"{skipped} steps changed nothing, since their loss or gradients were not finite")
