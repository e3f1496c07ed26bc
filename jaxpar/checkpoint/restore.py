"""Reads a checkpoint: the newest of which every file, and then every value, is as it was saved, if it is of this run.

`CheckpointManager.restore` reads a state to go on training, `stored_params.py` the params alone.

Another process may train meanwhile, and delete the step that is read. Such a step is not taken for damaged: a newer one is
chosen, unless the step was asked for by its number.
"""

import errno
import os
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import process_count, process_index
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.checkpoint.array_file import ArrayFile
from jaxpar.checkpoint.checksums import check_arrays
from jaxpar.checkpoint.folder import Folder, damaged, differences
from jaxpar.checkpoint.manifest import FILE_NAME, ArrayRecord, Manifest, plain_json
from jaxpar.fields import arg
from jaxpar.runtime.coordination import check_agreement, exchange
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import printable
from jaxpar.sharding import path_string

Result = TypeVar("Result")
MOST_NAMED = 5  # problems of one step in a message
MOST_LISTED = 20  # times that the steps are listed, because one was deleted before it was read
SECONDS_BETWEEN_LISTS = 0.2
OTHER_OPTIMIZER = (
    "Use the model and optimizer that it was saved with. To go on with its params and another optimizer, begin a run in "
    "another folder: saved = jaxpar.CheckpointManager(folder, mesh).restore(jaxpar.abstract_state(init_fn, key, "
    "saved_optimizer, parallel)), then run.restore(lambda key: saved.params, key, optimizer, parallel)."
)
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class BadCheckpointError(RuntimeError):
    """The checkpoint is damaged or foreign; a run ends with exit code 65 rather than silently start from the beginning."""

    exit_code = ExitCode.BAD_DATA


class DeletedError(BadCheckpointError):
    """The checkpoint was deleted or replaced by another process while it was read; another one can be chosen."""


def verify(folder: Folder, step: int) -> list[str]:
    """Returns the problems of a step, none if it is intact; every process must call it, and reads its share of the files."""
    return _look_and_verify(folder, step)[1]


def _look_and_verify(folder: Folder, step: int) -> tuple[Manifest | str, list[str]]:
    """Returns what ``verify`` does, and the manifest that it verified. Without problems every process has one."""
    manifest = folder.look(step)
    problems = [manifest] if isinstance(manifest, str) else _wrong_files(folder, manifest)
    return manifest, list(
        dict.fromkeys(problem for each in exchange("verify", problems) for problem in each)
    )


