"""What a program prints and writes: text of others is escaped, files appear whole, missing packages are named.

Printing does not fail if standard error is on a full disk. Only ``fsync`` syncs files to disk: a power failure may lose others.
jaxpar is on no package index, so an extra is installed from the clone.
"""

import errno
import io
import logging
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk
Kinds = type[Exception] | tuple[type[Exception], ...]


def printable(text: str) -> str:
    r"""Returns text with each non-printable character escaped: control characters, line ends, bidirectional marks.

    >>> printable("loss\x1b[2J\n")
    'loss\\x1b[2J\\n'
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def printable_lines(text: str) -> str:
    """Returns a message of several lines with each line escaped by ``printable``."""
    return "\n".join(map(printable, text.split("\n")))


def how_to_make_room(error: OSError) -> str:
    """Returns what to do about an error of a full disk, or of the limit of a file's size."""
    return (
        "Raise the limit of a file's size (ulimit -f)"
        if error.errno == errno.EFBIG
        else "Make room"
    )


def text_of(error: BaseException) -> str:
    """Returns what to say of an error; of one of the system, which has a code and a path alone, the rule and the remedy too."""
    if isinstance(error, UnicodeEncodeError) and "utf" not in error.encoding:
        return (
            f"what is printed must have the characters of its encoding, {error.encoding}; got "
            f"{printable(error.object[error.start : error.end])[:80]}. Set PYTHONUTF8=1 and leave PYTHONIOENCODING unset."
        )
    if not isinstance(error, OSError) or None in (error.errno, error.strerror):
        return str(error)
    remedy = (
        f"{how_to_make_room(error)}."
        if error.errno in FULL
        else "Name another path, or change its permissions."
    )
    return (
        "a file that is read must be there, and one that is written in a folder with room that takes it; got "
        f"{error.strerror}: {error.filename or 'standard output'}. {remedy}"
    )


def take_all_characters() -> None:
    """Has standard output print "?" for a character that its encoding lacks, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def is_terminal() -> bool:
    """Returns whether standard error is a terminal; it is none where the program was started without one."""
    return sys.stderr is not None and sys.stderr.isatty()


# With which a process says that it ends because another one is gone, by which the launcher tells causes from consequences.
ANOTHER_IS_GONE = "error: another process of the run is gone"


def tell(text: str) -> None:
    """Prints a message on standard error; on a full disk the message is lost and the exit code does not change."""
    try:
        print(
            f"{text}\n", end="", file=sys.stderr, flush=True
        )  # one write: standard output may share the file
    except (
        OSError
    ):  # a stream with a buffer would fail again with that text, at its end or the process's
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True
        )


@contextmanager
def seconds_shown(what: str, *, every: float = 5.0) -> Iterator[None]:
    """Shows on a terminal for how long the ``with`` block has run, in a line that is gone at its end; a short block has none.

    Args:
        what: What it does, such as "searching for plans".
        every: Seconds to the first such line, and between two.
    """
    if not is_terminal():
        yield
        return
    began, over, stream = time.monotonic(), threading.Event(), sys.stderr

    def show() -> None:
        while not over.wait(every):
            stream.write(f"\r{what}: {time.monotonic() - began:.0f} s")
            stream.flush()

    thread = threading.Thread(target=show, name="jaxpar-seconds", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if time.monotonic() - began > every:
            stream.write("\r\x1b[K")  # the line is cleared
            stream.flush()


def write_whole(path: Path, text: str) -> None:
    """Writes text to a file, as ``write_atomically`` does, in UTF-8."""
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], Any], *, sync: bool = False) -> None:
    """Writes a file under another name and renames it, so that readers see the old file or the new one.

    If that fails, an existing file is unchanged and the part that was written is removed. The file has the permissions that the
    umask gives to new files, also where a library creates it for its owner alone, as safetensors does.

    Args:
        path: The file.
        write: Writes the file at the path that it is given, in the same folder.
        sync: Whether its contents are flushed to disk before it is renamed.

    Raises:
        OSError: It cannot be written; or the error that ``write`` raises.
    """
    if path.is_dir():  # else the error would name the part
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a rename would replace a device such as /dev/null
        raise FileExistsError(errno.EEXIST, "exists and is no regular file", str(path))
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        part.touch()
        mode = stat.S_IMODE(part.stat().st_mode)
        write(part)
        if sync:
            fsync(part)
        if stat.S_IMODE(part.stat().st_mode) != mode:
            part.chmod(mode)
        os.replace(part, path)
    except Exception as error:  # not OSError alone: safetensors has errors of its own
        part.unlink(missing_ok=True)
        if (code := _full_disk(error)) is not None:
            raise OSError(code, os.strerror(code), str(path)) from error
        raise


def _full_disk(error: Exception) -> int | None:
    """Returns the code of an error of a full disk, of which a copy names the source, and safetensors says it in its text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    code = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    return code if code in FULL else None


def followed(path: Path) -> Path:
    """Returns where a symbolic link leads to, at which a file is written in place of the link; any other path as it is."""
    return path.resolve() if path.is_symlink() else path


def fsync(path: Path) -> None:
    """Flushes a file's contents, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    from importlib import metadata  # here, since its import takes time

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install_extra(extra: str) -> str:
    """Returns the remedy for a package that is missing, without a full stop.

    >>> install_extra("hf")
    "Install it: pip install -e '.[hf]' in the clone of jaxpar"
    """
    return f"Install it: pip install -e '.[{extra}]' in the clone of jaxpar"


@contextmanager
def logging_kept() -> Iterator[None]:
    """Removes the handlers that an import inside gives the root logger, whose owner is the program.

    Orbax logs when it is imported, and absl then calls ``logging.basicConfig()``. That of the program itself would do nothing.
    """
    before = logging.root.handlers[:]
    try:
        yield
    finally:
        logging.root.handlers[:] = before


@contextmanager
def needing_extra(rule: str, extra: str) -> Iterator[None]:
    """Adds the rule and the remedy to the error of an import inside that fails.

    Args:
        rule: What needs which package.
        extra: The extra that has it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{rule}; got {error}. {install_extra(extra)}.") from error


@contextmanager
def refusing(kinds: Kinds, rule: str, place: object, remedy: str) -> Iterator[None]:
    """Turns an error of a library that reads a file inside into a ValueError with the rule, the place and the remedy.

    Args:
        kinds: The kind of error, or a tuple of kinds.
        rule: What the file must be.
        place: The file, or a function that returns the place in it, as it is when the error is raised.
        remedy: The end of the message, a sentence.
    """
    try:
        yield
    except kinds as error:
        got, where = " ".join(str(error).split()), place() if callable(place) else place
        raise ValueError(
            f"{rule}; got {printable(got)[:200]} in {printable(str(where))}. {remedy}"
        ) from error
