"""What follows a run beside metrics.jsonl: Prometheus, TensorBoard, a trace of some steps, and lines off a terminal."""

import time
from collections.abc import Callable

import jax

from jaxpar.metrics import exporters
from jaxpar.run.flags import RunFlags
from jaxpar.run.messages import checks, status_watchers
from jaxpar.runtime.host_names import with_port

BEGAN = time.monotonic()


def open_watchers(
    flags: RunFlags,
    say: Callable[[str], None],
    *,
    num_saves: Callable[[], int],
    flops_per_step: float | None,
) -> list[exporters.Watcher]:
    """Returns the exporters that the flags ask for; a --dry-run, and another process than the first, has none.

    Args:
        flags: The flags of the run.
        say: Prints a message.
        num_saves: Returns the number of checkpoints so far.
        flops_per_step: Useful operations of a step on all devices together, for the MFU; None: not known.

    Raises:
        ConfigError: One of them cannot be opened, such as a port that is in use.
    """
    watchers: list[exporters.Watcher] = [*status_watchers()]
    monitoring = flags.monitoring
    if jax.process_index() != 0 or flags.common.dry_run:
        return watchers
    with checks():
        if monitoring.metrics_port:
            server = exporters.PrometheusExporter(
                monitoring.metrics_port,
                address=monitoring.metrics_address,
                num_saves=num_saves,
                flops_per_step=flops_per_step,
                began=BEGAN,
            )
            watchers.append(server)
            say(f"metrics at http://{with_port(monitoring.metrics_address, server.port)}/metrics")
        if monitoring.tensorboard:
            watchers.append(exporters.TensorBoardWriter(flags.common.out_dir / "tensorboard"))
        if monitoring.profile:
            steps = exporters.parse_steps(monitoring.profile, flags.common.steps)
            watchers.append(exporters.StepProfiler(steps, flags.common.out_dir / "profile"))
    return watchers
