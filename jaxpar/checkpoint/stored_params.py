"""The params of a checkpoint, for export and for serving: arrays that are read, and checked, when they are indexed.

They are read on one process and without a mesh: one layer of one param, or a chunk of it as it was
saved, is in memory at a time. To go on training, use ``CheckpointManager.restore``.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.checkpoint.array_file import ArrayFile
from jaxpar.checkpoint.checksums import row_sums
from jaxpar.checkpoint.folder import Folder
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.checkpoint.restore import BadCheckpointError, DeletedError, read_newest
from jaxpar.fields import arg
from jaxpar.params import is_spec
from jaxpar.runtime.output import printable, tell
from jaxpar.sharding import path_string

Result = TypeVar("Result")
PARAMS = "params/"
MOST_READ = 5  # steps that are opened and then deleted before all is read


class StoredArray:
    """An array in a checkpoint. ``array[index]`` reads a part of it, ``numpy.asarray(array)`` all of it.

    No value is returned that is not the saved one. The checksum in the manifest is that of the
    complete array, so before the first row is returned all chunks are read once, and the sum of
    each row is kept.

    Attributes:
        shape: Its shape, with layers in canonical order.
        dtype: Its dtype.
    """

    def __init__(self, folder: Folder, manifest: Manifest, path: str) -> None:
        self._folder, self._manifest, self._path = folder, manifest, path
        self._record = manifest.arrays[path]
        self.shape, self.dtype = self._record.shape, np.dtype(self._record.dtype)
        self._sums: np.ndarray | None = None  # of the rows
        with self._read():
            self._file = ArrayFile(folder.of(manifest.step), path, self.shape, self.dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        if not self.shape or not isinstance(index, int | np.integer):
            return np.asarray(self)[index]
        row = range(self.shape[0])[index]
        with self._read():
            self._sums = self._row_sums() if self._sums is None else self._sums
            values = self._file.read((slice(row, row + 1), *map(slice, self.shape[1:])))
            self._check(
                row_sums(values, (row, *(0,) * (len(self.shape) - 1)), self.shape), self._sums[row]
            )
        return values[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        with self._read():
            values = self._file.read(tuple(map(slice, self.shape)))
            self._check(row_sums(values, (0,) * len(self.shape), self.shape), self._record.checksum)
        return np.asarray(values, dtype)

    def _row_sums(self) -> np.ndarray:
        """Returns the sum of each row, from all chunks, whose values must be the saved ones."""
        sums = np.zeros(self.shape[0], np.uint32)
        for chunk in self._file.chunks():
            start = [along.start for along in chunk]
            sums[chunk[0]] += row_sums(self._file.read(chunk), start, self.shape)
        self._check(sums, self._record.checksum)
        return sums

    def _check(self, sums: np.ndarray, wanted: int) -> None:
        if int(sums.sum(dtype=np.uint32)) != wanted:
            raise ValueError("its values are not those that were saved")

    @contextlib.contextmanager
    def _read(self) -> Iterator[None]:
        """Raises in place of an error of reading: DeletedError if the step is there no more, else BadCheckpointError."""
        try:
            yield
        except (
            Exception
        ) as error:  # TensorStore raises many types of exceptions for a damaged array
            step = self._manifest.step
            name = f"{printable(self._path)} of step {step} in {self._folder.path}"
            if self._folder.look(step) != self._manifest:
                raise DeletedError(
                    f"a checkpoint must stay while it is read; got {name}, which another process has deleted or replaced "
                    f"meanwhile. Read a newer step, or let the run keep more, by {arg('keep')} or {arg('keep_every')}."
                ) from error
            found = f"{type(error).__name__}: {printable(str(error)[:500])}"
            raise BadCheckpointError(
                f"a checkpoint's values must be those that were saved; got {name}: {found}. Name another step, or restore a "
                "backup."
            ) from error


def choosing_again(
    step: int | None, read: Callable[[], Result], say: Callable[[str], None] = tell
) -> Result:
    """Returns what ``read`` returns, which opens stored params and reads them.

    It is called again if another process deletes the step meanwhile, and then opens a newer one.

    Args:
        step: The step that is asked for, which no other replaces; None: the newest intact one.
        read: Opens the params and reads them.
        say: Called with a message before each further call.

    Raises:
        DeletedError: The step was deleted, ``MOST_READ`` times if none was asked for.
    """
    for _ in range(MOST_READ - 1):
        try:
            return read()
        except DeletedError as error:
            if step is not None:
                raise
            say(f"{error} The newest step is read now.")
    return read()


def open_stored_params(
    directory: Path | str, step: int | None = None, *, otherwise: str = ""
) -> tuple[dict[str, StoredArray], Manifest]:
    """Returns the params of a checkpoint by path, such as "layers/mlp/w_up", and its manifest.

    Every file of the checkpoint is verified first, and every array when it is read. If another
    process trains meanwhile, the step may be deleted before all is read: see ``choosing_again``.

    Args:
        directory: The folder of a run's checkpoints.
        step: The step to read; by default the newest intact one.
        otherwise: What to read a run's model from if it has no checkpoints, for the message.

    Raises:
        FileNotFoundError: There is no checkpoint.
        BadCheckpointError: There are checkpoints, but none is intact.
        ValueError: There is no such step.
    """
    folder = Folder(Path(directory).absolute())

    def read(manifest: Manifest) -> tuple[tuple[dict[str, StoredArray], Manifest], list[str]]:
        paths = [path for path in manifest.arrays if path.startswith(PARAMS)]
        try:
            found = {
                path.removeprefix(PARAMS): StoredArray(folder, manifest, path) for path in paths
            }
        except BadCheckpointError as error:
            return ({}, manifest), [str(error)]
        return (found, manifest), []

    without = (
        f"a run's model is read from its checkpoints; got none in {directory}. Train it with --checkpoint-every 100, say, "
        f"which also saves the last step{otherwise}."
    )
    told = lambda other, problem: tell(f"NOT USED: checkpoint of step {other}: {problem}")
    return read_newest(
        folder, step, read, action="reading params", without=without, passed_over=told
    )


def as_tree(stored: Mapping[str, Any], table: PyTree) -> PyTree:
    """Returns stored params with the structure of a table; raises ValueError if they are not those of its model."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(table, is_leaf=is_spec)
    paths = [path_string(path) for path, _ in leaves]
    if wrong := sorted(set(paths) ^ set(stored)):
        raise ValueError(
            f"a checkpoint must hold the params of its model; got {', '.join(wrong[:3])} in only one of them. Give the "
            "checkpoints and the description of one run."
        )
    return treedef.unflatten([stored[path] for path in paths])
