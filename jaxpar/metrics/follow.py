"""Follows a run's metrics.jsonl from another process, for services that are told of each step.

for line in follow(Path("runs/gpt")):
    service.log(line, step=line["step"])
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxpar.metrics.lines import Number
from jaxpar.metrics.log import read_metrics
from jaxpar.runtime.life import LifeWatch
from jaxpar.runtime.output import tell


def follow(
    folder: Path | str, *, seconds: float = 5.0, sleep: Callable[[float], object] = time.sleep
) -> Iterator[dict[str, Number]]:
    """Yields each line of a run's metrics.jsonl once, as it is written, until the run has ended or was killed.

    The run need not have begun: if there is no folder, standard error says so. One that resumes from an earlier step writes the
    steps since then again, with the same values: they are not yielded again.

    Args:
        folder: The run's folder, its --out-dir.
        seconds: Time between two looks at the file.
        sleep: Replaces ``time.sleep`` in tests.
    """
    watch, last, was_seen = LifeWatch(Path(folder)), -1, False
    if not Path(folder).is_dir():
        tell(f"{folder} does not exist yet: the metrics of a run are followed once it begins there")
    while True:
        state = watch.look().state  # before the lines, so that the last ones are not missed
        for line in read_metrics(Path(folder) / "metrics.jsonl"):
            if line["step"] > last:
                last = int(line["step"])
                yield line
        if state in ("ended", "killed", "silent") or (state == "unknown" and was_seen):
            return
        was_seen |= state == "running"
        sleep(seconds)
