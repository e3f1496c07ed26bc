"""Which checkpoint a run goes on from: the newest of which every file and then every value is as it was saved."""

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

MOST_NAMED = 5  # problems of one step


def verify(folder: Folder, step: int) -> list[str]:
    """Returns what is wrong with a step, in words; every process must call it, and reads its share of the files."""
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
    """Returns the state of the first step that is whole; every process must call it.

    Args:
        folder: Of the checkpoints.
        candidates: Steps, the one that is wanted most first.
        mesh: That the state is read to.
        fits: Returns what to read a step into, as ShapeDtypeStructs, or raises where the step is of another run.
        passed_over: Is told each step that is not whole, and why.

    Raises:
        BadCheckpointError: None is whole.
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
        told = "; ".join(problems[:MOST_NAMED]) + ("; ..." if len(problems) > MOST_NAMED else "")
        passed_over(step, told)
        wrong.append(f"step {step}: {told}")
    raise BadCheckpointError(
        f"restoring needs a checkpoint that is whole; got {len(wrong)} in {folder.path}, none of which is: "
        f"{' | '.join(wrong)}. Bring back a copy, or begin a run in another folder."
    )


def _load(folder: Folder, manifest: Manifest, abstract: PyTree, mesh: Mesh) -> tuple[PyTree, list[str]]:
    """Returns a step's state and what is wrong with it: its values must have the checksums that they were saved with."""
    state, problem = None, None
    try:
        state = orbax_tree.load(folder.of(manifest.step), abstract)
    except Exception as error:  # Orbax and TensorStore raise many kinds for a tree that is not in order
        problem = f"it cannot be read: {type(error).__name__}: {str(error)[:500]}"
    if problems := [each for each in exchange("load", problem) if each]:
        return None, problems
    found = check_arrays(state, mesh)
    wrong = [path for path, record in manifest.arrays.items() if found[path].checksum != record.checksum]
    return state, [f"the values of {printable(path)} are not those that were saved" for path in wrong]
