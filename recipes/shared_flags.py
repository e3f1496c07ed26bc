"""The flags that all training recipes share, and their checks."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.metrics import exporters
from jaxpar.runtime.watchdog import Budgets

# In the help: the common flags, which come first, and groups that are seldom needed.
GROUPS = {
    "common": (
        "steps",
        "batch_size",
        "learning_rate",
        "seed",
        "out_dir",
        "checkpoint_every",
        "resume",
        "overwrite",
        "fake_devices",
        "dry_run",
    ),
    "checkpoint": ("checkpoint_minutes", "keep", "keep_every", "keep_best", "allow_change", "max_skipped"),
    "monitoring": ("log_seconds", "log_json", "metrics_port", "metrics_address", "profile", "tensorboard"),
    "gpu": ("compile_for", "nodes", "gpus_per_node"),
}


@dataclass(frozen=True)
class Mesh:
    data: int = 1
    """Replicas, each with a part of the rows of a batch; -1: the devices that the other axes leave."""
    stage: int = 1
    """Pipeline stages, each with a part of the layers; -1: the devices that the other axes leave."""
    tensor: int = 1
    """Shards of each weight; -1: the devices that the other axes leave."""


@dataclass(frozen=True, kw_only=True)
class SharedFlags:
    mesh: Mesh = field(default_factory=Mesh)
    fake_devices: int = 0
    """CPU devices to simulate, to try a mesh on any machine; 0: the real devices."""
    steps: int = 300
    """Training steps of the complete run, including those before a --resume."""
    out_dir: Path = Path("runs")
    """Folder for config.json, metrics.jsonl, plots and checkpoints."""
    resume: bool = False
    """Resume from the newest undamaged checkpoint in --out-dir, on this or another mesh."""
    overwrite: bool = False
    """Delete an earlier run in --out-dir once this one is compiled. Without it, a new run is refused where there are results of
    another. A run that is restarted from its checkpoint ignores it."""
    dry_run: bool = False
    """Check, compile and print the cost of a step; train and write nothing."""
    checkpoint_every: int = 0
    """Steps between two checkpoints, with one more at the end; 0: only one, when Ctrl-C or SIGTERM asks the run to stop."""
    checkpoint_minutes: float = 0.0
    """Minutes between two checkpoints, with one more at the end; 0: as for --checkpoint-every."""
    seed: int = 0
    """Seed of the initial parameters and of the order of rows; 0 or more."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep each checkpoint whose step this divides; 0: none."""
    keep_best: str | None = None
    """Also keep the checkpoint with the smallest metric of this name, such as test_loss; with "-" before it, the largest."""
    allow_change: tuple[str, ...] = ()
    """Flags that may differ from the checkpoint's run on --resume, such as learning_rate or batch_size; errors name them."""
    max_skipped: int = 10
    """Consecutive skipped steps, whose gradients are not finite, before the run ends with exit code 86; 0: any number."""
    budget: Budgets = field(default_factory=Budgets)
    log_seconds: float | None = None
    """Off a terminal, seconds between two lines about the run: its phase, step, loss, rate and time left; 0: none. None: the
    environment's JAXPAR_LOG_SECONDS, or 15."""
    log_json: bool = False
    """Print each message and each of these lines as a line of JSON."""
    metrics_port: int = 0
    """Port at which to serve the run's metrics to Prometheus; 0: none."""
    metrics_address: str = "127.0.0.1"
    """Address at which to serve them; the default is reachable from this machine only, 0.0.0.0 from all."""
    profile: str = ""
    """Steps to trace, such as 10:13 for 10, 11 and 12, into --out-dir/profile for Perfetto or xprof."""
    tensorboard: bool = False
    """Also write the run's metrics for TensorBoard, into --out-dir/tensorboard."""
    compile_for: str | None = None
    """A dry run for GPUs that are not here: a100-40gb, a100-80gb, h100, h200 or b200. It needs the extra gpu-compile."""
    nodes: int | None = None
    """Nodes to --compile-for. None: 1."""
    gpus_per_node: int | None = None
    """GPUs of each node to --compile-for. None: 8."""


def check_shared(flags: SharedFlags) -> None:
    """Raises where a shared flag is out of range; the mesh is checked when it is created."""
    for name, least, remedy in (
        ("fake_devices", 0, "Give the number of CPU devices to simulate, or leave it out for the real ones."),
        ("steps", 1, "Choose 1 or more."),
        ("checkpoint_every", 0, "Give a number of steps, or leave it out for no checkpoints."),
        ("checkpoint_minutes", 0, "Give a number of minutes, or leave it out for no checkpoints."),
        ("max_skipped", 0, "Choose 10, say, or 0 for any number."),
    ):
        if not least <= getattr(flags, name) < float("inf"):
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least {least}; got {getattr(flags, name)}. {remedy}"
            )
    if not 0 <= flags.metrics_port < 2**16:
        raise ValueError(f"--metrics-port must be from 1 to 65535; got {flags.metrics_port}. Choose 9090, say.")
    log_seconds(flags.log_seconds)
    if flags.profile:
        exporters.parse_steps(flags.profile, flags.steps)
    if not 0 <= flags.seed < 2**32:  # JAX would drop the higher bits
        raise ValueError(f"--seed must be from 0 to {2**32 - 1}; got {flags.seed}. Choose 0, say.")
    check_devices(flags)
    check_out_dir(flags.out_dir)


def may_change(flags: SharedFlags, name: str) -> bool:
    """Returns whether a setting may differ from the saved one: in a new run, or where --allow-change names it."""
    return not flags.resume or name in flags.allow_change


def log_seconds(given: float | None) -> float:
    """Returns the seconds between two lines about the run; raises ValueError where they are no such number.

    Args:
        given: The flag --log-seconds. None: the environment's JAXPAR_LOG_SECONDS, or 15.
    """
    value = os.environ.get("JAXPAR_LOG_SECONDS", "15") if given is None else given
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"--log-seconds, or JAXPAR_LOG_SECONDS, must be a number of seconds, 0 or more; got {value}. Choose 15, say, or 0 "
            "for no lines."
        )
    return seconds


def check_devices(flags: SharedFlags) -> None:
    """Raises where the flags that choose devices do not go together."""
    for name in ("nodes", "gpus_per_node"):
        if getattr(flags, name) is not None and not flags.compile_for:
            raise ValueError(
                f"--{name.replace('_', '-')} applies to --compile-for; got no such flag. Add --compile-for h100, say."
            )
    if flags.overwrite and flags.resume:
        raise ValueError(
            "--overwrite deletes the earlier run, which --resume continues; got both. Leave one of the two out."
        )
    for name, given in (("--fake-devices", flags.fake_devices), ("--resume", flags.resume)):
        if given and flags.compile_for:
            raise ValueError(
                f"--compile-for compiles a first step for GPUs that are not here; got {name} too. Leave one of the two out."
            )


def check_out_dir(out_dir: Path) -> None:
    """Raises unless ``--out-dir`` is a writable folder, or can be created."""
    there = next(path for path in (out_dir.absolute(), *out_dir.absolute().parents) if path.exists())
    why = "" if there.is_dir() else "is a file"
    if not why:
        try:
            with tempfile.TemporaryFile(dir=there):  # permissions do not tell of /proc or a full disk
                pass
        except OSError as error:
            why = f"may not be written to ({error.strerror})"
    if why:
        raise ValueError(
            f"--out-dir must be a folder that can be written to; got {out_dir}, but {there} {why}. Name another."
        )
