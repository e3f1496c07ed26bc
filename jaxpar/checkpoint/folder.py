"""The folder of a run's checkpoints: which steps are committed, how a save is committed, which steps are kept. No JAX.

checkpoints/
    200/  300/        committed: each with a manifest.json
    saving-400/       a save in progress, or the rest of a killed one
    300.bad/          a damaged step, once a newer one is saved
    350.abandoned/    a step of a branch that the run left: it resumed from an older one
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from jaxpar.checkpoint.manifest import FILE_NAME, FileRecord, Manifest, read_manifest
from jaxpar.fields import check_at_least, check_kind, check_not_negative
from jaxpar.runtime.output import fsync, printable, write_atomically

STEP = re.compile(r"0|[1-9][0-9]{0,17}")
SET_ASIDE = re.compile(r"(0|[1-9][0-9]*)\.(bad|abandoned)(-[0-9]+)?")
SAVING = re.compile(
    r"saving-[0-9]+(\..*)?"
)  # Orbax's own unfinished folders begin with their final name
# Files that systems leave in folders: macOS, file system repair, NFS for a file that is deleted while it is open.
OF_THE_SYSTEM = re.compile(r"\.DS_Store|\._.*|lost\+found|\.nfs[0-9a-f]+")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept after a newer one is committed; the newest always is.

    Attributes:
        last: The number of newest checkpoints to keep.
        every: Also keep each step that is a multiple of this; 0: none.
        best: Also keep the step with the smallest metric of this name; a leading "-" selects the largest. None: none.
    """

    last: int = 3
    every: int = 0
    best: str | None = None

    def __post_init__(self) -> None:
        check_at_least(1, "Give the number of checkpoints to keep.", keep=self.last)
        check_kind(
            (Real,), "a number", "Give a number of steps, or 0 for none.", keep_every=self.every
        )
        check_kind((str, None), "a string", "Give the name of a metric.", keep_best=self.best)
        check_not_negative("Give a number of steps, or 0 for none.", keep_every=self.every)

    def choose(self, manifests: Sequence[Manifest]) -> set[int]:
        """Returns the steps to keep."""
        steps = sorted(manifest.step for manifest in manifests)
        stay = set(steps[-self.last :]) | {
            step for step in steps if self.every and step % self.every == 0
        }
        best = self.best_of(manifests)
        return stay if best is None else stay | {best}

    def best_of(self, manifests: Sequence[Manifest]) -> int | None:
        """Returns the step with the best metric, the newest of equal ones; None if no step has the metric."""
        name, sign = (self.best or "").lstrip("-"), -1 if (self.best or "").startswith("-") else 1
        measured = [manifest for manifest in manifests if name in manifest.metrics]
        if not measured:
            return None
        return min(
            measured, key=lambda manifest: (sign * manifest.metrics[name], -manifest.step)
        ).step


