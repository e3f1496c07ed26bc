"""The parts of a save: checking the state, preparing the folder and, once the arrays are written, the commit.

Every process calls these in the same order. A failure on one process is reported to all, so that either all give a save up or
none does.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from jax import process_count, process_index, tree
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.checkpoint.checksum import check_arrays
from jaxpar.checkpoint.errors import DivergedError, NotFiniteError
from jaxpar.checkpoint.files import FileRecord, list_files, record_files, share
from jaxpar.checkpoint.folder import Folder, remove
from jaxpar.checkpoint.manifest import ArrayRecord, Manifest
from jaxpar.checkpoint.orbax_tree import GivenUpError
from jaxpar.runtime.coordination import exchange

SPARE = 1.2  # a save needs this multiple of the state's size free: old steps are deleted only after the commit


def array_records(state: PyTree, step: int, mesh: Mesh) -> dict[str, ArrayRecord]:
    """Returns the manifest's record of each array; every process must call it.

    Raises:
        DivergedError: Devices that should hold the same values do not.
        NotFiniteError: A parameter is NaN or infinite.
    """
    checked = check_arrays(state, mesh)
    if diverged := [path for path, found in checked.items() if found.is_diverged]:
        raise DivergedError(
            f"devices that hold the same part of an array must hold the same values; got different ones in {diverged} at "
            f"step {step}. Nothing was saved: resume from the checkpoint before; a device may compute wrongly."
        )
    if broken := [path for path, found in checked.items() if path.startswith("params/") and not found.is_finite]:
        raise NotFiniteError(
            f"parameters must be finite to be saved; got NaN or infinity in {broken} at step {step}. Nothing was saved: "
            "resume from the checkpoint before, with a smaller learning rate."
        )
    return {
        path: ArrayRecord(tuple(leaf.shape), str(leaf.dtype), found.checksum)
        for (path, found), leaf in zip(checked.items(), tree.leaves(state), strict=True)
    }


def prepare_folder(folder: Folder, step: int, num_bytes: int) -> list[str]:
    """Prepares the folder for a save, and returns the names of unfinished saves that it removed.

    Args:
        folder: The folder of the checkpoints; created if needed.
        step: The step to save.
        num_bytes: The size of the state.

    Raises:
        OSError: This run may not write to the folder, or its disk is too full.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.check()
    left = folder.unfinished()
    for path in left:
        remove(path, must=path.name.startswith(folder.saving(step).name))
    needed, free = math.ceil(SPARE * num_bytes), shutil.disk_usage(folder.path).free
    if free < needed:
        raise OSError(f"a save needs {needed:,} bytes free; got {free:,} on the disk of {folder.path}")
    return [path.name for path in left if not path.exists()]


def commit(
    folder: Folder,
    written: Callable[[], None],
    manifest: Manifest,
    commit_step: Callable[[Manifest], None],
    seconds: float,
) -> str | None:
    """Waits for the arrays, hashes the files and commits; returns the problem, None on success. Every process must call it.

    Each process hashes its share of the files. The first one commits, only after all have reported their hashes.

    Args:
        folder: The folder of the checkpoints.
        written: Returns when this process's arrays are on disk, or raises.
        manifest: The manifest of the step, without its files.
        commit_step: Commits the folder as a step; called on the first process with the complete manifest.
        seconds: How long to wait for the other processes.

    Raises:
        PeerLostError: A process did not answer.
    """
    answers = exchange("save", _written_files(folder, written, manifest.step), timeout_seconds=seconds)
    problem = _first_problem(answers)
    if problem is None and process_index() == 0:
        files = {name: FileRecord(*record) for each in answers for name, record in each["files"].items()}
        try:
            commit_step(dataclasses.replace(manifest, files=files))
        except Exception as error:  # whatever it was, the other processes must be told, and training continues
            problem = in_words(error)
    return exchange("commit", problem, timeout_seconds=seconds)[0]


def _written_files(folder: Folder, written: Callable[[], None], step: int) -> dict[str, Any]:
    """Returns the records of this process's share of a step's files, or the problem."""
    try:
        written()
        return {"problem": None, "is_own": True, "files": _hash_share(folder, step)}
    except Exception as error:  # as in ``commit``
        return {"problem": in_words(error), "is_own": not isinstance(error, GivenUpError), "files": {}}


def _first_problem(told: list[dict[str, Any]]) -> str | None:
    """Returns the problem of a process, preferably of one that failed itself rather than waited for another that did."""
    found = [(not each["is_own"], process, each["problem"]) for process, each in enumerate(told) if each["problem"]]
    if not found:
        return None
    _, process, problem = min(found)
    return problem if len(told) == 1 else f"process {process}: {problem}"


def _hash_share(folder: Folder, step: int) -> Mapping[str, tuple[int, str]]:
    path = folder.saving(step)
    mine = share(list_files(path), process_index(), process_count())
    return {name: (record.bytes, record.sha256) for name, record in record_files(path, mine).items()}


def in_words(error: Exception) -> str:
    """Returns an error as the name of its type and its message."""
    return f"{type(error).__name__}: {error}"
