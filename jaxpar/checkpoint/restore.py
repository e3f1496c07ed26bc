"""Finds the checkpoint to restore: the newest of which every file, and then every value, is as it was saved."""

from collections.abc import Callable, Sequence

from jax import process_count, process_index
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.checkpoint import orbax_tree
from jaxpar.checkpoint.checksum import check_arrays
from jaxpar.checkpoint.errors import BadCheckpointError
from jaxpar.checkpoint.files import damaged, differences, share
from jaxpar.checkpoint.folder import Folder
from jaxpar.checkpoint.manifest import FILE_NAME, Manifest
from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.printable import printable

MOST_NAMED = 5  # problems of one step in a message


def verify(folder: Folder, step: int) -> list[str]:
    """Returns the problems of a step, none if it is intact; every process must call it, and reads its share of the files."""
    manifest = folder.look(step)
    problems = [manifest] if isinstance(manifest, str) else _wrong_files(folder, manifest)
    return list(dict.fromkeys(problem for each in exchange("verify", problems) for problem in each))


def _wrong_files(folder: Folder, manifest: Manifest) -> list[str]:
    path = folder.of(manifest.step)
    try:
        wrong = differences(path, manifest.files, ignored=[FILE_NAME])
        return wrong or damaged(path, manifest.files, share(sorted(manifest.files), process_index(), process_count()))
    except OSError as error:
        return [f"a file cannot be read: {error}"]


def newest_whole(
    folder: Folder,
    candidates: Sequence[int],
    mesh: Mesh,
    fits: Callable[[Manifest], PyTree],
    passed_over: Callable[[int, str], None],
) -> PyTree:
    """Returns the state of the first intact step; every process must call it.

    Args:
        folder: The folder of the checkpoints.
        candidates: The steps to try, in order.
        mesh: The mesh to restore to.
        fits: Returns ShapeDtypeStructs of the arrays to read from a step, or raises if the step is of another run.
        passed_over: Called with each step that is not intact, and the reason.

    Raises:
        BadCheckpointError: No step is intact.
    """
    wrong = []
    for step in candidates:
        problems = verify(folder, step)
        if not problems:
            manifest = folder.look(step)
            assert isinstance(manifest, Manifest), manifest
            state, problems = _load(folder, manifest, fits(manifest), mesh)
            if not problems:
                return state
        shown = "; ".join(problems[:MOST_NAMED]) + ("; ..." if len(problems) > MOST_NAMED else "")
        passed_over(step, shown)
        wrong.append(f"step {step}: {shown}")
    raise BadCheckpointError(
        f"restoring needs an intact checkpoint; got {len(wrong)} in {folder.path}, none of which is: "
        f"{' | '.join(wrong)}. Restore a backup, or start a run in another folder."
    )


def _load(folder: Folder, manifest: Manifest, abstract: PyTree, mesh: Mesh) -> tuple[PyTree, list[str]]:
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
