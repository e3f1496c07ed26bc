"""The params of a committed checkpoint as arrays that are read when they are indexed, on one process and without a mesh.

To export a model, one layer of one param at a time is in memory. To go on training, use `CheckpointManager.restore`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.checkpoint import orbax_tree
from jaxpar.checkpoint.errors import BadCheckpointError
from jaxpar.checkpoint.folder import Folder
from jaxpar.checkpoint.manifest import ArrayRecord, Manifest
from jaxpar.checkpoint.restore import verify
from jaxpar.params import is_spec
from jaxpar.sharding import path_string

PARAMS = "params/"


class StoredArray:
    """An array in a checkpoint. ``array[index]`` reads a part of it, ``numpy.asarray(array)`` all of it.

    Attributes:
        shape: Its shape, with layers in canonical order.
        dtype: Its dtype.
    """

    def __init__(self, folder: Path, path: str, record: ArrayRecord) -> None:
        self.shape, self.dtype = record.shape, np.dtype(record.dtype)
        self._array = orbax_tree.open_array(folder, path, record.shape, self.dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._array[index].read().result()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self[...], dtype)


def open_params(
    directory: Path | str, step: int | None = None, *, otherwise: str = ""
) -> tuple[dict[str, StoredArray], Manifest]:
    """Returns the params of a checkpoint by path, such as "layers/mlp/w_up", and its manifest.

    Every file of the checkpoint is verified first.

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
    steps = list(reversed(folder.numbered()))
    if not steps:
        raise FileNotFoundError(
            f"a run's model is read from its checkpoints; got none in {directory}. Train it with --checkpoint-every 100, say, "
            f"which also saves the last step{otherwise}."
        )
    if step is not None and step not in steps:
        raise ValueError(
            f"reading params needs a saved step; got step={step}, saved {', '.join(map(str, reversed(steps)))}. Choose one of "
            "these."
        )
    wrong = []
    for each in steps if step is None else [step]:
        problems, manifest = verify(folder, each), folder.look(each)
        if not problems and isinstance(manifest, Manifest):
            arrays = {path: record for path, record in manifest.arrays.items() if path.startswith(PARAMS)}
            at = folder.of(each)
            return {
                path.removeprefix(PARAMS): StoredArray(at, path, record) for path, record in arrays.items()
            }, manifest
        wrong.append(f"step {each}: {'; '.join(problems[:3])}")
    raise BadCheckpointError(
        f"reading params needs an intact checkpoint; got {len(wrong)} in {directory}, none of which is: "
        f"{' | '.join(wrong)}. Restore a backup."
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
