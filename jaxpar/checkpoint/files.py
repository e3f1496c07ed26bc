"""The files of a checkpoint: listing them, their SHA-256, and a check that no name leads out of its folder. No JAX."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxpar.runtime.printable import printable

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")  # each part of a path: no "..", no hidden file, no separator
# Files that systems leave in folders: macOS, file system repair, NFS for a file that is deleted while it is open.
OF_THE_SYSTEM = re.compile(r"\.DS_Store|\._.*|lost\+found|\.nfs[0-9a-f]+")
MAX_DEPTH = 16
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """A manifest's record of a file."""

    bytes: int
    sha256: str


def is_safe(name: str) -> bool:
    """Returns whether a file's relative path, written with slashes, stays in its folder on every system."""
    steps = name.split("/")
    return len(steps) <= MAX_DEPTH and all(NAME.fullmatch(step) for step in steps)


def list_files(folder: Path) -> list[str]:
    """Returns the relative paths of all files under a folder, sorted, except the files that systems leave there.

    Raises:
        ValueError: There is a link, or an entry that is neither a file nor a folder. A checkpoint has none, and a link could
            lead out of it.
    """
    found = []
    for here, folders, files in os.walk(folder):
        folders[:], files = (_without_the_systems(names) for names in (folders, files))
        for name in (*folders, *files):
            path = Path(here) / name
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ValueError(f"{printable(path.relative_to(folder).as_posix())} is not a plain file")
        found += [(Path(here) / name).relative_to(folder).as_posix() for name in files]
    return sorted(found)


def _without_the_systems(names: Iterable[str]) -> list[str]:
    return [name for name in names if not OF_THE_SYSTEM.fullmatch(name)]


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Returns the size and SHA-256 of files; reads several at once, since hashing releases the interpreter lock."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="jaxpar-hash") as pool:
        return dict(zip(names, pool.map(lambda name: _record(folder / name), names), strict=True))


def _record(path: Path) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def share(names: Iterable[str], process: int, num_processes: int) -> list[str]:
    """Returns the files that one of several processes hashes."""
    return list(names)[process::num_processes]


def differences(folder: Path, recorded: Mapping[str, FileRecord], ignored: Iterable[str] = ()) -> list[str]:
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
    return [f"{name} is damaged (its SHA-256 differs)" for name in found if found[name] != recorded[name]]


def fsync(path: Path) -> None:
    """Flushes a file's contents, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
