"""Writes the report of a run, on the first process only: report.json when it begins to train, report.html when it ends."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpar.metrics.exporters import Watcher
from jaxpar.report.page import write_page
from jaxpar.report.run import FILE, read_run
from jaxpar.runtime.files import write_whole
from jaxpar.runtime.printable import tell

PAGE = "report.html"


class ReportWriter(Watcher):
    """Writes ``report.html`` into a run's folder when its MetricsLog is closed: at its end, or when it stops or fails.

    ``report.json``, which it writes before the first step, has what ``python -m jaxpar watch`` shows beside the metrics. A
    file that cannot be written is reported, and the run continues.

    Args:
        folder: The run's folder.
        data: Returns the data of its step, as ``step_data`` does.
    """

    def __init__(self, folder: Path, data: Callable[[], dict[str, Any]]) -> None:
        self._folder, self._data = folder, data

    def open(self, first_step: int) -> None:
        """Writes report.json."""
        with _told(self._folder / FILE):
            text = json.dumps(self._data() | {"first_step": first_step})
            write_whole(self._folder / FILE, text)

    def close(self) -> None:
        """Writes report.html."""
        with _told(self._folder / PAGE):
            write_page(self._folder / PAGE, read_run(self._folder))


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Prints an error instead of raising it, since a run must not fail because its report cannot be written."""
    try:
        yield
    except OSError as error:
        tell(f"{path} could not be written: {error.strerror}")
    except Exception as error:
        tell(f"{path} could not be written: {type(error).__name__}: {error}")
