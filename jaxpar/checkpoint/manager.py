"""Saves a run's states while training continues, keeps some of them, and restores the newest intact one on any mesh."""

import operator
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpar.checkpoint.folder import Folder, Keep
from jaxpar.checkpoint.manifest import Manifest, check_readable, plain_json
from jaxpar.checkpoint.restore import (
    BadCheckpointError,
    check_arrays_match,
    check_config,
    load,
    read_newest,
    verify,
)
from jaxpar.checkpoint.save import Saver, array_records, versions
from jaxpar.checkpoint.state import (
    as_keys,
    as_numbers,
    canonical_target,
    from_canonical,
    on_mesh,
    plain_key,
    to_canonical,
)
from jaxpar.fields import check_kind
from jaxpar.mesh import shown_sizes
from jaxpar.pipeline import LayerLayout, open_params
from jaxpar.runtime.coordination import OF_ALL_ROWS, check_agreement, exchange
from jaxpar.runtime.lease import HeldError, Lease
from jaxpar.runtime.output import printable_lines, tell
from jaxpar.sharding import fetch
from jaxpar.step.settings import Parallel, accepts_settings
from jaxpar.train import TrainState

OF_FIRST = "A checkpoint has what the first process gives: give the same in all, such as a key from which each derives its own."


def say(text: str) -> None:
    """Prints a line to standard error, on the first process only."""
    if jax.process_index() == 0:
        tell(printable_lines(text))


