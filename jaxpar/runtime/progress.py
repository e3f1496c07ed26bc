"""Between a run and its supervisor: how far it has come, in a small file that outlives its process.

{"first": 100, "done": 137, "seconds": 4.18}      steps before this start, steps now, seconds between
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

VARIABLE = "JAXPAR_PROGRESS"
RESUME_VARIABLE, RESUME_IF_ANY = "JAXPAR_RESUME", "if-any"  # a run that is started again goes on from what there is
LINE_BYTES = 100  # one write of a fixed length, so that a reader never sees half of an old line


@dataclass(frozen=True)
class Reached:
    """What one start of a run came to.

    Attributes:
        first: Steps that it had when it started.
        done: Steps that it had at last.
        seconds: From its first step's end, or its start, to its last.
    """

    first: int
    done: int
    seconds: float


class Progress:
    """Writes the file; without a path it does nothing. A disk that fails ends no training: the file is then behind.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path | None) -> None:
        self._began, self._first = time.monotonic(), None
        self._file = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    @classmethod
    def from_environment(cls) -> "Progress":
        """Returns the one that the environment names; process 0 alone writes."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path and jax.process_index() == 0 else None)

    def done(self, step: int) -> None:
        """Notes that so many steps are done."""
        if self._file is None:
            return
        self._first = step - 1 if self._first is None else self._first
        reached = Reached(self._first, step, round(time.monotonic() - self._began, 3))
        with contextlib.suppress(OSError):
            os.pwrite(self._file, json.dumps(asdict(reached)).ljust(LINE_BYTES).encode(), 0)


def read_progress(path: Path) -> Reached | None:
    """Returns what a run has come to; None if it has done no step."""
    try:
        return Reached(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
