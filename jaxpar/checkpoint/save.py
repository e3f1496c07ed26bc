"""Writes a run's states one after another, in the background: each save is committed, or given up by all processes.

Errors of the disk do not raise here. They are reported and recorded in ``failures``, and the next save starts afresh. Every
process takes the steps of a save in the same order, and a failure on one is reported to all, so that either all give a save up
or none does.
"""

import dataclasses
import math
import platform
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from importlib import metadata
from typing import Any

from jax import dtypes, process_count, process_index, tree, tree_util
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.checkpoint import orbax_tree
from jaxpar.checkpoint.checksums import check_arrays
from jaxpar.checkpoint.folder import Folder, Keep, list_files, record_files
from jaxpar.checkpoint.manifest import ArrayRecord, FileRecord, Manifest
from jaxpar.checkpoint.orbax_tree import GivenUpError
from jaxpar.fields import check_at_least
from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.sharding import check_paths, path_string

LIBRARIES = ("jax", "jaxlib", "orbax-checkpoint", "optax", "numpy")
ANY_SECONDS = 1e6
SPARE = 1.2  # a save needs this multiple of the state's size free: old steps are deleted only after the commit


class DivergedError(RuntimeError):
    """Devices that should hold the same values do not; such a state is not saved."""

    exit_code = ExitCode.PEER_LOST


class NotFiniteError(RuntimeError):
    """Parameters are NaN or infinite; such a state is not saved.

    Args:
        found: What was found, a sentence.
        remedy: What to do, a sentence.
    """

    exit_code = ExitCode.NOT_FINITE

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found} {remedy}")
        self.found = found


