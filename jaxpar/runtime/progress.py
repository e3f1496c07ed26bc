"""The progress of a run, for its supervisor, in a small file that outlives the process.

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
RESUME_VARIABLE, RESUME_IF_ANY = "JAXPAR_RESUME", "if-any"  # a restarted run resumes if there is a checkpoint
LINE_BYTES = 100  # one write of a fixed length, so that a reader never sees half of an old line


@dataclass(frozen=True)
class Reached:
    """The progress of one start of a run.

    Attributes:
        first: The steps done before this start.
        done: The steps done at its end.
        seconds: The time from the creation of its ``Progress`` to the end of its last step.
    """

    first: int
    done: int
    seconds: float


class Progress:
    """Writes the progress file; without a path it does nothing. A disk that fails does not end training: the file then lags.

    Args:
        path: The file to write.
    """

    def __init__(self, path: Path | None) -> None:
        self._began, self._first = time.monotonic(), None
        self._file = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    @classmethod
    def from_environment(cls) -> "Progress":
        """Returns a Progress for the file that ``JAXPAR_PROGRESS`` names; only process 0 writes."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path and jax.process_index() == 0 else None)

    def done(self, step: int) -> None:
        """Records that ``step`` steps are done."""
        if self._file is None:
            return
        self._first = step - 1 if self._first is None else self._first
        reached = Reached(self._first, step, round(time.monotonic() - self._began, 3))
        with contextlib.suppress(OSError):
            os.pwrite(self._file, json.dumps(asdict(reached)).ljust(LINE_BYTES).encode(), 0)


def read_progress(path: Path) -> Reached | None:
    """Returns the progress of a run; None if it has done no step."""
    try:
        return Reached(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
