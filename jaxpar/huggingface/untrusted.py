"""Reads untrusted JSON and paths: JSON of bounded size with unique keys, and paths inside the given folder."""

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

# The largest header or index of a published model, Llama 3.1 405B's in one piece, would have about 0.2 MB.
MAX_JSON_BYTES = 4 * 2**20


def check_file(path: Path) -> Path:
    """Returns ``path``; raises unless it is a regular file: opening a pipe would block forever."""
    if not path.exists():
        raise FileNotFoundError(f"a model's file must exist; got {path}, which does not. Name the folder of a model.")
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"a model's file must be a regular file; got {path}, which is none. Copy it into the folder.")
    return path


def file_inside(folder: Path, name: str, where: str) -> Path:
    """Returns the path of a file in a folder, given its untrusted name.

    A link may lead to another file in the folder, or from a snapshot in Hugging Face's cache to the blobs of the same model.

    Args:
        folder: The folder.
        name: The name, without folders.
        where: The origin of the name, for messages.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The name leads out of the folder, or is not that of a regular file.
    """
    is_plain = 0 < len(name.encode()) < 256 and not any(c in name for c in "/\\\0")
    if not is_plain or name in (".", ".."):
        raise ValueError(
            f"the files of a model must be in its folder, under plain names; got {brief(name)} in {where}. Correct the "
            "name, and do not trust this folder."
        )
    path, root = folder / name, Path(os.path.realpath(folder))
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    target = Path(os.path.realpath(path))  # Path.resolve raises a RuntimeError for a link to itself
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ValueError(
            f"the files of a model must be in its folder; got {name!r} in {where}, a link to {target}. Replace the "
            "link by the file, if you trust it."
        )
    return check_file(path)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not a regular file, is too large, or is not one JSON object.
    """
    size = check_file(path).stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(
            f"JSON of a model must have at most {MAX_JSON_BYTES} bytes; got {size} in {path}. Name the right file."
        )
    try:
        found = json.loads(path.read_bytes().decode(), object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"JSON of a model must be UTF-8, with each key once; got {error} in {path}. Download it again."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"JSON of a model must be an object; got a {type(found).__name__} in {path}. Download it again."
        )
    return found


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} twice")
        found[name] = value
    return found


def shorten(names: Any, most: int = 3) -> str:
    """Returns the first of many names, for a message."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(brief, names[:most])) + more


def brief(found: Any) -> str:
    """Returns a short representation of an untrusted value, for a message."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    short.maxlist = 10
    return short.repr(found)