def _wrong_files(folder: Folder, manifest: Manifest) -> list[str]:
    path = folder.of(manifest.step)
    try:
        wrong = differences(path, manifest.files, ignored=[FILE_NAME])
        return wrong or damaged(
            path, manifest.files, sorted(manifest.files)[process_index() :: process_count()]
        )
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
        passed_over: Called with each step that is not intact, and the reason. A step that is deleted meanwhile is not passed
            over: the steps are listed again.

    Raises:
        FileNotFoundError: There is no step.
        ValueError: There is no such step.
        BadCheckpointError: The step is not intact, or none is; the message names another one that is.
    """
    wrong: dict[int, str] = {}
    for _ in range(MOST_LISTED):
        saved = _agreed_steps(folder)
        if not (saved or wrong):
            raise FileNotFoundError(without)
        if step not in (None, *saved):
            shown = ", ".join(map(str, saved))
            raise ValueError(
                f"{action} needs a saved step; got {arg(step=step)}, saved {shown}. Choose one of these."
            )
        left = [each for each in reversed(saved) if step in (None, each) and each not in wrong]
        for each in left:
            found, problems, is_gone = _read_one(folder, each, read)
            if is_gone:
                break
            if found is not None and not problems:
                return found
            wrong[each] = _shorten(problems)
            passed_over(each, wrong[each])
        else:
            others = [each for each in reversed(saved) if each not in wrong]
            intact = _newest_intact(folder, others, wrong)
            if step is not None and intact is not None:
                raise BadCheckpointError(
                    f"{action} needs an intact checkpoint; got {arg(step=step)} in {folder.path}, which is not one: "
                    f"{wrong[step]}. Give {arg(step=intact)}, which is intact, or leave out {arg('step')} for the newest that "
                    "is."
                )
            if all(os.strerror(errno.EACCES) in problem for problem in wrong.values()):
                remedy = "Give this user the right to read the files."
            raise BadCheckpointError(
                f"{action} needs an intact checkpoint; got {len(wrong)} in {folder.path}, none of which is: "
                f"{' | '.join(f'step {each}: {problem}' for each, problem in wrong.items())}. {remedy}"
            )
    raise DeletedError(
        f"{action} needs a checkpoint that stays while it is read; got {MOST_LISTED} in {folder.path} that another process "
        f"deleted meanwhile. Let the run keep more steps, by {arg('keep')} or {arg('keep_every')}."
    )


def _newest_intact(folder: Folder, steps: Sequence[int], wrong: dict[int, str]) -> int | None:
    """Returns the first of these steps that is intact, if any; adds the problems of those before it to ``wrong``."""
    for step in steps:
        manifest, problems = _look_and_verify(folder, step)
        if not problems:
            return step
        if not _is_gone(folder, step, manifest):
            wrong[step] = _shorten(problems)
    return None


def _shorten(problems: Sequence[str]) -> str:
    return "; ".join([*problems[:MOST_NAMED], *["..."] * (len(problems) > MOST_NAMED)])


def _read_one(
    folder: Folder, step: int, read: Callable[[Manifest], tuple[Result, list[str]]]
) -> tuple[Result | None, list[str], bool]:
    """Returns what a step holds, its problems, and whether these are that another process has deleted it meanwhile."""
    found, (manifest, problems) = None, _look_and_verify(folder, step)
    if not problems:
        assert isinstance(manifest, Manifest), "else there were problems"
        found, problems = read(manifest)
    return found, problems, bool(problems) and _is_gone(folder, step, manifest)


def _agreed_steps(folder: Folder) -> list[int]:
    """Returns the steps that all processes see. While another process saves they may see different ones for a moment."""
    for _ in range(MOST_LISTED):
        seen = exchange("steps", folder.numbered())
        if all(steps == seen[0] for steps in seen):
            return seen[0]
        time.sleep(SECONDS_BETWEEN_LISTS)
    check_agreement("restore", {"steps": folder.numbered()})
    return _agreed_steps(folder)


def _is_gone(folder: Folder, step: int, manifest: Manifest | str) -> bool:
    """Returns whether the first process no longer finds a step as it was read."""
    now = folder.look(step)
    is_gone = (
        now != manifest if isinstance(manifest, Manifest) else not os.path.lexists(folder.of(step))
    )
    return exchange("is gone", is_gone)[0]


def load(
    folder: Folder, manifest: Manifest, abstract: PyTree, mesh: Mesh
) -> tuple[PyTree, list[str]]:
    """Returns a step's state and its problems: its arrays must have the checksums that they were saved with.

    Every process must call it, and reads the shards of its devices.

    Args:
        folder: The folder of the checkpoints.
        manifest: The step's manifest.
        abstract: ShapeDtypeStructs with the saved shapes and dtypes, and with shardings on ``mesh``.
        mesh: The mesh.
    """
    state, problem = None, None
    try:
        state = read_arrays(folder.of(manifest.step), abstract)
    except Exception as error:  # TensorStore raises many types of exceptions for a damaged tree
        problem = f"it cannot be read: {type(error).__name__}: {printable(str(error)[:500])}"
    if problems := [each for each in exchange("load", problem) if each]:
        return None, problems
    found = check_arrays(state, mesh)
    wrong = [
        path for path, record in manifest.arrays.items() if found[path].checksum != record.checksum
    ]
    return state, [
        f"the values of {printable(path)} are not those that were saved" for path in wrong
    ]


def read_arrays(folder: Path, abstract: PyTree) -> PyTree:
    """Returns the arrays of a tree in a folder, each with its shape, dtype and sharding in ``abstract``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _read_array(folder, path_string(path), leaf), abstract
    )


def _read_array(folder: Path, path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    file, sharding = ArrayFile(folder, path, leaf.shape, np.dtype(leaf.dtype)), leaf.sharding
    assert sharding is not None, "``canonical_target`` gives each leaf one"
    places = sharding.addressable_devices_indices_map(leaf.shape).values()
    parts = {
        str(place): file.start_reading(place) for place in places if place is not None
    }  # each part once
    read = lambda place: parts[str(place)].result()
    return jax.make_array_from_callback(leaf.shape, sharding, read, dtype=leaf.dtype)


# -- of this run? -------------------------------------------------------------------------------------------------------


def check_config(
    config: Mapping[str, Any] | None,
    saved: Mapping[str, Any] | None,
    where: str,
    allow: Collection[str] = (),
) -> None:
    """Raises ValueError if a run's config differs from the saved one, except in the names in ``allow``."""
    if config is None or saved is None:
        return
    now = plain_json(config)
    names = [
        name for name in {**saved, **now} if now.get(name) != saved.get(name) and name not in allow
    ]
    if names:
        given = lambda settings, name: repr(settings[name]) if name in settings else "not given"
        got = ", ".join(
            f"{printable(name)}={given(now, name)} (saved: {given(saved, name)})" for name in names
        )
        left_out = "" if saved.keys() >= set(names) else ", none where none was given"
        raise ValueError(
            f"a run must continue with the config that it was saved with; got {got} for {where}. "
            f"Give the saved values{left_out}, allow these to change ({_allowing(names)}), or "
            "start a run in another folder."
        )


def _allowing(names: Collection[str]) -> str:
    """Returns how names of a config are allowed to change: by the flag, by that of ``Run``, or by ``restore``."""
    named = arg("allow_change")
    if named != "allow_change":
        return f"{named} {shlex.join(map(printable, names))}"
    shown = tuple(map(printable, names))
    return f"allow_change={shown} of a Run's flags, or allow={shown} of restore"


def check_arrays_match(
    saved: Mapping[str, ArrayRecord], target: PyTree, where: str, *, cast: bool = False
) -> PyTree:
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
            remedy = (
                OTHER_OPTIMIZER
                if path.startswith("opt_state/")
                else "Use the model that it was saved with."
            )
            raise ValueError(
                f"a checkpoint must hold the arrays of the target, with their shapes and dtypes; got {want} for "
                f"{printable(path)}, saved {printable(have)}, in {where}. {remedy}"
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