class CheckpointManager(Saver):
    """Saves a run's states into a folder, keeps some of them, and restores them on any mesh.

    Args:
        directory: The folder of one run's checkpoints, which every process can access. Created at the first save.
        mesh: The mesh that the run uses now, or its ``Parallel``, which holds the layout too.
        keep: How many of the newest checkpoints to keep; others are deleted after a save.
        keep_every: Also keep each step that is a multiple of this; 0: none.
        keep_best: Also keep the step with the smallest metric of this name, such as "test_loss"; with "-" before the name,
            the largest.
        save_seconds: The time that a save may take until it is committed, before all processes give it up; 0: no limit.
        layout: If given, each state must be packed with this layout. By default any layout is accepted, since each state
            carries its own. Checkpoints hold the layers in canonical order.
        lease: The lease of the run's folder, which each commit checks; by default of ``directory``. ``own`` takes it.
        say: Called with each message, such as discarded saves; by default prints to standard error of the first process.

    Attributes:
        num_saved: The number of checkpoints that it has committed.
        is_behind: Whether the latest save failed.
        failures: A message for each failed save.
    """

    @accepts_settings
    def __init__(
        self,
        directory: Path | str,
        mesh: Mesh | Parallel,
        *,
        keep: int = 3,
        keep_every: int = 0,
        keep_best: str | None = None,
        save_seconds: float = 1800.0,
        layout: LayerLayout | None = None,
        lease: Lease | None = None,
        say: Callable[[str], None] = say,
    ) -> None:
        assert isinstance(mesh, Parallel), "made of a mesh and its layout"
        assert isinstance(mesh.mesh, Mesh), "states are saved from devices"
        check_kind(
            (str, PathLike),
            "a path",
            "Name the folder of a run's checkpoints.",
            directory=directory,
        )
        self.directory, self.mesh, self.layout = Path(directory).absolute(), mesh.mesh, mesh.layout
        self.lease, self._is_owner = lease or Lease(self.directory), False
        super().__init__(
            Folder(self.directory, self.lease.check),
            Keep(keep, keep_every, keep_best),
            save_seconds,
            say,
        )

    # -- one run a folder ----------------------------------------------------------------------------------------------

    def own(self) -> bool:
        """Takes the folder for this run, and returns whether it did so now; every process must call it, the first takes it.

        ``Guard`` calls it when it begins and ``disown`` when it ends; call them yourself if you save without one. If the
        lease cannot be written, this is reported, and every commit tries again.

        Raises:
            HeldError: Another run writes to the folder.
        """
        if self._is_owner:
            return False
        take_in_first_process(self.lease, self._say)
        self._is_owner = True
        return True

    def disown(self) -> None:
        """Releases the folder, so that another run can take it at once."""
        self._is_owner = False
        self.lease.release()

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, state: TrainState, **about: Any) -> int:
        """Writes ``state`` under its step, and returns the step once it is committed; takes the arguments of ``save_async``.

        Raises:
            OSError: It could not be written. Earlier checkpoints are unaffected.
        """
        step = self.save_async(state, **about)
        self.wait()
        if self.failures and self.failures[-1].startswith(f"step {step}:"):
            raise OSError(self.failures.pop())
        return step

    def save_async(
        self,
        state: TrainState,
        *,
        config: Mapping[str, Any] | None = None,
        traits: Mapping[str, Any] | None = None,
        samples: int | None = None,
        key: jax.Array | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> int:
        """Starts writing ``state`` under its step; returns the step once the arrays are copied. Every process must call it.

        ``state`` may then be donated to the next step. The checkpoint appears complete or not at all; errors of the write are
        reported, recorded in ``failures``, and do not stop the run. It first waits for a save that is still in progress. If
        the step is already saved, nothing is written. After a restore of an older step, later steps belong to a branch that
        the run has left: the first save sets them aside, as folders with names such as ``10.abandoned``.

        Args:
            state: Any TrainState.
            config: The settings that the run's numbers depend on, as JSON values: a restore with another config is refused.
            traits: What else the run is known by, as JSON values, which a restore does not compare.
            samples: The position in the data: samples taken so far.
            key: The PRNG key that the run uses.
            metrics: Numbers by which the best checkpoint is kept; those that are not finite are omitted.

        Raises:
            ValueError: An array that cannot be stored, since it has no elements or its elements are smaller than a byte; or
                what ``check_about`` refuses; or processes give another config, position, key or metric of ``keep_best``.
            DivergedError: Devices that should hold the same values do not.
            NotFiniteError: A parameter is NaN or infinite.

        **Collectives**: one all-reduce of a few numbers per array.
        """
        self._check_layout(state)
        step = int(fetch(state.step))
        self.wait()
        state = to_canonical(on_mesh(as_numbers(state), self.mesh))
        manifest = replace(
            self._described(config, traits, samples, key),
            step=step,
            metrics={
                name: float(np.asarray(value).item())
                for name, value in fetch(dict(metrics or {})).items()
                if np.isfinite(value)
            },
            saved_at=time.time(),
            arrays=array_records(state, step, self.mesh),
        )
        check_readable(manifest)  # what could not be read again is not written
        self._check_same_in_all(manifest)
        self._start(state, manifest)
        return step

    def _check_same_in_all(self, manifest: Manifest) -> None:
        """Raises ValueError where processes give other values to save: a checkpoint has those of the first one."""
        given = {f"config {name}": value for name, value in (manifest.config or {}).items()}
        key = manifest.prng_key
        given |= {"samples": manifest.samples, "key": key and [key.impl, *key.words]}
        check_agreement("save", given, OF_FIRST)
        if self._keep.best is not None:
            best = self._keep.best.removeprefix("-")
            check_agreement("save", {best: manifest.metrics.get(best)}, OF_ALL_ROWS)

    def check_about(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        traits: Mapping[str, Any] | None = None,
        samples: int | None = None,
        key: jax.Array | None = None,
    ) -> None:
        """Raises ValueError if what is to be saved beside a state could not be read again; takes what ``save_async`` takes."""
        check_readable(self._described(config, traits, samples, key))

    def _described(
        self,
        config: Mapping[str, Any] | None,
        traits: Mapping[str, Any] | None,
        samples: int | None,
        key: jax.Array | None,
    ) -> Manifest:
        if isinstance(samples, SupportsIndex):
            with suppress(TypeError):  # of NumPy and JAX too, but for arrays
                samples = operator.index(samples)
        return Manifest(
            step=0,
            samples=samples,
            prng_key=None if key is None else plain_key(key),
            config=None if config is None else plain_json(config),
            traits=None if traits is None else plain_json(traits),
            mesh=shown_sizes(self.mesh.shape),
            num_processes=jax.process_count(),
            versions=versions(),
        )

    def _check_layout(self, state: TrainState) -> None:
        """Raises if the manager has a layout and the state's layers are not packed with it."""
        if self.layout is not None:
            open_params(state.params, self.layout)

    # -- listing and verifying -----------------------------------------------------------------------------------------

    def steps(self) -> tuple[int, ...]:
        """Returns the committed steps, in order; use ``verify`` to check their files."""
        self.wait()
        return tuple(self._folder.committed())

    def has_any(self) -> bool:
        """Returns whether the folder has an entry with the name of a step, intact or not."""
        self.wait()
        return bool(self._folder.numbered())

    def latest(self) -> int | None:
        """Returns the newest committed step; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the committed step with the best metric of ``keep_best``; None if no step has it."""
        self.wait()
        return self._keep.best_of([*self._folder.committed().values()])

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a checkpoint.

        Raises:
            BadCheckpointError: It has no valid manifest.
        """
        found = self._folder.look(step)
        if isinstance(found, str):
            raise BadCheckpointError(f"checkpoint of step {step} in {self.directory}: {found}")
        return found

    def verify(self, step: int) -> list[str]:
        """Returns the problems of a step, none if every file is as it was saved. Every process must call it.

        It reads all files, each on one of the processes.
        """
        self.wait()
        return verify(self._folder, step)

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(
        self,
        target: TrainState,
        *,
        step: int | None = None,
        config: Mapping[str, Any] | None = None,
        allow: Collection[str] = (),
        cast: bool = False,
    ) -> TrainState:
        """Returns a saved state, each array with its shape, dtype and sharding in ``target``; every process must call it.

        It verifies every file first, and every array after reading it. By default it restores the newest intact step, and
        reports the steps that it skipped.

        Args:
            target: A state like the saved one: arrays (whose values are not used), or ShapeDtypeStructs with shardings.
            step: The step to restore; by default the newest intact one.
            config: As given to ``save``. By default any config is accepted.
            allow: Names in ``config`` that may differ from the saved ones.
            cast: Whether floating-point arrays may have been saved with another dtype.

        Raises:
            FileNotFoundError: There is no checkpoint.
            BadCheckpointError: There are checkpoints, but none is intact.
            TypeError: A leaf of the target has no NamedSharding.
            ValueError: There is no such step, or the checkpoint is of another config or model, or the target of another mesh.
        """
        check_kind(
            (TrainState,), "a TrainState", "Make it with jaxpar.abstract_state.", target=target
        )
        self._check_layout(target)
        self.wait()
        check_agreement("restore", {"asked step": step})
        wanted = as_numbers(target)
        canonical = canonical_target(wanted, self.mesh)

        def read(manifest: Manifest) -> tuple[TrainState, list[str]]:
            where = f"step {manifest.step} in {self.directory}"
            check_config(config, manifest.config, where, allow)
            stored = check_arrays_match(manifest.arrays, canonical, where, cast=cast)
            return load(self._folder, manifest, stored, self.mesh)

        without = (
            f"restoring needs a checkpoint; got none in {self.directory}. Name the folder that a run saved to, the folder "
            "checkpoints in its out_dir."
        )
        remedy = "Restore a backup, or start a run in another folder."
        state = read_newest(
            self._folder,
            step,
            read,
            action="restoring",
            without=without,
            remedy=remedy,
            passed_over=self._pass_over,
        )
        self._resume_from(int(fetch(state.step)))
        return as_keys(from_canonical(state, wanted), target)


def take_in_first_process(lease: Lease, say: Callable[[str], None]) -> None:
    """Takes a lease in the first process of a run; every process must call it.

    Args:
        lease: The lease.
        say: Prints that the lease cannot be written, which is no error.

    Raises:
        HeldError: Another run holds the folder.
    """
    held = None
    try:
        if jax.process_index() == 0:
            lease.take()
    except HeldError as error:
        held = str(error)
    except OSError as error:
        say(f"NOT HELD: {lease.folder}, which another run could write to: {error}")
    if held := exchange("own", held)[0]:
        raise HeldError(held)
