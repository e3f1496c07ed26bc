"""The steps of a save: may this state be saved, is there room, and, once the arrays are written, what makes it count."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from jax import process_count, process_index, tree
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.agreement import exchange
from jaxpar.checkpoint.errors import DivergedError, NotFiniteError
from jaxpar.checkpoint.files import FileRecord, list_files, record_files, share
from jaxpar.checkpoint.folder import Folder
from jaxpar.checkpoint.manifest import ArrayRecord, Manifest
from jaxpar.checksum import check_arrays

SPARE = 1.2  # a save needs this much of the state's size free: the last step is deleted only when the next is whole


def array_records(state: PyTree, step: int, mesh: Mesh) -> dict[str, ArrayRecord]:
    """Returns what the manifest is to say of each array; every process must call it.

    Raises:
        DivergedError: Devices hold different values of what should be equal.
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


def no_room(directory: Path, state: PyTree) -> str | None:
    """Returns why the disk cannot take a state, or None if it can; every process must call it, the first looks."""
    needed, free = math.ceil(SPARE * sum(leaf.nbytes for leaf in tree.leaves(state))), 0
    if process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    free = exchange("free bytes", free)[0]
    return None if free >= needed else f"a save needs {needed:,} bytes free; got {free:,} on the disk of {directory}"


def commit(folder: Folder, written: Callable[[], None], manifest: Manifest) -> str | None:
    """Waits for the arrays, hashes the files, makes the save count; returns what went wrong. Every process must call it.

    Each process hashes its share of the files; the first writes the manifest when all have told theirs.
    """
    problem, files = None, {}
    try:
        written()
        files = _hash_share(folder.saving(manifest.step))
    except Exception as error:  # whatever it was, the others must hear of it, and training goes on
        problem = _in_words(error)
    told = exchange("save", {"problem": problem, "files": files})
    problem = next((each["problem"] for each in told if each["problem"]), None)
    if problem is None and process_index() == 0:
        try:
            everything = {name: FileRecord(*record) for each in told for name, record in each["files"].items()}
            folder.commit(dataclasses.replace(manifest, files=everything))
        except OSError as error:
            problem = _in_words(error)
    return exchange("commit", problem)[0]


def _hash_share(folder: Path) -> Mapping[str, tuple[int, str]]:
    mine = share(list_files(folder), process_index(), process_count())
    return {name: (record.bytes, record.sha256) for name, record in record_files(folder, mine).items()}


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
