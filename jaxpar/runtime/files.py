"""Writes files so that a reader never sees half of one. They are not synced to disk, so a power failure may lose them."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes text to a file, as ``write_atomically`` does, in UTF-8."""
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file under another name and renames it, so that readers see the old file or the new one.

    If that fails, an existing file is unchanged and the part that was written is removed. The file has the permissions that the
    umask gives to new files, also where a library creates it for its owner alone, as safetensors does.

    Args:
        path: The file.
        write: Writes the file at the path that it is given, in the same folder.

    Raises:
        OSError: It cannot be written; or the error that ``write`` raises.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        part.touch()
        mode = stat.S_IMODE(part.stat().st_mode)
        write(part)
        if stat.S_IMODE(part.stat().st_mode) != mode:
            part.chmod(mode)
        os.replace(part, path)
    except Exception:  # not OSError alone: safetensors has errors of its own
        part.unlink(missing_ok=True)
        raise