class Saver:
    """Writes states into the folder of a run's checkpoints; ``CheckpointManager`` adds what is saved, and how it is restored.

    Args:
        folder: The folder of the checkpoints.
        keep: The checkpoints that are kept after a newer one is committed.
        seconds: The time that a save may take before it is given up; 0: no limit.
        say: Called with each message.

    Attributes:
        num_saved: The number of steps that it has committed.
        is_behind: Whether the latest save failed.
        failures: A message for each failed save.
    """

    def __init__(
        self, folder: Folder, keep: Keep, seconds: float, say: Callable[[str], None]
    ) -> None:
        check_at_least(0, "Give a number of seconds, or 0 for no limit.", save_seconds=seconds)
        self._folder, self._keep, self._seconds, self._say = (
            folder,
            keep,
            seconds or ANY_SECONDS,
            say,
        )
        self.num_saved, self.is_behind = 0, False
        self.failures: list[str] = []
        self._damaged: set[int] = set()  # steps that a restore passed over
        self._went_on_from: int | None = None
        self._saved: set[int] = set()  # since the last restore
        self._newest: int | None = None  # that this manager saved, or found saved
        self._in_flight: tuple[int, Future[None]] | None = None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxpar-save")

    # -- a save --------------------------------------------------------------------------------------------------------

    def _start(self, state: PyTree, manifest: Manifest) -> None:
        """Starts writing a state, and returns once its arrays are copied; every process must call it.

        Args:
            state: The state, in canonical order.
            manifest: Its manifest, without the files.
        """
        self.wait()
        if self._is_there(manifest):
            self._newest = self._went_on_from = manifest.step
        elif self._is_ready(manifest.step, sum(leaf.nbytes for leaf in tree.leaves(state))):
            written = orbax_tree.save_async(
                self._folder.saving(manifest.step), state, self._seconds
            )
            self._in_flight = (
                manifest.step,
                self._background.submit(self._finish, written, manifest),
            )

    def _is_there(self, manifest: Manifest) -> bool:
        """Returns whether the step is already saved, by this manager or with the same values."""
        step, found = manifest.step, self._folder.look(manifest.step)
        is_same = isinstance(found, Manifest) and (
            step in self._saved or found.arrays == manifest.arrays
        )
        is_there = is_same and step not in self._damaged
        return exchange("is there", is_there)[0]  # as the first process sees it

    def _is_ready(self, step: int, num_bytes: int) -> bool:
        """Returns whether the folder can take the state; the first process checks, and fails the save for all if it cannot."""
        problem = None
        if process_index() == 0:
            try:
                for name in self._folder.prepare(step, math.ceil(SPARE * num_bytes)):
                    self._say(f"discarded {name}: an unfinished save, which is no checkpoint")
            except OSError as error:
                problem = str(error)
        problem = exchange("is ready", problem)[0]
        if problem is not None:
            self._fail(step, problem)
        return problem is None

    def _finish(self, written: Callable[[], None], manifest: Manifest) -> None:
        """Completes a save, in the background thread: every process hashes its share of the files, and the first commits.

        Raises:
            PeerLostError: A process did not answer.
        """
        step = manifest.step
        answers = exchange(
            "save", self._written_files(written, step), timeout_seconds=self._seconds
        )
        problem = _first_problem(answers)
        if problem is None and process_index() == 0:
            files = {
                name: FileRecord(*record)
                for each in answers
                for name, record in each["files"].items()
            }
            try:
                self._commit(dataclasses.replace(manifest, files=files))
            except (
                Exception
            ) as error:  # whatever it was, the other processes must be told, and training continues
                problem = _in_words(error)
        if problem := exchange("commit", problem, timeout_seconds=self._seconds)[0]:
            self._fail(step, problem)
            return
        self._damaged.discard(step)
        self._saved.add(step)
        self._newest, self._went_on_from = step, None
        self.is_behind = False
        self.num_saved += 1
        if process_index() == 0:
            self._prune(step)

    def _written_files(self, written: Callable[[], None], step: int) -> dict[str, Any]:
        """Returns the records of this process's share of a step's files, or the problem."""
        try:
            written()
            folder = self._folder.saving(step)
            files = record_files(folder, list_files(folder)[process_index() :: process_count()])
        except Exception as error:  # as in ``_finish``
            return {
                "problem": _in_words(error),
                "is_own": not isinstance(error, GivenUpError),
                "files": {},
            }
        return {
            "problem": None,
            "is_own": True,
            "files": {name: astuple(record) for name, record in files.items()},
        }

    def _commit(self, manifest: Manifest) -> None:
        """Commits a save whose arrays are all written; runs on the first process only.

        An error fails the save on all processes. Before steps are set aside, it leaves the folder unchanged.
        """
        self._folder.seal(manifest)
        self._folder.check()
        self._set_others_aside(manifest.step)
        self._folder.commit(manifest.step)

    def _set_others_aside(self, step: int) -> None:
        """Sets aside the steps that are not of the current branch, so that a restart resumes from this branch."""
        for other in self._folder.numbered():
            is_committed = isinstance(self._folder.look(other), Manifest)
            is_left = other >= step or (
                self._went_on_from is not None and other > self._went_on_from
            )
            if other in self._damaged or (other == step and not is_committed):
                self._folder.set_aside(other, "bad")
            elif is_left and is_committed:
                path = self._folder.set_aside(other, "abandoned")
                self._say(
                    f"set aside step {other} as {path.name}: the run resumed from an older step, and saves step {step} now. "
                    "Delete it if it is not wanted."
                )

    def _prune(self, newest: int) -> None:
        try:
            self._folder.prune(self._keep, newest=newest, damaged=self._damaged)
        except OSError as error:
            self._say(f"old checkpoints could not be deleted: {error}")

    def _fail(self, step: int, problem: str) -> None:
        self.failures.append(f"step {step}: {problem}")
        self.is_behind = True
        self._say(
            f"NOT SAVED: checkpoint of step {step}: {problem}. Training continues; earlier checkpoints are unaffected."
        )
        if process_index() == 0:
            self._folder.discard_unfinished()

    # -- the state of the saver ----------------------------------------------------------------------------------------

    def _pass_over(self, step: int, problem: str) -> None:
        """Records and reports that a restore found a step damaged: it may be saved again."""
        self._damaged.add(step)
        self._say(f"NOT USED: checkpoint of step {step}: {problem}")

    def _resume_from(self, step: int) -> None:
        """Records the step of a restore; the next save sets later steps aside, since the run has left their branch."""
        self._saved.clear()
        if (
            not self.num_saved
        ):  # a run that restores an older step while it trains does not leave its branch
            self._went_on_from = step

    def lost(self) -> int | None:
        """Returns the last saved step if the first process no longer finds it, else None; every process must call it."""
        self.wait()
        is_lost = self._newest is not None and isinstance(self._folder.look(self._newest), str)
        return self._newest if exchange("lost", is_lost)[0] else None

    def wait(self) -> None:
        """Waits until no save is in progress.

        Raises:
            PeerLostError: Another process is gone.
        """
        if self._in_flight is None:
            return
        try:
            self._in_flight[1].result()
        finally:
            self._in_flight = None

    @property
    def saving(self) -> int | None:
        """The step whose save is in progress; None if there is none."""
        in_flight = self._in_flight  # another thread may call this
        return None if in_flight is None or in_flight[1].done() else in_flight[0]

    def close(self) -> None:
        """Waits until no save is in progress; no more can be started."""
        self.wait()
        self._background.shutdown()


