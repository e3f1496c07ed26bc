"""Writes the page of a run when it ends, and serves it while the run trains.

It is served from the run's folder, read-only, to browsers on this machine unless told otherwise:

    GET /            the page, which asks for new data every few seconds
    GET /live.json   this data: charts and tables of the metrics

There is no other path, and no method that changes anything.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.metrics.exporters import Watcher
from jaxpar.report.data import FILE, LOADS, is_free, read_run, readable
from jaxpar.report.page import live_data, render_page, write_page
from jaxpar.runtime.life import ENDED, LifeWatch
from jaxpar.runtime.output import tell, write_whole
from jaxpar.runtime.page_server import PageServer

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
            write_page(
                self._folder / PAGE, read_run(self._folder) | {"life": ENDED}
            )  # its lease is released later


def write_loads(folder: Path, tokens: np.ndarray, step: int) -> None:
    """Writes the loads of a model's experts into a run's folder, from the first process; a failure is reported as there.

    Args:
        folder: The run's folder.
        tokens: ``[layers, experts]``, how many tokens used each expert. Written are multiples of the mean of the layer.
        step: The step after which they were counted, from 0.
    """
    if jax.process_index() == 0:
        loads = tokens / np.maximum(tokens.mean(1, keepdims=True), 1e-9)
        with _told(folder / LOADS):
            write_whole(
                folder / LOADS, json.dumps({"steps": step + 1, "loads": loads.round(4).tolist()})
            )


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Prints an error instead of raising it, since a run must not fail because its report cannot be written."""
    try:
        yield
    except Exception as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        tell(f"{path} could not be written: {why}")


class RunServer(PageServer):
    """Serves one run; ``serve_forever`` answers requests until ``shutdown``.

    Args:
        folder: The run's folder.
        port: The port to listen on; 0: any free one, which the attribute ``server_port`` holds.
        address: The address to listen on; the default accepts connections from this machine only. There is no authentication.
        seconds: The time between two updates of an open page.
        hosts: Names by which it may be asked for, ``*`` for any; by default those of this machine if it listens on a loopback
            address, else any.

    Raises:
        ValueError: It is not the folder of a run, nor one in which a run may still begin; or a name is none.
        OSError: Another program listens on the port, or the address is not one of this machine.
    """

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        address: str = "127.0.0.1",
        seconds: float = 5.0,
        hosts: Sequence[str] = (),
    ) -> None:
        if not is_free(folder):
            read_run(folder)
        self.folder, self.seconds = folder, seconds
        self._life, self._looking = (
            LifeWatch(folder),
            threading.Lock(),
        )  # pages are made in several threads
        pages = {"/": ("text/html", self.page), "/live.json": ("application/json", self.live)}
        super().__init__(pages, address, port, hosts)

    def version(self) -> str:
        """Returns a text that changes when the page gets sections: when the run begins to train, or has loads of experts."""
        path, loads = self.folder / FILE, self.folder / LOADS
        return (
            str(path.stat().st_mtime_ns) if path.exists() else ""
        ) + " and loads" * loads.exists()

    def page(self) -> str:
        """Returns the page."""
        with readable(self.folder):
            return render_page(self._run(), seconds=self.seconds, version=self.version())

    def live(self) -> str:
        """Returns the data that changes, as JSON."""
        with readable(self.folder):
            return json.dumps(live_data(self._run(), self.version()))

    def _run(self) -> dict[str, Any]:
        with self._looking:
            return read_run(self.folder) | {"life": self._life.look()}
