"""Files of lines of JSON, such as metrics.jsonl, which a run appends to and a resumed run continues.

    file = LineFile(path, (text for text, _ in lines_before(path, first_step)))
    file.write(line_of({"step": 3, "loss": 2.5}))

A Watcher (``exporters.py``) may have such a file of its own.
"""

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jaxpar.runtime.output import fsync, tell, write_atomically

Number = int | float
OF_EVALUATION = (
    "test_"  # the names of metrics that are there only after an evaluation begin with it
)


def line_of(values: Mapping[str, Number]) -> str:
    """Returns values as a line of JSON; NaN and infinity, which JSON does not have, become null."""
    return (
        json.dumps(
            {name: value if math.isfinite(value) else None for name, value in values.items()}
        )
        + "\n"
    )


class LineFile:
    """A file to which complete lines are appended in order; lines that cannot be written wait in memory.

    Args:
        path: The file. An existing one is replaced by a rename, once the first lines are on disk.
        first: The lines that it begins with.

    Raises:
        OSError: The first lines cannot be written. An existing file is unchanged.
    """

    def __init__(self, path: Path, first: Iterable[bytes]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

        def write(part: Path) -> None:
            with part.open("wb") as file:
                file.writelines(first)
            fsync(part)

        write_atomically(path, write)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._waiting: deque[bytes] = deque()  # the first may be the rest of a line
        self._problem: OSError | None = None
        self._is_moved = False

    def write(self, line: str) -> None:
        """Appends a line after the waiting ones, as far as the disk accepts them."""
        self._waiting.append(line.encode())
        try:
            while self._waiting:
                rest = self._waiting[0][os.write(self._file, self._waiting[0]) :]
                self._waiting.popleft()
                if rest:
                    self._waiting.appendleft(rest)
        except OSError as error:
            if self._problem is None:
                tell(f"{self.path}: {error.strerror}; its lines wait in memory")
            self._problem = error
        else:
            self._problem = None
            self._tell_if_moved()

    def _tell_if_moved(self) -> None:
        """Tells once that the file no longer has its name: what is written to it is lost, or is apart from what comes later."""
        if self._is_moved or self._has_its_name():
            return
        self._is_moved = True
        is_deleted = os.fstat(self._file).st_nlink == 0
        what = "deleted" if is_deleted else "renamed, or its folder,"
        lost = (
            "are lost"
            if is_deleted
            else "are there, and what else the run writes is in a new folder of the old name"
        )
        tell(
            f"{self.path} was {what} while the run writes to it: its lines, also those of later steps, {lost}. Stop the run "
            "and resume it"
        )

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            return False
        except OSError:  # such as of a disk that is away for a moment
            return True

    def close(self) -> OSError | None:
        """Closes the file; returns an error that names missing lines and the reason, None if there are none."""
        try:
            os.close(self._file)
        except OSError as error:  # NFS reports failed writes here
            self._problem = error
        if self._problem is None:
            return None
        lines = f"its last {len(self._waiting)} lines" if self._waiting else "lines of its end"
        return OSError(
            self._problem.errno,
            f"{self.path} must have a line for each step; got {self._problem.strerror}, so that {lines} may be missing",
        )


def lines_before(path: Path, step: Number) -> Iterator[tuple[bytes, dict[str, Number]]]:
    """Yields the lines of the steps before ``step``, unchanged, and their values; damaged or truncated lines are omitted."""
    if step and path.exists():
        with path.open("rb") as file:
            for text in file:
                if (line := values_of(text)) and line["step"] < step:
                    yield text if text.endswith(b"\n") else text + b"\n", line


def values_of(text: bytes) -> dict[str, Number] | None:
    """Returns a line's values by name, NaN for null; None if it is not the line of a step."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):  # of JSON or of UTF-8
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    return {name: math.nan if value is None else value for name, value in line.items()}
