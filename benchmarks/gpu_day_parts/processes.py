"""A process that ends, with all that it started, when its time is over or when this process ends, however that happens."""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from jaxpar.runtime.launch import ProcessGroups


@contextlib.contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Starts a process, which is killed at the end of the block."""
    groups = ProcessGroups()
    with subprocess.Popen(command, env=env, start_new_session=True) as process:
        groups.add(process.pid)
        try:
            yield process
        finally:
            groups.close()