# -- the parts of a save ------------------------------------------------------------------------------------------------


def array_records(state: PyTree, step: int, mesh: Mesh) -> dict[str, ArrayRecord]:
    """Returns the manifest's record of each array; every process must call it.

    Raises:
        ValueError: An array that cannot be stored, since it has no elements or its elements are smaller than a byte.
        DivergedError: Devices that should hold the same values do not.
        NotFiniteError: A parameter is NaN or infinite.
    """
    _check_storable(state)
    check_paths([path_string(path) for path, _ in tree_util.tree_leaves_with_path(state)])
    checked = check_arrays(state, mesh)
    if diverged := [path for path, found in checked.items() if found.is_diverged]:
        raise DivergedError(
            f"devices that hold the same part of an array must hold the same values; got different ones in {diverged} at "
            f"step {step}. Nothing was saved: resume from the checkpoint before; a device may compute wrongly."
        )
    if broken := [
        path
        for path, found in checked.items()
        if path.startswith("params/") and not found.is_finite
    ]:
        raise NotFiniteError(
            f"parameters must be finite to be saved; got NaN or infinity in {broken} at step {step}. Nothing was saved.",
            "Resume from the checkpoint before, with a smaller learning rate.",
        )
    return {
        path: ArrayRecord(tuple(leaf.shape), str(leaf.dtype), found.checksum)
        for (path, found), leaf in zip(checked.items(), tree.leaves(state), strict=True)
    }


def _check_storable(state: PyTree) -> None:
    """Raises for arrays that Orbax or the checksums cannot take, before anything is written."""
    for path, leaf in tree.leaves_with_path(state):
        if leaf.size == 0 or dtypes.itemsize_bits(leaf.dtype) < 8:
            raise ValueError(
                "an array of a checkpoint must have elements, each of at least a byte; got "
                f"{leaf.dtype}{[*leaf.shape]} at {path_string(path)}. Leave arrays without elements out of the params, and "
                "pack smaller elements into uint8."
            )


def _first_problem(told: list[dict[str, Any]]) -> str | None:
    """Returns the problem of a process, preferably of one that failed itself rather than waited for another that did."""
    found = [
        (not each["is_own"], process, each["problem"])
        for process, each in enumerate(told)
        if each["problem"]
    ]
    if not found:
        return None
    _, process, problem = min(found)
    return problem if len(told) == 1 else f"process {process}: {problem}"


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def versions() -> dict[str, str]:
    """Returns the versions of Python, jaxpar and the libraries that affect the results of a run."""
    return {
        "jaxpar": sys.modules[
            "jaxpar"
        ].__version__,  # an import would violate the package's import order
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
    }