class Folder:
    """The folder of a run's checkpoints.

    Args:
        path: The folder.
        check: Raises OSError if this run may not write to it (any more); called before anything in it is renamed or deleted.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self.path, self.check = path, check

    def of(self, step: int) -> Path:
        """Returns the folder of a committed step."""
        return self.path / str(step)

    def saving(self, step: int) -> Path:
        """Returns the folder that a save of a step is written to."""
        return self.path / f"saving-{step}"

    def numbered(self) -> list[int]:
        """Returns the step numbers among the names of the folder's entries, in order, whatever these entries contain."""
        return sorted(int(name) for name in self._names() if STEP.fullmatch(name))

    def committed(self) -> dict[int, Manifest]:
        """Returns the manifest of each step that has a valid one, by step; reads no other file."""
        return {
            step: manifest
            for step in self.numbered()
            if isinstance(manifest := self.look(step), Manifest)
        }

    def look(self, step: int) -> Manifest | str:
        """Returns the manifest of a step, or a message if it has no valid one."""
        try:
            manifest = read_manifest(self.of(step))
        except (ValueError, OSError) as error:
            return str(error)
        return (
            manifest if manifest.step == step else f"its manifest is that of step {manifest.step}"
        )

    def unfinished(self) -> list[Path]:
        """Returns the folders of unfinished saves."""
        return sorted(self.path / name for name in self._names() if SAVING.fullmatch(name))

    def prepare(self, step: int, num_bytes: int) -> list[str]:
        """Makes room for a save of so many bytes, and returns the names of unfinished saves that it removed.

        Raises:
            OSError: This run may not write to the folder, or its disk is too full.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.check()
        left, saving = self.unfinished(), self.saving(step)
        for path in left:
            remove(path, must=path.name.startswith(saving.name))
        saving.mkdir()  # a disk that takes no folder fails here, before threads of Orbax wait for one
        saving.rmdir()
        if (free := shutil.disk_usage(self.path).free) < num_bytes:
            raise OSError(
                f"a save needs {num_bytes:,} bytes free; got {free:,} on the disk of {self.path}"
            )
        return [path.name for path in left if not path.exists()]

    def discard_unfinished(self) -> None:
        """Deletes the folders of killed and failed saves, as far as possible."""
        with contextlib.suppress(OSError):
            self.check()
            for path in self.unfinished():
                remove(path, must=False)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:
            raise PermissionError(
                f"a folder of checkpoints must be one that this user may read; got {self.path}: {error.strerror}. "
                "Give the right to read and enter it, or name another."
            ) from error

    def seal(self, manifest: Manifest) -> None:
        """Flushes the files of a finished save to disk, then writes its manifest."""
        saving = self.saving(manifest.step)
        for here, _, files in os.walk(saving):
            for name in (*files, "."):
                fsync(Path(here, name))
        text = manifest.render()
        write_atomically(
            saving / FILE_NAME, lambda part: part.write_text(text, encoding="ascii"), sync=True
        )
        fsync(saving)

    def commit(self, step: int) -> None:
        """Commits a sealed save by one rename; no entry of the folder may have the name of the step."""
        self.saving(step).rename(self.of(step))
        fsync(self.path)

    def set_aside(self, step: int, why: str) -> Path:
        """Renames a step so that it no longer counts, such as to 300.bad, and returns its new path. Overwrites nothing."""
        names = [f"{step}.{why}", *(f"{step}.{why}-{number}" for number in range(2, 1000))]
        free = next(
            path
            for path in map(self.path.joinpath, names)
            if not (path.exists() or path.is_symlink())
        )
        self.of(step).rename(free)
        fsync(self.path)
        return free

    def prune(self, keep: Keep, *, newest: int, damaged: Collection[int] = ()) -> list[int]:
        """Deletes the committed steps that are not to be kept, and returns them. All other entries are left alone.

        Args:
            keep: The steps to keep. Only steps count whose files all exist with the recorded sizes.
            newest: A step that is kept in any case.
            damaged: Steps that are known to be damaged, and do not count.
        """
        whole = {
            step: manifest
            for step, manifest in self.committed().items()
            if step not in damaged
            and not differences(self.of(step), manifest.files, ignored=[FILE_NAME])
        }
        gone = sorted(whole.keys() - keep.choose(list(whole.values())) - {newest})
        self.check()
        for step in gone:
            going = self.saving(step).with_suffix(".gone")  # a partly deleted step must not count
            remove(going)
            self.of(step).rename(going)
            remove(going)
        return gone


def has_steps(directory: Path) -> bool:
    """Returns whether a folder has an entry with the name of a step, intact or not. Unfinished saves do not count."""
    return bool(Folder(directory).numbered())


def delete_steps(directory: Path) -> None:
    """Deletes every step in a folder of checkpoints, intact or not, set aside or unfinished; all other entries stay.

    The folder is deleted too if it is empty then.
    """
    folder = Folder(directory)
    for name in folder._names():
        if STEP.fullmatch(name) or SAVING.fullmatch(name) or SET_ASIDE.fullmatch(name):
            remove(directory / name)
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def remove(path: Path, *, must: bool = True) -> None:
    """Deletes a file, a folder with its contents, or a link, which is not followed; ignores errors unless it ``must``."""
    with contextlib.nullcontext() if must else contextlib.suppress(OSError):
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        elif path.exists():
            shutil.rmtree(path, ignore_errors=not must)


# -- files --------------------------------------------------------------------------------------------------------------


def _refuse_unread(error: OSError) -> None:
    """Raises the error of a folder that this user may not read, whose files would seem to be missing."""
    if isinstance(error, PermissionError):
        raise error


def list_files(folder: Path) -> list[str]:
    """Returns the relative paths of all files under a folder, sorted, except the files that systems leave there.

    Raises:
        ValueError: There is a link, or an entry that is neither a file nor a folder. A checkpoint has none, and a link could
            lead out of it.
        PermissionError: This user may not read a folder.
    """
    found = []
    for here, folders, files in os.walk(folder, onerror=_refuse_unread):
        folders[:], files = (
            [name for name in each if not OF_THE_SYSTEM.fullmatch(name)]
            for each in (folders, files)
        )
        for name in (*folders, *files):
            path = Path(here) / name
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ValueError(
                    f"{printable(path.relative_to(folder).as_posix())} is not a plain file"
                )
        found += [(Path(here) / name).relative_to(folder).as_posix() for name in files]
    return sorted(found)


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Returns the size and SHA-256 of files; reads several at once, since hashing releases the interpreter lock."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="jaxpar-hash") as pool:
        return dict(zip(names, pool.map(lambda name: _record(folder / name), names), strict=True))


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())


def differences(
    folder: Path, recorded: Mapping[str, FileRecord], ignored: Iterable[str] = ()
) -> list[str]:
    """Returns a message for each file of a folder that is missing, foreign or of another size. Reads no contents."""
    try:
        there = set(list_files(folder)) - set(ignored)
    except ValueError as error:
        return [str(error)]
    wrong = [f"{name} is missing" for name in sorted(recorded.keys() - there)]
    wrong += [f"{printable(name)} is foreign to it" for name in sorted(there - recorded.keys())]
    for name in sorted(there & recorded.keys()):
        if (size := (folder / name).stat().st_size) != recorded[name].bytes:
            wrong.append(f"{name} has {size} bytes, not {recorded[name].bytes}")
    return wrong


def damaged(folder: Path, recorded: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """Returns a message for each named file whose contents are not those recorded. Reads the files completely."""
    found = record_files(folder, names)
    return [
        f"{name} is damaged (its SHA-256 differs)"
        for name in found
        if found[name] != recorded[name]
    ]
