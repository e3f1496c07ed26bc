"""Reads a checkpoint: the newest of which every file, and then every value, is as it was saved, if it is of this run.

To export a model, ``open_stored_params`` returns its params as arrays that are read when they are indexed, on one process and
without a mesh: one layer of one param at a time is in memory. To go on training, use ``CheckpointManager.restore``.
"""

import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import process_count, process_index
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.checkpoint import orbax_tree
from jaxpar.checkpoint.folder import Folder, damaged, differences
from jaxpar.checkpoint.manifest import FILE_NAME, ArrayRecord, Manifest, plain_json
from jaxpar.checkpoint.state import check_arrays
from jaxpar.fields import arg
from jaxpar.params import is_spec
from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import printable
from jaxpar.sharding import path_string

Result = TypeVar("Result")
MOST_NAMED = 5  # problems of one step in a message
PARAMS = "params/"
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class BadCheckpointError(RuntimeError):
    """The checkpoint is damaged or foreign; a run ends with exit code 65 rather than silently start from the beginning."""

    exit_code = ExitCode.BAD_DATA


def verify(folder: Folder, step: int) -> list[str]:
    """Returns the problems of a step, none if it is intact; every process must call it, and reads its share of the files."""
    manifest = folder.look(step)
    problems = [manifest] if isinstance(manifest, str) else _wrong_files(folder, manifest)
    return list(dict.fromkeys(problem for each in exchange("verify", problems) for problem in each))


def _wrong_files(folder: Folder, manifest: Manifest) -> list[str]:
    path = folder.of(manifest.step)
    try:
        wrong = differences(path, manifest.files, ignored=[FILE_NAME])
        return wrong or damaged(path, manifest.files, sorted(manifest.files)[process_index() :: process_count()])
    except OSError as error:
        return [f"a file cannot be read: {error}"]


def read_newest(
    folder: Folder,
    step: int | None,
    read: Callable[[Manifest], tuple[Result, list[str]]],
    *,
    action: str,
    without: str,
    remedy: str = "Restore a backup.",
    passed_over: Callable[[int, str], None] = lambda step, problem: None,
) -> Result:
    """Returns what is read of a step, or of the newest intact one; every process must call it.

    Args:
        folder: The folder of the checkpoints.
        step: The step; None: the newest intact one.
        read: Returns what a step holds, and its problems; or raises if the step is of another run.
        action: What is done, for the message.
        without: The message where there is no step.
        remedy: What to do where no step is intact.
        passed_over: Called with each step that is not intact, and the reason.

    Raises:
        FileNotFoundError: There is no step.
        ValueError: There is no such step.
        BadCheckpointError: No step is intact.
    """
    saved, wrong = folder.numbered(), []
    if not saved:
        raise FileNotFoundError(without)
    if step not in (None, *saved):
        raise ValueError(
            f"{action} needs a saved step; got {arg(step=step)}, saved {', '.join(map(str, saved))}. Choose one of these."
        )
    for each in reversed(saved) if step is None else [step]:
        problems, manifest = verify(folder, each), folder.look(each)
        if not problems and isinstance(manifest, Manifest):
            found, problems = read(manifest)
            if not problems:
                return found
        shown = "; ".join(problems[:MOST_NAMED]) + ("; ..." if len(problems) > MOST_NAMED else "")
        passed_over(each, shown)
        wrong.append(f"step {each}: {shown}")
    raise BadCheckpointError(
        f"{action} needs an intact checkpoint; got {len(wrong)} in {folder.path}, none of which is: "
        f"{' | '.join(wrong)}. {remedy}"
    )


def load(folder: Folder, manifest: Manifest, abstract: PyTree, mesh: Mesh) -> tuple[PyTree, list[str]]:
    """Returns a step's state and its problems: its arrays must have the checksums that they were saved with."""
    state, problem = None, None
    try:
        state = orbax_tree.load(folder.of(manifest.step), abstract)
    except Exception as error:  # Orbax and TensorStore raise many types of exceptions for a damaged tree
        problem = f"it cannot be read: {type(error).__name__}: {str(error)[:500]}"
    if problems := [each for each in exchange("load", problem) if each]:
        return None, problems
    found = check_arrays(state, mesh)
    wrong = [path for path, record in manifest.arrays.items() if found[path].checksum != record.checksum]
    return state, [f"the values of {printable(path)} are not those that were saved" for path in wrong]


# -- of this run? -------------------------------------------------------------------------------------------------------


def check_config(
    config: Mapping[str, Any] | None, saved: Mapping[str, Any] | None, where: str, allow: Collection[str] = ()
) -> None:
    """Raises ValueError if a run's config differs from the saved one, except in the names in ``allow``."""
    if config is None or saved is None:
        return
    now = plain_json(config)
    names = [name for name in {**saved, **now} if now.get(name) != saved.get(name) and name not in allow]
    if names:
        flags = shlex.join(map(printable, names))
        got = ", ".join(f"{printable(name)}={now.get(name)!r} (saved: {saved.get(name)!r})" for name in names)
        raise ValueError(
            f"a run must continue with the config that it was saved with; got {got} for {where}. "
            f"Give the saved values, allow these to change (--allow-change {flags}, or allow={names} of restore), or "
            "start a run in another folder."
        )


def check_arrays_match(saved: Mapping[str, ArrayRecord], target: PyTree, where: str, *, cast: bool = False) -> PyTree:
    """Returns ``target`` with the saved dtypes; raises ValueError if the saved arrays do not match it.

    Args:
        saved: The arrays of the manifest, by path.
        target: ShapeDtypeStructs.
        where: The checkpoint, for the message.
        cast: Whether floating-point arrays may differ in dtype.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(target)
    wanted = {path_string(path): leaf for path, leaf in leaves}
    for path in {**wanted, **saved}:
        want, have = _say_array(wanted.get(path)), _say_array(saved.get(path))
        if want != have and not (cast and _differ_in_float(wanted.get(path), saved.get(path))):
            raise ValueError(
                f"a checkpoint must hold the arrays of the target, with their shapes and dtypes; got {want} for "
                f"{printable(path)}, saved {printable(have)}, in {where}. Use the model and optimizer that it was saved with."
            )
    stored = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(saved[path].dtype), sharding=leaf.sharding)
        for path, leaf in wanted.items()
    ]
    return jax.tree.unflatten(treedef, stored)


def _say_array(array: Any) -> str:
    return "none" if array is None else f"{array.dtype}{list(array.shape)}"


def _differ_in_float(want: Any, have: ArrayRecord | None) -> bool:
    if want is None or have is None or tuple(want.shape) != have.shape:
        return False
    return have.dtype in _FLOATS and str(want.dtype) in _FLOATS


# -- params alone -------------------------------------------------------------------------------------------------------


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


def open_stored_params(
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

    def read(manifest: Manifest) -> tuple[tuple[dict[str, StoredArray], Manifest], list[str]]:
        at, found = folder.of(manifest.step), {}
        for path, record in manifest.arrays.items():
            if path.startswith(PARAMS):
                found[path.removeprefix(PARAMS)] = StoredArray(at, path, record)
        return (found, manifest), []

    without = (
        f"a run's model is read from its checkpoints; got none in {directory}. Train it with --checkpoint-every 100, say, "
        f"which also saves the last step{otherwise}."
    )
    return read_newest(folder, step, read, action="reading params", without=without)


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
